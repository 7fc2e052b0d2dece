"""Transfer speed between two processes: TCP and shared memory beside what the machine can do.

    python benchmarks/transfer.py [--json OUT] [--sizes 1MiB,64MiB] [--rounds N]

Baselines of the same sizes, between distinct buffers: memcpy in one thread and in two, a raw socket
with one connection and with two (`sendall` into `recv_into`, acknowledged). All of them take turns
in every round, so a slow minute of the machine hits all alike. Shown are medians over the rounds
and, for machines that do other work meanwhile, the best round of each.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mooncake.base.clock import MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.memory import format_bytes, parse_bytes
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.memory import allocate_shared
from mooncake.transfer.router import RoutedTransfer

BUFFER_BYTES = 256 * 2**20
"""Both ends walk through this much memory, so that no block is copied twice from cache."""
BYTES_A_TURN = 64 * 2**20
LANES = 2
Turn = Callable[[int, int], float]
"""(block bytes, number of blocks) -> seconds."""


def plain_buffer() -> memoryview:
    """Return resident memory of our own."""
    memory: mmap.mmap = allocate_shared(BUFFER_BYTES, "benchmark")[0]
    return memoryview(memory)


def offsets(size: int, count: int) -> list[int]:
    """Return where the blocks of one turn start: one after the other, round and round."""
    fit = BUFFER_BYTES // size
    return [(index % fit) * size for index in range(count)]


class MemcpyTurn:
    """Copies blocks with numpy in `num_threads` threads, each its own part of every block."""

    def __init__(self, num_threads: int) -> None:
        self._source = np.frombuffer(plain_buffer(), dtype=np.uint8)
        self._target = np.frombuffer(plain_buffer(), dtype=np.uint8)
        self._num_threads = num_threads

    def __call__(self, size: int, count: int) -> float:
        share = size // self._num_threads

        def work(lane: int) -> None:
            for offset in offsets(size, count):
                start = offset + lane * share
                np.copyto(self._target[start : start + share], self._source[start : start + share])

        return timed_threads(work, self._num_threads)


class SocketTurn:
    """Sends blocks over raw sockets to the other process, each acknowledged with one byte."""

    def __init__(self, ports: list[int]) -> None:
        self._source = plain_buffer()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self, size: int, count: int) -> float:
        share = size // len(self._sockets)

        def work(lane: int) -> None:
            sock = self._sockets[lane]
            sock.sendall(share.to_bytes(8, "little") + count.to_bytes(8, "little"))
            for offset in offsets(size, count):
                start = offset + lane * share
                sock.sendall(self._source[start : start + share])
                if not sock.recv(1):
                    raise ConnectionError("the other process has gone")

        return timed_threads(work, len(self._sockets))


def timed_threads(work: Callable[[int], None], num_threads: int) -> float:
    """Run `work(lane)` in each lane; return the seconds until all are done."""
    if num_threads == 1:
        start = time.perf_counter()
        work(0)
        return time.perf_counter() - start
    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def receive_blocks(listener: socket.socket, lane: int, target: memoryview) -> None:
    """The other end of one connection of `SocketTurn`."""
    sock, _ = listener.accept()
    head = bytearray(16)
    while sock.recv_into(head, 16, socket.MSG_WAITALL) == 16:
        share, count = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8))
        for index in range(count):
            start = (index * LANES * share + lane * share) % (BUFFER_BYTES - share + 1)
            done = 0
            while done < share:
                done += sock.recv_into(target[start + done : start + share])
            sock.send(b"k")
    sock.close()


class TransferTurn:
    """Moves blocks with our transfer engine, `depth` batches under way at a time."""

    def __init__(self, transfer: RoutedTransfer, peer: tuple[SegmentRef, int], op: Op, depth: int):
        self._transfer = transfer
        self._segment, self._remote = peer
        self._region = transfer.allocate(BUFFER_BYTES, "benchmark")
        self._op = op
        self._depth = depth

    def __call__(self, size: int, count: int) -> float:
        waiting = offsets(size, count)[::-1]
        under_way = 0
        start = time.perf_counter()
        while waiting or under_way:
            while waiting and under_way < self._depth:
                offset = waiting.pop()
                op = TransferOp(self._region.region_id, offset, self._remote, offset, size)
                self._transfer.submit(TransferBatch(op=self._op, peer=self._segment, ops=[op]))
                under_way += 1
            select.select([self._transfer], [], [])
            for done in self._transfer.poll():
                if done.error is not None:
                    raise RuntimeError(done.error)
                under_way -= 1
        return time.perf_counter() - start


def open_for(protocol: str, engine_id: str) -> RoutedTransfer:
    """Return an engine that speaks `protocol` only."""
    config = TransferConfig(secret="benchmark", host="here", protocols=[protocol])
    return open_transfer(config, engine_id, MonotonicClock())


def serve(pipe: Connection) -> None:
    """The other process: memory for both protocols, and receivers for the raw sockets."""
    engines = [open_for(protocol, f"owner-{protocol}") for protocol in ("tcp", "shm")]
    regions = [engine.allocate(BUFFER_BYTES, "benchmark") for engine in engines]
    target = plain_buffer()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + LANES)]
    for index, listener in enumerate(listeners):
        lane = max(0, index - 1)
        threading.Thread(target=receive_blocks, args=(listener, lane, target), daemon=True).start()
    peers = [
        (engine.segment, region.region_id) for engine, region in zip(engines, regions, strict=True)
    ]
    pipe.send((peers, [listener.getsockname()[1] for listener in listeners]))
    pipe.recv()
    for engine in engines:
        engine.close()


Speeds = dict[int, dict[str, list[float]]]
"""Block bytes -> name -> GB/s of each round."""


def measure(turns: dict[str, Turn], sizes: list[int], rounds: int) -> Speeds:
    """Run all turns of a size, one after the other, `rounds` times after one to warm up."""
    table: Speeds = {}
    for size in sizes:
        count = max(1, BYTES_A_TURN // size)
        table[size] = {name: [] for name in turns}
        for round_no in range(rounds + 1):
            for name, turn in turns.items():
                speed = size * count / turn(size, count) / 1e9
                if round_no > 0:
                    table[size][name].append(speed)
        print(f"{format_bytes(size)} done", file=sys.stderr)
    return table


def report(title: str, table: Speeds, summary: Callable[[list[float]], float]) -> str:
    """Return the table for people: GB/s, then ratios to the baselines of the same run."""
    rows = {
        size: {name: summary(values) for name, values in row.items()} for size, row in table.items()
    }
    names = list(next(iter(rows.values())))
    lines = [f"{title}, GB/s", " " * 10 + "".join(f"{name:>14}" for name in names)]
    for size, row in rows.items():
        lines.append(f"{format_bytes(size):10}" + "".join(f"{row[name]:14.2f}" for name in names))
    for name in names:
        for base in baselines(name):
            ratios = (
                f"{format_bytes(size)} {row[name] / row[base]:.2f}" for size, row in rows.items()
            )
            lines.append(f"{name:>12} / {base:10} " + "   ".join(ratios))
    return "\n".join(lines) + "\n"


def baselines(name: str) -> list[str]:
    """Return what a row of ours is compared with."""
    if name.startswith("tcp"):
        return ["socket x1", "socket x2"]
    return ["memcpy x1"] if name.startswith("shm") else []


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="write GB/s of every round to this file")
    parser.add_argument("--sizes", default="1MiB,4MiB,16MiB,64MiB")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    sizes = [parse_bytes(text) for text in arguments.sizes.split(",")]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    (tcp_peer, shm_peer), ports = ours.recv()
    tcp, shm = open_for("tcp", "visitor-tcp"), open_for("shm", "visitor-shm")
    turns: dict[str, Turn] = {
        "memcpy x1": MemcpyTurn(1),
        "memcpy x2": MemcpyTurn(2),
        "socket x1": SocketTurn(ports[:1]),
        "socket x2": SocketTurn(ports[1:]),
        "tcp write": TransferTurn(tcp, tcp_peer, Op.WRITE, 1),
        "tcp read": TransferTurn(tcp, tcp_peer, Op.READ, 1),
        "tcp write d4": TransferTurn(tcp, tcp_peer, Op.WRITE, 4),
        "shm write": TransferTurn(shm, shm_peer, Op.WRITE, 1),
        "shm read": TransferTurn(shm, shm_peer, Op.READ, 1),
    }
    table = measure(turns, sizes, arguments.rounds)
    print(report("Median", table, statistics.median))
    print(report("Best round", table, max))
    if arguments.json is not None:
        text = {format_bytes(size): row for size, row in table.items()}
        arguments.json.write_text(json.dumps(text, indent=2) + "\n")
    tcp.close()
    shm.close()
    ours.send("done")
    process.join()


if __name__ == "__main__":
    main()
