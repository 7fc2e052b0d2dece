"""What was known when a pair of workers was chosen, kept for a receipt (`ChoiceFacts`); and the
choice made again from it, by the code that places, with views that say what was recorded.

Pure. The Conductor makes `ChoiceFacts` for each placement, so they are quick to make: references to
what does not change, and copies of the numbers that do. When somebody asks, they become a
`BundledPlacement`, and so does a file. Neither holds tokens or keys: blocks are numbered, and
holders are told by these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, TypeVar

import msgspec

from mooncake.base import (
    BlockEvents,
    BlockSource,
    ConfigError,
    KeyChain,
    Role,
    SeededIds,
    Tier,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.blocks import KEY_BYTES
from mooncake.engine.cost import NUM_COEFFICIENTS, NUM_STREAM_COEFFICIENTS, StepCostModel
from mooncake.kvstore.index.prefix_index import PrefixIndex, Replica, slots_of
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement import worker_choice
from mooncake.scheduler.placement.fleet_choice import FleetSearch
from mooncake.scheduler.placement.pair_choice import (
    COLUMNS_FROM,
    Pair,
    PairChoice,
    PairQuery,
    usable_views,
)
from mooncake.scheduler.placement.pools import FetchCosts, Pools
from mooncake.scheduler.placement.views import Column, Fleet, FleetFacts, InstanceView
from mooncake.scheduler.placement.worker_choice import Wanted
from mooncake.telemetry.receipt import Choice, DecodeEstimate, PrefillEstimate

MAX_SHOWN = 8
"""Workers of a role whose estimates are shown."""
MAX_BLOCKS = 1 << 20
"""Blocks of a prompt in a bundle: 64 million tokens."""
NOT_REPLAYED = ("round-robin", "random")
"""Policies whose choice depends on more than the facts."""
EPOCH = "replayed"

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of what a bundle holds."""


class EngineLoad(_Fact, frozen=True):
    """What an engine had to do."""

    queue_s: float
    """Predicted seconds until the prompts queued there are computed."""
    num_assigned: int
    coefficients: tuple[float, ...]
    """The coefficients of its cost model (`StepCostModel`)."""
    is_usable: bool
    """False: it wanted to leave."""
    num_free_blocks: int
    """The blocks that are neither used nor promised; negative if too many were promised."""
    num_sequences: Count
    num_context_tokens: Count
    stream_coefficients: tuple[float, ...]
    """The coefficients of the worker's cost model for streams."""
    num_prompts: Count
    """How many of its sequences have a prompt to compute."""
    num_queued_tokens: Count


class BundledWorker(_Fact, frozen=True):
    """One worker."""

    id: str
    role: Role
    node: str
    num_blocks: Count
    block_bytes: Count
    max_num_seqs: Count
    max_batched_tokens: Count
    num_stages: Annotated[int, msgspec.Meta(ge=1)]
    load: EngineLoad | None
    """None: it is a pool node."""
    is_pool: bool
    """Whether prefixes can be fetched from it."""
    blocks_asked: dict[Tier, Count]
    """Blocks that were being fetched from it, by the tier in which they lay."""


class BundledPlacement(_Fact, frozen=True):
    """Everything that one choice was made from, and who was chosen."""

    config: SchedulerConfig
    wanted: Wanted
    workers: list[BundledWorker]
    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    """Full blocks of prompt and output so far."""
    holders: list[tuple[int, dict[Tier, list[str]]]]
    """(Stop, tier -> workers that hold them there and no nearer) for runs of these blocks."""
    inflight: dict[str, int]
    """Worker -> leading blocks that it was computing."""
    prefill: str | None
    """Who was chosen; None: `decode` does it all."""
    decode: str


def replay(placement: BundledPlacement) -> tuple[str | None, str] | None:
    """Return who is chosen for the prompt (None: the decode worker) and for decoding, or None if no
    worker is large enough.

    Raises:
        ConfigError: its policy cannot be replayed, or the facts contradict each other.
    """
    if placement.config.policy in NOT_REPLAYED:
        raise ConfigError(
            f"policy {placement.config.policy} also uses facts that a bundle does not hold, so its "
            "choice cannot be replayed"
        )
    pair = _World(placement).choose()
    if pair is None:
        return None
    prefill, decode = (option.view.worker_id for option in pair)
    return None if prefill == decode else prefill, decode


