"""Reading the weights of a running engine beside what the link gives: `python -m benchmarks
lent_weights [--size SIZE] [--rounds N]`.

A second process lends a file of random bytes over TCP on the loopback. Ways take turns in every
round: the whole file by plain reads of the transfer engine, three pieces at a time, and as a
worker reads weights, where each piece is checked before anyone sees it. Prints the median of each
and of their ratios, for connections as they are and with MACs, which is the default between
machines. CPU seconds are those of both processes for each GB: they tell more than times where other
work shares the cores, since the loopback is bound by them. Prints also what a lender's threads
spend to copy the file to windows, from which NICs read it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.support.servers import load, machine, process_cpu_s
from mooncake.base.clock import MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.memory import format_bytes, parse_bytes
from mooncake.base.messages import LentFile
from mooncake.launch.worker.weights.piece_reader import NUM_AHEAD, PieceReader
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import (
    PIECE_BYTES,
    file_digests,
    piece_sums,
    pieces_of,
)
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.file_memory import FileMemory
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.router import RoutedTransfer

PROTECTIONS = (Protection.NONE, Protection.MAC)
READ_BYTES = 16 * 2**20
"""Bytes of one read: a large tensor."""


def opened(side: str, protection: Protection) -> RoutedTransfer:
    """Return a transfer engine for TCP."""
    config = TransferConfig(
        secret="benchmark", host="here", protocols=["tcp"], protection=protection
    )
    return open_transfer(config, f"{side}-{protection.value}", MonotonicClock())


def lend(path: Path, pipe: Connection) -> None:
    """The other process: lends the file until it is told to end."""
    content = PlainBytes(path)
    digest, sums = file_digests([content])[path.name], piece_sums([content])[path.name]
    engines = [opened("lender", protection) for protection in PROTECTIONS]
    lent: list[tuple[SegmentRef, LentFile]] = []
    for engine in engines:
        region = engine.register(content.read(0, content.num_bytes), "weights")
        lent.append(
            (engine.segment, LentFile(path.name, content.num_bytes, region.region_id, digest, sums))
        )
    pipe.send(lent)
    pipe.recv()
    for engine in engines:
        engine.close()


def plain(transfer: RoutedTransfer, segment: SegmentRef, file: LentFile, region: int) -> float:
    """Read the file without a look at it; return GB/s."""
    begun = time.perf_counter()
    left, open_batches = deque(pieces_of(file.num_bytes)), 0
    places = 0
    while left or open_batches:
        while left and open_batches <= NUM_AHEAD:
            begin, end = left.popleft()
            at = places % (NUM_AHEAD + 1) * PIECE_BYTES
            op = TransferOp(region, at, file.region, begin, end - begin)
            transfer.submit(TransferBatch(op=Op.READ, peer=segment, ops=[op]))
            open_batches += 1
            places += 1
        for done in transfer.wait():
            if done.error is not None:
                raise RuntimeError(done.error)
            open_batches -= 1
    return file.num_bytes / (time.perf_counter() - begun) / 1e9


def checked(reader: PieceReader, num_bytes: int) -> float:
    """Read the file as weights; return GB/s."""
    begun = time.perf_counter()
    for begin in range(0, num_bytes, READ_BYTES):
        reader.read(0, begin, min(num_bytes, begin + READ_BYTES))
    return num_bytes / (time.perf_counter() - begun) / 1e9


def copied(content: PlainBytes) -> float:
    """Copy the file to a window, piece by piece; return CPU seconds for a GB."""
    window = memoryview(bytearray(PIECE_BYTES))
    with ThreadPoolExecutor(1) as thread:
        memory = FileMemory(content.read(0, content.num_bytes), thread)
        for _ in range(2):  # the first time touches the memory
            before = time.process_time()
            for begin, end in pieces_of(content.num_bytes):
                told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
                memory.copy_out([(begin, end - begin)], window, told.put)
                if (error := told.get()) is not None:
                    raise RuntimeError(error)
            spent_s = time.process_time() - before
    return spent_s * 1e9 / content.num_bytes


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lent_weights", description=__doc__)
    parser.add_argument("--size", default="1GiB", help="of the file")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    size = parse_bytes(args.size)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        path = Path(folder) / "model.safetensors"
        with path.open("wb") as file:
            for begin, end in pieces_of(size):
                file.write(os.urandom(end - begin))
        process = context.Process(target=lend, args=(path, theirs), daemon=True)
        process.start()
        found = ours.recv()
        assert process.pid is not None
        pids = [process.pid, os.getpid()]
        rows: dict[str, list[tuple[float, float, float, float]]] = {}
        for (segment, lent), protection in zip(found, PROTECTIONS, strict=True):
            transfer = opened("borrower", protection)
            region = transfer.allocate((NUM_AHEAD + 1) * PIECE_BYTES, "plain").region_id
            reader = PieceReader(transfer, segment, [lent], "the other process")
            for number in range(args.rounds + 1):  # the first one touches the memory
                before = process_cpu_s(pids)
                link = plain(transfer, segment, lent, region)
                between = process_cpu_s(pids)
                way = checked(reader, size)
                after = process_cpu_s(pids)
                if number:
                    row = link, way, (between - before) * 1e9 / size, (after - between) * 1e9 / size
                    rows.setdefault(protection.value, []).append(row)
            reader.close()
            transfer.close()
        ours.send("done")
        process.join()
        copy_s = copied(PlainBytes(path))
    print(f"{machine()}; {format_bytes(size)}, {args.rounds} rounds, load {load()}\n")
    print("| connection | plain reads, GB/s | as weights, GB/s | of the link | CPU s for a GB |")
    print("|---|---|---|---|---|")
    for name, found_rows in rows.items():
        link, way, plain_s, way_s = map(statistics.median, zip(*found_rows, strict=True))
        share = statistics.median(row[1] / row[0] for row in found_rows)
        print(f"| {name} | {link:.2f} | {way:.2f} | {share:.2f} | {plain_s:.2f}, {way_s:.2f} |")
    print(f"\nto windows: {copy_s:.2f} CPU s for a GB")
    return 0
