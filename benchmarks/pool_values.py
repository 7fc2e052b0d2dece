"""Putting and getting values of 1 to 32 MiB: our pool beside upstream's store, over TCP.

    python -m benchmarks pool-values [--sizes 1MiB,32MiB] [--rounds N] [--page OUT]

A client process and a node process each, on one machine; values go straight from and to registered
memory (`put_from`, `get_into`), under a fresh name every time, and each is removed before the next
round. Ours hashes every block at both ends, upstream hashes none; both move every byte through the
loopback (`lo` counts it). `plain` moves the same bytes by bare sockets on one and two connections,
and does nothing else: the floor. Upstream is run only in a network
that holds nothing but the loopback, which is made where allowed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from benchmarks.support import thread_times, upstream
from benchmarks.support.bars import bars, write_page
from benchmarks.support.cores import Ends
from benchmarks.support.plain_values import PlainValues
from benchmarks.support.servers import load, machine
from mooncake.base import KvLayout, MonotonicClock, Role, SystemIds, WorkerHello, WorkerRef
from mooncake.base.memory import format_bytes, parse_bytes
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.pool_client.session import PoolSession, PoolSessionConfig
from mooncake.launch.pool_node.disks import open_disks
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import Recorders
from mooncake.transfer.choices import AUTO, choose_protection
from mooncake.transfer.engine import Asked
from mooncake.transfer.factory import TransferConfig, open_transfer

MIB = 2**20
NODE_BYTES = 1024 * MIB
CLIENT_BYTES = 64 * MIB
SECRET = "a secret of this benchmark"
Way = Callable[[str, int, int], float]
"""(name, where in the client's memory, bytes) -> seconds."""


def layout_of(block_bytes: int) -> KvLayout:
    """Return a layout whose blocks have so many bytes, a multiple of 1 KiB."""
    width = block_bytes // 2**10
    return KvLayout(
        num_layers=8, block_tokens=64, kv_width=width, dtype="bfloat16", fingerprint="values"
    )


class CountingNode(KvNode):
    """A pool node that counts the questions by which blocks are got."""

    num_asked = 0

    def handle(self, event: msgspec.Struct, now: float) -> None:
        self.num_asked += isinstance(event, Asked) and event.piece_bytes > 0
        super().handle(event, now)


def serve_node(pipe: Connection, block_bytes: int, protection: str) -> None:
    """One pool node and the pool's registry, driven until the pipe ends them. Before that, anything
    that comes through the pipe is answered with the CPU seconds of this process so far and the
    number of its questions, or the names of its threads.
    """
    layout = layout_of(block_bytes)
    channel, registry_channel = (
        ZmqChannel("127.0.0.1", credential=own_credential(SECRET, *CredentialRole))
        for _ in range(2)
    )
    clock, ids, scheduler = MonotonicClock(), SystemIds(), SchedulerConfig()
    gateway = WorkerRef("gateway", ids.hex(8), registry_channel.address)
    registry = Gateway(
        scheduler, gateway, Conductor(scheduler, ids), registry_channel, ids, Recorders()
    )
    wanted = TransferConfig(
        secret=SECRET, host=machine_facts.boot_id(), protocols=["tcp", "shm"],
        protection=choose_protection(protection),
    )  # fmt: skip
    transfer = open_transfer(wanted, "values-node", clock)
    hello = WorkerHello(
        worker=WorkerRef("kv", "e1", channel.address), role=Role.KVSTORE, node_id="n", host="h",
        pid=1, layout_fingerprint=layout.fingerprint, block_tokens=64, num_blocks=0,
    )  # fmt: skip
    config = KvStoreConfig(dram_bytes=NODE_BYTES)
    disks = open_disks(config, layout)
    node = CountingNode(config, hello, layout, channel, transfer, gateway.address, disks)
    drivers = [
        Driver(registry, registry_channel),
        Driver(node, channel, transfer=transfer, polled=[disks], clock=clock, shares=True),
    ]
    threads = [threading.Thread(target=driver.run) for driver in drivers]
    for thread in threads:
        thread.start()
    pipe.send((channel.address, gateway.address))
    while (asked := pipe.recv()) != "done":
        figures = time.process_time(), node.num_asked
        pipe.send(thread_times.own_names() if asked == "threads" else figures)
    for driver, thread in zip(drivers, threads, strict=True):
        driver.stop()
        thread.join()
    disks.close()
    channel.close()
    registry_channel.close()
    transfer.close()


class Ours:
    """Values as runs of blocks through one session."""

    def __init__(self, session: PoolSession, pipe: Connection, node_pid: int) -> None:
        self.pids = {"client": os.getpid(), "node": node_pid}
        self._session = session
        self._pipe = pipe
        session.memory[:] = bytes(range(256)) * (CLIENT_BYTES // 256)

    def _run(self, name: str, start: int, size: int) -> tuple[list[bytes], list[int]]:
        head = name.encode().ljust(12, b".")[:12]
        block = self._session.block_bytes
        keys = [head + n.to_bytes(4, "big") for n in range(size // block)]
        return keys, list(range(start, start + size, block))

    def put(self, name: str, start: int, size: int) -> float:
        """Store a value; return the seconds it took."""
        keys, offsets = self._run(name, start, size)
        begun = time.perf_counter()
        written = self._session.put_from(keys, offsets)
        took = time.perf_counter() - begun
        if len(written) != len(keys):
            raise RuntimeError(f"{name}: {len(written)} of {len(keys)} blocks were taken")
        return took

    def get(self, name: str, start: int, size: int) -> float:
        """Fetch a value; return the seconds it took."""
        keys, offsets = self._run(name, start, size)
        begun = time.perf_counter()
        count = self._session.get_into(keys, offsets)
        took = time.perf_counter() - begun
        if count != len(keys):
            raise RuntimeError(f"{name}: {count} of {len(keys)} blocks came")
        return took

    def remove(self, name: str, size: int) -> None:
        """Take a value out again."""
        self._session.remove(self._run(name, 0, size)[0])

    def names(self) -> dict[int, str]:
        """Return the names of both ends' threads by their ids."""
        self._pipe.send("threads")
        of_node: dict[int, str] = self._pipe.recv()
        return thread_times.own_names() | of_node

    def figures(self) -> tuple[float, int]:
        """Return the CPU seconds of the node and of this process together, and how many questions
        the node has had.
        """
        self._pipe.send("figures")
        node_s, num_asked = self._pipe.recv()
        return node_s + time.process_time(), num_asked


@contextmanager
def our_pool(
    protocol: str, ends: Ends, block_bytes: int = MIB, protection: str = AUTO
) -> Iterator[Ours]:
    """A node in a process of its own, and a client of it here. `protection`: one of
    `--transfer-protection`, at both ends.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=serve_node, args=(theirs, block_bytes, protection), daemon=True
    )
    with ends.other():
        process.start()
    store, gateway = pipe.recv()
    settings = PoolSessionConfig(
        gateway_address=gateway, cluster_secret=SECRET, layout=layout_of(block_bytes),
        store_address=store, transfer_protocols=[protocol],
        num_places=CLIENT_BYTES // block_bytes, transfer_protection=protection,
    )  # fmt: skip
    with PoolSession(settings) as session:
        yield Ours(session, pipe, process.pid or 0)
    pipe.send("done")
    process.join()


class Theirs:
    """Values of upstream's store, through a client of it that holds none."""

    def __init__(
        self, client: upstream.UpstreamProcess, pids: Mapping[str, int], num_keys: int = 1
    ) -> None:
        """Each value has so many names, with as many bytes each. `pids` of its processes."""
        self.pids = pids
        self._client = client
        self._num_keys = num_keys

    def put(self, name: str, start: int, size: int) -> float:
        """Store a value; return the seconds it took."""
        took: float = self._client.call("put", name, start, size, self._num_keys)
        return took

    def get(self, name: str, start: int, size: int) -> float:
        """Fetch a value; return the seconds it took."""
        took: float = self._client.call("get", name, start, size, self._num_keys)
        return took

    def remove(self, name: str, _size: int) -> None:
        """Take a value out again, unless its lease still runs: then the store evicts it."""
        self._client.call("remove", name, self._num_keys)

    def cut(self, num_keys: int) -> Theirs:
        """Return the same store for values that have so many names."""
        return Theirs(self._client, self.pids, num_keys)


@contextmanager
def upstream_store(ends: Ends) -> Iterator[Theirs]:
    """Upstream's master, a process that lends memory to the store, and a client."""
    ports = [free_port() for _ in range(2)]
    programs = upstream.ENVIRONMENT / "bin"
    with ExitStack() as opened:
        words = [f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
        options = ["--rpc_address=127.0.0.1", "--default_kv_lease_ttl=200"]
        address = f"127.0.0.1:{ports[0]}"
        with ends.other():
            master = subprocess.Popen(
                # -I: it must not import this repository's package, which has upstream's name.
                [programs / "python", "-I", programs / "mooncake_master", *words, *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            opened.callback(master.wait)
            opened.callback(master.kill)
            wait_for_listener(ports[0])
            member = upstream.UpstreamProcess("store", address, NODE_BYTES, CLIENT_BYTES)
            opened.enter_context(member)
        client = upstream.UpstreamProcess("store", address, 0, CLIENT_BYTES)
        opened.enter_context(client)
        if ends.apart:
            client.call("let_threads_go_first")
        pids = {"client": client.pid, "master": master.pid, "member": member.pid}
        yield Theirs(client, pids)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for_listener(port: int, seconds: float = 30.0) -> None:
    """Raise TimeoutError unless somebody listens on the port in time."""
    limit = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError as error:
            if time.monotonic() > limit:
                raise TimeoutError(f"nobody listens on port {port}") from error
            time.sleep(0.05)


Figures = dict[int, dict[str, list[float]]]
"""Bytes of a value -> what -> seconds of each round."""


Pool = Ours | Theirs | PlainValues


def measure(pools: dict[str, Pool], sizes: Sequence[int], rounds: int) -> Figures:
    """Put and get by turns, `rounds` times after one to warm up."""
    figures: Figures = {}
    for size in sizes:
        found = figures[size] = {f"{name} {op}": [] for op in ("put", "get") for name in pools}
        for number in range(rounds + 1):
            name = f"v{size // MIB}.{number}"
            start = (number * size) % CLIENT_BYTES
            for who, pool in pools.items():
                for op, call in (("put", pool.put), ("get", pool.get)):
                    took = call(name, start, size)
                    if number:
                        found[f"{who} {op}"].append(took)
            if number:
                for pool in pools.values():
                    pool.remove(f"v{size // MIB}.{number - 1}", size)
        print(f"{format_bytes(size)} done", file=sys.stderr)
    return figures


def table(figures: Figures) -> str:
    """Return the table: ms (GB/s), then upstream's time by ours."""
    head = "| | " + " | ".join(format_bytes(size) for size in figures) + " |"
    lines = [head, "|---" * (1 + len(figures)) + "|"]
    names = list(next(iter(figures.values())))
    for name in names:
        cells = []
        for size, row in figures.items():
            took = statistics.median(row[name])
            cells.append(f"{1e3 * took:.2f} ({size / took / 1e9:.1f})")
        lines.append(f"| {name}, ms (GB/s) | " + " | ".join(cells) + " |")
    pairs = [(who, "upstream") for who in ("tcp", "shm", "plain")] + [("tcp", "plain")]
    for who, peer in pairs:
        for op in ("put", "get"):
            if all(of(row, peer, op) for row in figures.values()):
                cells = [
                    f"{speedup(of(row, who, op), of(row, peer, op)):.2f}x"
                    for row in figures.values()
                ]
                lines.append(f"| speed of {who} {op} / {peer} {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def of(row: Mapping[str, list[float]], who: str, op: str) -> list[float]:
    """Return the seconds of one pool; of `plain`, on as many connections as were faster."""
    ways = [took for name, took in row.items() if name.startswith(who) and name.endswith(op)]
    return min(ways, key=statistics.median, default=[])


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the rounds of their time by ours."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def main(argv: Sequence[str]) -> int:
    """See the module."""
    args = _arguments(argv)
    reason = "not asked for" if args.no_upstream else upstream.prepare("pool-values", list(argv))
    sizes = [parse_bytes(text) for text in args.sizes.split(",")]
    about = machine()
    ends = Ends(apart=args.apart)
    with ExitStack() as opened:
        pools: dict[str, Pool] = {
            protocol: opened.enter_context(our_pool(protocol, ends)) for protocol in ("tcp", "shm")
        }
        for number, name in ((1, "plain"), (2, "plain, two")):
            pools[name] = opened.enter_context(PlainValues(number, CLIENT_BYTES, ends))
        if reason is None:
            pools["upstream"] = opened.enter_context(upstream_store(ends))
        figures = measure(pools, sizes, args.rounds)
    peer = f"upstream {upstream.VERSION}" if reason is None else f"without upstream ({reason})"
    said = f"{about}; {args.rounds} rounds, load {load()}; {peer}\n\n{table(figures)}"
    print(said)
    groups = {
        format_bytes(size): {
            name: size / statistics.median(values) / 1e9 for name, values in row.items()
        }
        for size, row in figures.items()
    }
    title = "Values put to and got from a pool"
    write_page(args.page, title, said, [bars(title, "GB/s", groups, "tcp shm")])
    print(f"\nplot: {args.page}")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pool-values", description=__doc__)
    parser.add_argument("--sizes", default="1MiB,2MiB,4MiB,8MiB,16MiB,32MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-upstream", action="store_true")
    parser.add_argument(
        "--apart", action="store_true", help="each end has cores of its own, as on two machines"
    )
    parser.add_argument("--page", type=Path, default=Path("build/benchmarks/pool_values.html"))
    return parser.parse_args(argv)
