"""The ways `benchmarks/transfer.py` moves bytes between two processes, and the process at the other
end. A way is called with [block bytes, blocks of a batch, batches, number of the first block] and
returns seconds; a batch has ended at both ends before the next begins.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.support.cores import Ends
from benchmarks.support.upstream import UpstreamProcess
from benchmarks.support.upstream_peer import batches
from mooncake.base.clock import MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.memory import allocate_shared
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.router import RoutedTransfer

BUFFER_BYTES = 256 * 2**20
"""Both ends walk through this much memory, so that no block is copied twice from cache."""
STREAMS = 2
"""Streams of the raw copy: as many as our TCP uses."""
KINDS = ("tcp", "mac", "encrypt", "shm")
"""The ways of our engines: TCP with each protection, and shared memory. Each moves blocks both
ways."""
Way = Callable[[list[int]], float]
Place = tuple[SegmentRef, int, int]
"""Memory at the other end: where, its region, and the grant by which it may be written to."""


def plain_buffer() -> memoryview:
    """Return resident memory of our own."""
    memory = memoryview(allocate_shared(BUFFER_BYTES, "benchmark")[0])
    memory[:: mmap.PAGESIZE] = bytes(BUFFER_BYTES // mmap.PAGESIZE)
    return memory


class Memcpy:
    """Copies blocks with numpy in one thread."""

    def __init__(self, source: memoryview) -> None:
        self._source = np.frombuffer(source, dtype=np.uint8)
        self._target = np.frombuffer(plain_buffer(), dtype=np.uint8)

    def __call__(self, work: list[int]) -> float:
        size, plan = work[0], batches(work, BUFFER_BYTES)
        begun = time.perf_counter()
        for starts in plan:
            for start in starts:
                np.copyto(self._target[start : start + size], self._source[start : start + size])
        return time.perf_counter() - begun


class RawSockets:
    """Sends blocks over raw sockets, each its share of every block; a batch is acknowledged with
    one byte. Threads and connections stay.
    """

    def __init__(self, source: memoryview, ports: list[int]) -> None:
        self._source = source
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self, work: list[int]) -> float:
        size, plan = work[0], batches(work, BUFFER_BYTES)
        share = size // len(self._sockets)

        def send(lane: int) -> None:
            sock = self._sockets[lane]
            sock.sendall(struct.pack("<4Q", share, *work[1:]))
            for starts in plan:
                for start in starts:
                    at = start + lane * share
                    sock.sendall(self._source[at : at + share])
                if not sock.recv(1):
                    raise ConnectionError("the other process has gone")

        return timed_threads(send, len(self._sockets))


def timed_threads(work: Callable[[int], None], num_threads: int) -> float:
    """Run `work(connection)` in each connection; return the seconds until all are done."""
    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(1, num_threads)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def receive_blocks(listener: socket.socket, lane: int, width: int, target: memoryview) -> None:
    """The other end of one connection of `RawSockets`, one of `width`."""
    sock, _ = listener.accept()
    head = bytearray(32)
    while sock.recv_into(head, 32, socket.MSG_WAITALL) == 32:
        share, batch, times, first = struct.unpack("<4Q", head)
        for index in range(first, first + batch * times):
            start = (index * width + lane) * share % BUFFER_BYTES
            done = 0
            while done < share:
                done += sock.recv_into(target[start + done : start + share])
            if (index + 1 - first) % batch == 0:
                sock.send(b"k")
    sock.close()


class Ours:
    """Our transfer engine, one batch after the other."""

    def __init__(self, transfer: RoutedTransfer, peer: Place, op: Op) -> None:
        self._transfer = transfer
        self._segment, self._remote, grant = peer
        self._grant = grant if op is Op.WRITE else 0
        self._region = transfer.allocate(BUFFER_BYTES, "benchmark").region_id
        self._op = op

    def __call__(self, work: list[int]) -> float:
        size, plan = work[0], batches(work, BUFFER_BYTES)
        begun = time.perf_counter()
        for starts in plan:
            ops = [TransferOp(self._region, at, self._remote, at, size) for at in starts]
            batch = TransferBatch(op=self._op, peer=self._segment, ops=ops, grant=self._grant)
            self._transfer.submit(batch)
            [done] = self._transfer.wait()
            if done.error is not None:
                raise RuntimeError(done.error)
        return time.perf_counter() - begun


class Upstream:
    """Upstream's transfer engine between two processes of its own."""

    def __init__(self, visitor: UpstreamProcess, place: tuple[str, int], op: str) -> None:
        self._visitor = visitor
        self._place = place
        self._op = op

    def __call__(self, work: list[int]) -> float:
        took: float = self._visitor.call("move", self._op, *self._place, work)
        return took


def open_for(kind: str, side: str) -> RoutedTransfer:
    """Return an engine that speaks one protocol only, TCP for each protection."""
    is_protected = kind in (each.value for each in Protection)
    config = TransferConfig(
        secret="benchmark",
        host="here",
        protocols=["tcp" if is_protected else kind],
        protection=Protection(kind) if is_protected else Protection.NONE,
    )
    return open_transfer(config, f"{side}-{kind}", MonotonicClock())


def serve(pipe: Connection) -> None:
    """The other process: memory for all engines, and receivers for the raw sockets."""
    engines = [open_for(kind, "owner") for kind in KINDS]
    regions = [engine.allocate(BUFFER_BYTES, "benchmark") for engine in engines]
    target = plain_buffer()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + STREAMS)]
    for index, listener in enumerate(listeners):
        place = (0, 1) if index == 0 else (index - 1, STREAMS)
        work = (listener, *place, target)
        threading.Thread(target=receive_blocks, args=work, daemon=True).start()
    peers: list[Place] = []
    for engine, region in zip(engines, regions, strict=True):
        engine.guard(region)
        peers.append((engine.segment, region.region_id, engine.grant()))
    pipe.send((peers, [listener.getsockname()[1] for listener in listeners]))
    pipe.recv()
    for engine in engines:
        engine.close()


class World:
    """All ways, and the processes at their other ends. Leaving the context ends them."""

    def __init__(self, *, with_upstream: bool, apart: bool) -> None:
        """`apart`: each end has cores of its own.

        Raises RuntimeError when upstream does not start.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._upstream: list[UpstreamProcess] = []
        ends = Ends(apart=apart)
        with ends.other():
            self._process.start()
            if with_upstream:
                self._upstream.append(UpstreamProcess("engine", BUFFER_BYTES))
        peers, ports = self._pipe.recv()
        self._engines = [open_for(kind, "visitor") for kind in KINDS]
        source = plain_buffer()
        self.ways: dict[str, Way] = {
            "memcpy": Memcpy(source),
            "raw socket": RawSockets(source, ports[:1]),
            "raw sockets": RawSockets(source, ports[1:]),
        }
        for kind, engine, peer in zip(KINDS, self._engines, peers, strict=True):
            self.ways[f"{kind} write"] = Ours(engine, peer, Op.WRITE)
            self.ways[f"{kind} read"] = Ours(engine, peer, Op.READ)
        if with_upstream:
            place = self._upstream[0].call("place")
            self._upstream.append(UpstreamProcess("engine", BUFFER_BYTES))
            for op in ("write", "read"):
                self.ways[f"upstream {op}"] = Upstream(self._upstream[1], place, op)

    def close(self) -> None:
        """End all processes."""
        for member in self._upstream:
            member.close()
        for engine in self._engines:
            engine.close()
        self._pipe.send("done")
        self._process.join()
