"""A large model that a joining engine reads from a running one, simulated: `python -m benchmarks
lent-weights-simulated`.

Counts the pieces that each rank of an engine needs, from the shapes and cuts of the model's
tensors, and plays their way on the simulator's clock: the lender's loops, or its threads that copy
to windows, its memory, the cards, the borrower's loops, the threads that check pieces, the memory
of the borrower, the way to the GPU. Each is a queue that serves pieces in the order in which they
come. Prints how long the load takes, and which queue was busy for most of it. Figures of machines
come from `configs/hardware`, others from `FIGURES`, each with its source.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mooncake.base import ModelSpec, Shape
from mooncake.launch.config.shipped import configs, figures
from mooncake.launch.worker.weights.weights_lender import MAX_COPIES, MAX_LOOPS
from mooncake.model.checkpoint.files.revision import PIECE_BYTES
from mooncake.model.checkpoint.quant_format import is_quantized, parse_quantization
from mooncake.model.checkpoint.tensor_cuts import ROUTED, cut_of, tensor_shapes
from mooncake.model.placing import MAX_THREADS
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.cost_model import HardwareFigures
from mooncake.transfer.file_memory import PART_BYTES
from mooncake.transfer.tcp.backend import PeerLimits

FIGURES = {
    "tcp_s_per_byte": (
        0.45e-9 / 2,
        "0.45 CPU seconds for a GB, both sides together, `python -m benchmarks lent-weights` on 2 "
        "cores of an AMD EPYC (Zen 4), without MACs; assumed: each side has half of it",
    ),
    "check_bytes_per_s": (
        29.6e9,
        "XXH128 on one core of an i7-9700K, README of xxHash 0.8; the checksum of a piece is of "
        "this family",
    ),
    "copy_s_per_byte": (
        0.18e-9,
        "CPU seconds of a thread that copies a mapped file to windows, `python -m benchmarks "
        "lent-weights` on 2 cores of an Intel Xeon (Emerald Rapids) beside other work",
    ),
    "window_s": (
        0.12e-3,
        "the lender's loop for a window: half of the 0.24 ms of CPU that windows of 4 KiB cost "
        "both sides over TCP, on the same machine",
    ),
    "memory_bytes_per_s": (
        2 * 8 * 4.8e9 * 8,
        "nominal: 2 processors with 8 channels of DDR5-4800, Intel's data sheet of the Xeon "
        "Platinum 8480C in NVIDIA's DGX H200",
    ),
}
"""Figure -> its value and where it comes from."""
IN_FLIGHT = 3
"""Pieces that a rank has asked for and not checked: one, and two ahead of it."""
NUM_CONNECTIONS = PeerLimits().num_connections
"""Connections of a rank to its lender, each in a loop of its own."""
LEND_PASSES = 4
"""How often a byte goes through the lender's memory: three times as it is copied to a window, which
is fetched before it is written, and once to the card. By TCP it is no more.
"""
CHECK_PASSES, OWN_PASSES, KERNEL_PASSES = 2, 3, 2
"""How often a byte goes through the borrower's memory: from the card and into the check; of a
rank's own parts into a pinned buffer (two) and to the GPU; over TCP once more through the kernel
(two).
"""


@dataclass(frozen=True)
class Needed:
    """What a rank needs of a model's files."""

    num_pieces: int
    """It reads only pieces with bytes of its own parts."""
    num_bytes: int
    """Bytes of the rank's own parts."""