def estimates(placement: BundledPlacement) -> Choice:
    """Return what each worker would have meant for the request, the best first."""
    world = _World(placement)
    query, wanted = world.query, placement.wanted
    whole = placement.prefill is None
    decodes, refused = _able(world.decodes, wanted, wanted.num_blocks_now)
    prefills = decodes
    if not whole:
        num_blocks = -(-wanted.num_tokens // wanted.block_tokens)
        prefills, also_refused = _able(world.prefills, wanted, num_blocks)
        refused = {**also_refused, **refused}
    ways = [world.search.option(query, view) for view in prefills]
    joins = [worker_choice.evaluate(query, view) for view in decodes]
    ways.sort(key=worker_choice.rank)
    joins.sort(key=worker_choice.decode_rank)
    taken = placement.decode if placement.prefill is None else placement.prefill
    return Choice(
        prefill=_shown(
            [
                PrefillEstimate(
                    worker=option.view.worker_id,
                    taken=option.view.worker_id == taken,
                    ttft_s=option.ttft_s,
                    queue_s=option.queue_s,
                    fetch_s=option.fetch_s,
                    compute_s=option.compute_s + option.tail_s,
                    num_cached_tokens=option.num_cached_blocks * wanted.block_tokens,
                    num_fetch_blocks=option.num_fetch_blocks,
                    fetch_blocks=option.fetch_blocks,
                )
                for option in ways
            ]
        ),
        decode=_shown(
            [
                DecodeEstimate(
                    worker=option.view.worker_id,
                    taken=option.view.worker_id == placement.decode,
                    tbt_s=option.tbt_s,
                    push_s=0.0 if whole else option.push_s,
                    num_short_blocks=option.num_short_blocks,
                    full=option.full,
                )
                for option in joins
            ]
        ),
        num_prefill=len(ways),
        num_decode=len(joins),
        unusable=dict(list(refused.items())[:MAX_SHOWN]),
    )


Estimate = TypeVar("Estimate", PrefillEstimate, DecodeEstimate)


def _shown(found: list[Estimate]) -> list[Estimate]:
    """Return the best, with the one that was taken among them."""
    missed: list[Estimate] = [estimate for estimate in found[MAX_SHOWN:] if estimate.taken]
    return found[: MAX_SHOWN - len(missed)] + missed


def _able(
    fleet: Fleet, wanted: Wanted, num_blocks: int
) -> tuple[Sequence[InstanceView], dict[str, str]]:
    """Return the workers of a fleet that were compared, and why the others were not."""
    usable = usable_views(fleet, wanted.exclude)
    able = [view for view in usable if view.hello.num_blocks >= num_blocks]
    refused: dict[str, str] = {}
    able_ids, usable_ids = ({view.worker_id for view in views} for views in (able, usable))
    for view in fleet.views:
        if view.worker_id in able_ids:
            continue
        if view.worker_id in usable_ids:
            refused[view.worker_id] = f"it has fewer than {num_blocks} blocks"
        elif view.worker_id in wanted.exclude:
            refused[view.worker_id] = "the request failed there, or was turned away"
        else:
            refused[view.worker_id] = "it leaves"
    return able, refused


class _RecordedCost(StepCostModel):
    """A cost model that has been fitted already."""

    def __init__(self, load: EngineLoad, num_stages: int) -> None:
        super().__init__(num_stages=num_stages)
        for name, found, wanted in (
            ("coefficients", load.coefficients, NUM_COEFFICIENTS),
            ("stream_coefficients", load.stream_coefficients, NUM_STREAM_COEFFICIENTS),
        ):
            if len(found) != wanted:
                raise ConfigError(f"{name}: must be {wanted}, not {len(found)}")
        self._load = load

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self._load.coefficients

    @property
    def stream_coefficients(self) -> tuple[float, ...]:
        return self._load.stream_coefficients


class _RecordedView(InstanceView):
    """A view that says what was recorded of an engine."""

    def __init__(self, worker: BundledWorker, block_tokens: int, load: EngineLoad) -> None:
        super().__init__(
            hello=_hello(worker, block_tokens),
            load=WorkerLoad(),
            cost=_RecordedCost(load, worker.num_stages),
            _draining=not load.is_usable,
        )
        self.recorded = load

    @property
    def num_assigned(self) -> int:
        return self.recorded.num_assigned

    def queued_s(self) -> float:
        return self.recorded.queue_s

    def num_sequences(self) -> int:
        return self.recorded.num_sequences

    def num_prompts(self) -> int:
        return self.recorded.num_prompts

    def num_queued_tokens(self) -> int:
        return self.recorded.num_queued_tokens

    def num_context_tokens(self) -> int:
        return self.recorded.num_context_tokens

    def num_free_blocks(self) -> int:
        return self.recorded.num_free_blocks


def _hello(worker: BundledWorker, block_tokens: int) -> WorkerHello:
    return WorkerHello(
        worker=WorkerRef(worker.id, EPOCH, ""),
        role=worker.role,
        node_id=worker.node,
        host="",
        pid=0,
        layout_fingerprint="",
        block_tokens=block_tokens,
        num_blocks=worker.num_blocks,
        block_bytes=worker.block_bytes,
        max_num_seqs=worker.max_num_seqs,
        max_batched_tokens=worker.max_batched_tokens,
        num_stages=worker.num_stages,
    )


class _World:
    """The workers and blocks of one placement, as the Conductor had them."""

    def __init__(self, placement: BundledPlacement) -> None:
        config, wanted = placement.config, placement.wanted
        fetch, index = FetchCosts(config), PrefixIndex()
        pools = Pools(index, fetch)
        self.prefills, self.decodes = Fleet(), Fleet()
        refs: dict[str, WorkerRef] = {}
        for worker in placement.workers:
            load = worker.load
            view = InstanceView.of(_hello(worker, wanted.block_tokens))
            if load is not None:
                view = _RecordedView(worker, wanted.block_tokens, load)
                fleet = self.prefills if worker.role is Role.PREFILL else self.decodes
                fleet.add(view)
            if worker.is_pool:
                pools.add(view)
            refs[worker.id] = view.worker
            index.add_worker(view.worker, Tier.DRAM if worker.role is Role.KVSTORE else Tier.HBM)
            for tier, number in worker.blocks_asked.items():
                source = BlockSource(store=view.worker, first=0, stop=number, tier=tier)
                fetch.started([source])
        keys = KeyChain.of(
            blake2b(number.to_bytes(8, "big"), digest_size=KEY_BYTES).digest()
            for number in range(placement.num_blocks)
        )
        for (name, tier), stored in _held(placement.holders, keys).items():
            if name in refs:
                ref = refs[name]
                index.apply(BlockEvents(worker=ref, tier=tier, sequence_no=1, stored=stored))
        self.search = FleetSearch(worker_choice.option_maker(config), pools, index)
        self.query = PairQuery.of(
            wanted, index, pools, index.prefix_match(keys), dict(placement.inflight)
        )
        policy = worker_choice.make_policy(config, SeededIds(0))
        self._pairs = PairChoice(
            policy, self.prefills, self.decodes, self.search, columns_from=COLUMNS_FROM
        )

    def choose(self) -> Pair | None:
        """Return the pair that is chosen."""
        return self._pairs.choose(self.query)


def _held(
    holders: Sequence[tuple[int, Mapping[Tier, Sequence[str]]]], keys: KeyChain
) -> dict[tuple[str, Tier], list[bytes]]:
    """Return the keys that each worker holds in each tier."""
    found: dict[tuple[str, Tier], list[bytes]] = {}
    start = 0
    for stop, names_in in holders:
        for tier, names in names_in.items():
            for name in names:
                found.setdefault((name, tier), []).extend(keys[start:stop])
        start = stop
    return found


FIXED_BYTES = 2_000
RUN_BYTES = 120
"""Bytes of each run of blocks that the same workers hold, without a bit for each worker."""
NAMED_BYTES = 120
"""Bytes of each number that is kept with the name of a worker."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceFacts:
    """The facts of one choice."""

    config: SchedulerConfig
    wanted: Wanted
    prefills: FleetFacts
    decodes: FleetFacts
    pools: tuple[WorkerHello, ...]
    blocks_asked: Mapping[str, dict[Tier, int]]
    """Pool -> blocks that are being fetched from it, if any, by their tier."""
    bytes_per_s: Mapping[str, float]
    """The settings of `config` that are known better by now."""
    num_blocks: int
    """Full blocks of prompt and output so far."""
    holders: tuple[tuple[int, int], ...]
    """(Stop, holders) for runs of these blocks, as far as they were looked up."""
    owners: tuple[Replica | None, ...]
    """The workers and tiers that the bits of `holders` stand for."""
    inflight: Mapping[str, int]
    prefill: str | None
    """Who was chosen; None: `decode` does it all."""
    decode: str

    @property
    def num_bytes(self) -> int:
        """About how much memory this holds, without what all placements share."""
        columns = self.prefills.columns.nbytes + self.decodes.columns.nbytes
        runs = sum(RUN_BYTES + (mask.bit_length() >> 3) for _, mask in self.holders)
        named = NAMED_BYTES * (len(self.blocks_asked) + len(self.inflight))
        return FIXED_BYTES + columns + runs + named

    def choice(self) -> Choice:
        """Return the estimates of all workers; slow where these are many."""
        return estimates(self.bundled())

    def bundled(self) -> BundledPlacement:
        """Return the same as a value that can be written."""
        engines = {**_engines(self.prefills), **_engines(self.decodes)}
        pools = {hello.worker.worker_id for hello in self.pools}
        workers: dict[str, BundledWorker] = {}
        for hello in (*self.prefills.hellos, *self.decodes.hellos, *self.pools):
            name = hello.worker.worker_id
            workers[name] = BundledWorker(
                id=name,
                role=hello.role,
                node=hello.node_id,
                num_blocks=hello.num_blocks,
                block_bytes=hello.block_bytes,
                max_num_seqs=hello.max_num_seqs,
                max_batched_tokens=hello.max_batched_tokens,
                num_stages=hello.num_stages,
                load=engines.get(name),
                is_pool=name in pools,
                blocks_asked=self.blocks_asked.get(name, {}),
            )
        return BundledPlacement(
            config=msgspec.structs.replace(self.config, **self.bytes_per_s),
            wanted=self.wanted,
            workers=list(workers.values()),
            num_blocks=self.num_blocks,
            holders=[(stop, self._names(mask)) for stop, mask in self.holders],
            inflight=dict(self.inflight),
            prefill=self.prefill,
            decode=self.decode,
        )

    def _names(self, mask: int) -> dict[Tier, list[str]]:
        """Return the workers that the bits stand for, by tier."""
        found: dict[Tier, list[str]] = {}
        for slot in slots_of(mask):
            owner = self.owners[slot]
            assert owner is not None, "a slot of nobody"
            found.setdefault(owner.tier, []).append(owner.worker.worker_id)
        return found


def _engines(facts: FleetFacts) -> dict[str, EngineLoad]:
    """Return what is known of each engine, by name."""
    rows: list[list[float]] = facts.columns.T.tolist()
    return {
        hello.worker.worker_id: EngineLoad(
            queue_s=row[Column.QUEUE_S],
            num_assigned=int(row[Column.ASSIGNED]),
            coefficients=tuple(row[Column.FIXED : Column.READ + 1]),
            stream_coefficients=tuple(row[Column.STREAM_FIXED : Column.STREAM_READ + 1]),
            is_usable=row[Column.USABLE] > 0,
            num_free_blocks=int(row[Column.FREE_BLOCKS]),
            num_sequences=int(row[Column.SEQUENCES]),
            num_context_tokens=int(row[Column.CONTEXT]),
            num_prompts=int(row[Column.PROMPTS]),
            num_queued_tokens=int(row[Column.QUEUED_TOKENS]),
        )
        for hello, row in zip(facts.hellos, rows, strict=True)
    }
