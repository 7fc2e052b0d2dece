"""Placements per second of the Conductor: `python -m benchmarks placement`.

1,000 prefill and 1,000 decode workers, 1,000 pools, prompts of 128k tokens (2,000 blocks) that go
on with conversations whose blocks lie in a few pools and in the HBM of a worker or two, and an
index that holds 10,000,000 blocks. Only the Conductor's own work is timed, on one core: `place` by
itself, and all that a request makes it do: place, first token, end, the events of the blocks it
left behind, and its share of the heartbeats. CPU time of the thread: what else runs on the machine
slows it through the caches alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from benchmarks.kv_index import fresh_keys, resident_bytes
from benchmarks.support.servers import load, machine
from mooncake.base import (
    KEY_BYTES,
    BlockEvents,
    BlockKey,
    CostSample,
    GenerateRequest,
    KeyChain,
    LoadReport,
    Role,
    SamplingParams,
    SeededIds,
    Tier,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    pack_tokens,
)
from mooncake.base.messages import OWN_RELEASE
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import Rejection
from mooncake.scheduler.placement.conductor import Conductor

BLOCK_TOKENS = 64
BLOCK_BYTES = 4_500_000
REQUESTS_UNDER_WAY = 4_000
HEARTBEAT_S = 0.25
PROFILE = [
    CostSample(new, context, 1, 0.002 + 4e-5 * new + 1e-10 * new * context)
    for new in (64, 512, 4096)
    for context in (0, 8192, 65536)
]


class World:
    """A Conductor, its workers' streams of events, and conversations that go on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.random = random.Random(args.seed)
        self.conductor = Conductor(SchedulerConfig(), SeededIds(args.seed))
        self.workers: dict[Role, list[WorkerRef]] = {}
        self._numbers: dict[str, int] = {}
        counts = {Role.PREFILL: args.workers, Role.DECODE: args.workers, Role.KVSTORE: args.workers}
        for role, count in counts.items():
            self.workers[role] = [self._join(role, number) for number in range(count)]
        self.prompt = [1] * (args.blocks * BLOCK_TOKENS + 1)
        self.num_blocks = args.blocks
        self.chains = [self._chain() for _ in range(args.conversations)]
        self.now = 0.0
        self._count = 0

    def _join(self, role: Role, number: int) -> WorkerRef:
        worker = WorkerRef(f"{role.value}-{number}", "boot", f"tcp://{role.value}/{number}")
        self._numbers[worker.worker_id] = 1
        refusal = self.conductor.on_hello(
            WorkerHello(
                worker=worker,
                role=role,
                node_id=f"node-{number}",
                host=f"node-{number}",
                pid=1,
                layout_fingerprint="layout",
                block_tokens=BLOCK_TOKENS,
                num_blocks=200_000,
                block_bytes=BLOCK_BYTES,
                max_num_seqs=256,
                profile=[] if role is Role.KVSTORE else PROFILE,
                release=OWN_RELEASE,
            )
        )
        assert refusal is None, refusal
        return worker

    def _chain(self) -> KeyChain:
        """Return a conversation's keys, most of them somewhere in the cluster."""
        chain = KeyChain(self.random.randbytes(KEY_BYTES * self.num_blocks))
        for _ in range(self.random.choice([0, 1, 2, 3])):
            self.report(Role.KVSTORE, chain[: self.random.randrange(self.num_blocks)])
        for role in (Role.PREFILL, Role.DECODE):
            if self.random.random() < 0.5:
                self.report(role, chain[: self.random.randrange(self.num_blocks)])
        return chain

    def report(self, role: Role, stored: Sequence[BlockKey]) -> None:
        """Have some worker of a role report blocks."""
        worker = self.random.choice(self.workers[role])
        number = self._numbers[worker.worker_id]
        self._numbers[worker.worker_id] = number + 1
        tier = Tier.DRAM if role is Role.KVSTORE else Tier.HBM
        self.conductor.on_blocks(
            BlockEvents(worker=worker, tier=tier, sequence_no=number, stored=list(stored))
        )

    def heartbeat(self, role: Role, number: int) -> None:
        """One worker reports its load."""
        workers = self.workers[role]
        worker = workers[number % len(workers)]
        report = WorkerLoad(num_running=4, num_free_blocks=150_000, num_total_blocks=200_000)
        self.conductor.on_load(LoadReport(worker=worker, load=report), self.now)

    def ask(self) -> tuple[GenerateRequest, KeyChain]:
        """Return the next request: a turn of some conversation, its last blocks new."""
        self._count += 1
        chain = self.random.choice(self.chains)
        known = self.random.randrange(self.num_blocks // 2, self.num_blocks)
        fresh = self.random.randbytes(KEY_BYTES * (self.num_blocks - known))
        request = GenerateRequest(
            request_id=f"r{self._count}",
            prompt=pack_tokens(self.prompt),
            sampling=SamplingParams(max_tokens=512),
        )
        return request, KeyChain(chain[:known].packed + fresh)


def run(world: World, args: argparse.Namespace) -> dict[str, float]:
    """Place requests and return the figures."""
    under_way: deque[tuple[GenerateRequest, KeyChain]] = deque()
    place_s: list[float] = []
    whole_s = 0.0
    beats = 0.0
    num_workers = sum(map(len, world.workers.values()))
    for number in range(args.warm_up + args.placements):
        request, keys = world.ask()
        world.now += 1 / args.rate
        start = time.thread_time()
        placed = world.conductor.place(request, keys, 0, world.now)
        placed_at = time.thread_time()
        assert not isinstance(placed, Rejection), placed
        under_way.append((request, keys))
        if len(under_way) > REQUESTS_UNDER_WAY // 2:
            world.conductor.on_prefilled(under_way[len(under_way) // 2][0], world.now)
        if len(under_way) > REQUESTS_UNDER_WAY:
            ended, ended_keys = under_way.popleft()
            world.conductor.release(ended.request_id, 512)
            new = ended_keys[placed.num_cached_tokens // BLOCK_TOKENS :][:32]
            for role in (Role.PREFILL, Role.KVSTORE, Role.KVSTORE):
                world.report(role, new)
        beats += num_workers / HEARTBEAT_S / args.rate
        while beats >= 1:
            role = (Role.PREFILL, Role.DECODE, Role.KVSTORE)[int(beats) % 3]
            world.heartbeat(role, number)
            beats -= 1
        if number >= args.warm_up:
            place_s.append(placed_at - start)
            whole_s += time.thread_time() - start
    p50, p99, most = np.percentile(place_s, [50, 99, 100])
    return {
        "placements": len(place_s),
        "place_per_s": len(place_s) / sum(place_s),
        "place_p50_ms": 1e3 * float(p50),
        "place_p99_ms": 1e3 * float(p99),
        "place_max_ms": 1e3 * float(most),
        "all_per_s": len(place_s) / whole_s,
        "blocks": world.conductor.num_indexed_blocks,
    }


def main(argv: Sequence[str]) -> int:
    """See the module."""
    args = _arguments(argv)
    before = resident_bytes()
    world = World(args)
    missing = args.index_blocks - world.conductor.num_indexed_blocks
    for keys in fresh_keys(random.Random(7), max(0, missing)):
        world.report(Role.KVSTORE, keys)
    gc.collect()
    gc.freeze()
    used = resident_bytes() - before
    found = run(world, args) | {"index_gib": used / 2**30}
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"{machine()}; {args.workers:,} prefill, {args.workers:,} decode and {args.workers:,} pool "
        f"workers, {found['blocks']:,} blocks in the index ({found['index_gib']:.2f} GiB), prompts "
        f"of {args.blocks * BLOCK_TOKENS:,} tokens, {found['placements']:,} placements, "
        f"load {load()}\n"
    )
    print("| | /s on one core | p50 ms | p99 ms | longest ms |\n|---|---|---|---|---|")
    print(
        f"| place | {found['place_per_s']:,.0f} | {found['place_p50_ms']:.2f} "
        f"| {found['place_p99_ms']:.2f} | {found['place_max_ms']:.2f} |\n"
        f"| all a request brings, heartbeats too | {found['all_per_s']:,.0f} | | | |"
    )
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks placement", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="of each role")
    parser.add_argument("--blocks", type=int, default=2000, help="of each prompt")
    parser.add_argument("--index-blocks", type=int, default=10_000_000)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--placements", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=5_000)
    parser.add_argument("--rate", type=float, default=1000, help="requests per second of the world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)