def needed_by_ranks(spec: ModelSpec, config: dict[str, Any], shape: Shape) -> list[Needed]:
    """Return what each rank of a stage needs. Rows of a tensor follow one another in its file; of
    columns there are some in every row.
    """
    quantization = parse_quantization(config.get("quantization_config"))
    pieces: list[set[int]] = [set() for _ in range(shape.tp)]
    own = [0] * shape.tp
    at = 0
    for name, size in tensor_shapes(spec).items():
        num_bytes = math.prod(size) * (1 if is_quantized(quantization, name) else 2)
        whole = shape.ep > 1 and ROUTED in name
        cut = cut_of(spec, name, shape.tp, whole_experts=shape.ep > 1)
        for rank in range(shape.tp):
            first, stop = at, at + num_bytes
            if whole:
                expert = int(name.split(ROUTED)[1].partition(".")[0])
                if expert * shape.ep // spec.n_routed_experts != rank:
                    continue
            share = num_bytes if cut is None else num_bytes // shape.tp
            if cut is not None and cut.dim == 0:
                first, stop = at + rank * share, at + (rank + 1) * share
            own[rank] += share
            pieces[rank].update(range(first // PIECE_BYTES, (stop - 1) // PIECE_BYTES + 1))
        at += num_bytes
    return [Needed(len(pieces[rank]), own[rank]) for rank in range(shape.tp)]


@dataclass(frozen=True)
class Stage:
    """A queue on the way of pieces."""

    name: str
    s_per_byte: float
    """Seconds that one server needs for a byte."""
    num_servers: int = 1
    is_shared: bool = False
    """Whether all ranks share it, or each has one of its own."""


def stages(hardware: HardwareFigures, way: str, used: float) -> list[Stage]:
    """Return the queues of a load. `way`: "tcp" or "rdma". `used`: the share of the bytes read that
    ranks keep.
    """
    ranks, tcp = hardware.num_gpus, way == "tcp"
    loop_s, check, copy_s, window_s, memory = (FIGURES[name][0] for name in FIGURES)
    loops = Stage("the lender's loops", loop_s, num_servers=MAX_LOOPS, is_shared=True)
    link = Stage("the cards", ranks / hardware.link_bytes_per_s)
    sharers = PIECE_BYTES // PART_BYTES
    lends = [
        Stage("the lender's windows", window_s / PIECE_BYTES, is_shared=True),
        # Threads share a piece, so that it is soon there.
        Stage("the lender's copies", copy_s / sharers, MAX_COPIES // sharers, is_shared=True),
    ]
    passes = CHECK_PASSES + used * OWN_PASSES + (KERNEL_PASSES if tcp else 0)
    return [
        *([loops] if tcp else lends),
        Stage("the lender's memory", LEND_PASSES / memory, is_shared=True),
        link,
        *([Stage("the borrower's loops", loop_s, num_servers=NUM_CONNECTIONS)] if tcp else []),
        Stage("the checks", 1 / check, num_servers=MAX_THREADS),
        Stage("the borrower's memory", passes / memory, is_shared=True),
        Stage("the way to the GPUs", used * ranks / hardware.dram_bytes_per_s),
    ]


class Load:
    """One load of weights on simulated time."""

    def __init__(self, pieces: Sequence[int], path: Sequence[Stage], latency_s: float) -> None:
        """`pieces`: how many each rank reads."""
        self._path = path
        self._latency_s = latency_s
        self._heap = EventHeap()
        self._left = list(pieces)
        self._free_s: dict[tuple[int, int], list[float]] = {}
        """(stage, rank) -> when each server of the queue is free."""
        self._busy_s: dict[tuple[int, int], float] = {}
        for rank, count in enumerate(pieces):
            for _ in range(min(IN_FLIGHT, count)):
                self._ask(rank)

    def run(self) -> tuple[float, str, float]:
        """Return the seconds, the queue that was busiest, and the share of the time it was busy."""
        while self._heap.step():
            pass
        took_s = self._heap.now()
        (stage, _), busy_s = max(self._busy_s.items(), key=lambda entry: entry[1])
        return took_s, self._path[stage].name, busy_s / took_s

    def _ask(self, rank: int) -> None:
        self._left[rank] -= 1
        self._heap.after(self._latency_s, partial(self._enter, 0, rank))

    def _enter(self, stage: int, rank: int) -> None:
        if stage == len(self._path):
            return
        if self._path[stage] is self._path[-1] and self._left[rank]:
            self._ask(rank)  # the bytes are in the pinned buffer
        each = self._path[stage]
        queue = stage, 0 if each.is_shared else rank
        servers = self._free_s.setdefault(queue, [0.0] * each.num_servers)
        seconds = PIECE_BYTES * each.s_per_byte
        done_s = max(self._heap.now(), servers[0]) + seconds
        heapq.heapreplace(servers, done_s)
        self._busy_s[queue] = self._busy_s.get(queue, 0.0) + seconds / each.num_servers
        self._heap.at(done_s, partial(self._enter, stage + 1, rank))


ROWS = (("tp8-ep8", "tcp"), ("tp8-ep8", "rdma"), ("tp8", "rdma"))


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks lent-weights-simulated", description=__doc__
    )
    parser.add_argument("--model", default="kimi-k2-instruct", help="a folder of configs/models")
    parser.add_argument("--hardware", default="h200x8", help="a file of configs/hardware")
    args = parser.parse_args(argv)
    config = json.loads((configs() / "models" / args.model / "config.json").read_bytes())
    spec = ModelSpec.from_config(config)
    hardware = figures(args.hardware, HardwareFigures)
    print("| shape | way | read over the cards | seconds | what limits |")
    print("|---|---|---|---|---|")
    for words, way in ROWS:
        needed = needed_by_ranks(spec, config, Shape.parse(words))
        num_read = PIECE_BYTES * sum(each.num_pieces for each in needed)
        used = sum(each.num_bytes for each in needed) / num_read
        path = stages(hardware, way, used)
        pieces = [each.num_pieces for each in needed]
        took_s, name, share = Load(pieces, path, hardware.transfer_latency_s).run()
        size = f"{num_read / 1e12:.2f} TB"
        print(f"| {words} | {way} | {size} | {took_s:.1f} | {name}, {share:.0%} |")
    print()
    for name in ("link_bytes_per_s", "dram_bytes_per_s", "transfer_latency_s"):
        print(f"- {name} = {getattr(hardware, name):g}: {hardware.sources[name]}")
    for name, (value, source) in FIGURES.items():
        print(f"- {name} = {value:g}: {source}")
    return 0
