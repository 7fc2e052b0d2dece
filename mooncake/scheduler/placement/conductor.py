"""The Conductor: knows every worker from its reports, and decides where a request goes.

Owns the views of workers, the prefix index and the booking table; all of it is rebuilt from reports
after a restart. No I/O and no request state: the gateway sends, receives and keeps the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from mooncake.base import (
    BlockEvents,
    BlockKey,
    BlockSource,
    GenerateRequest,
    IdSource,
    KeyChain,
    KvLayout,
    LoadReport,
    Priority,
    Role,
    Tier,
    WorkerHello,
)
from mooncake.base.messages import Booking
from mooncake.engine.cost import RunningMean
from mooncake.kvstore.index.prefix_index import PrefixIndex, PrefixMatch, Replica
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.fairness import QueuePosition, WorkerQueues
from mooncake.scheduler.placement.admission import (
    NOT_IDLE,
    OWN_LIMIT_REASONS,
    Placement,
    PrefixEnds,
    Rejection,
    check_idle,
    check_limits,
    check_room,
    no_decode,
    too_large,
)
from mooncake.scheduler.placement.booking_table import BookingTable
from mooncake.scheduler.placement.choice_replay import ChoiceFacts
from mooncake.scheduler.placement.fleet_choice import FleetSearch
from mooncake.scheduler.placement.pair_choice import COLUMNS_FROM, Pair, PairChoice, PairQuery
from mooncake.scheduler.placement.pools import (
    HOT_BLOCKS,
    FetchCosts,
    Pools,
    PoolSources,
    Replication,
)
from mooncake.scheduler.placement.step_outlook import planned_ttft_s
from mooncake.scheduler.placement.views import Fleet, InstanceView
from mooncake.scheduler.placement.worker_choice import (
    DecodeOption,
    PrefillOption,
    Wanted,
    make_policy,
    option_maker,
)

OUTPUT_WINDOW = 512
HELD_STEPS = 1.5
"""A first token that is held waits for half a step of decode on average, and for its own step."""
WHOLE_BLOCKS = 2
"""A request that was decoding continues without a prefill worker if the pools lack at most this
many of its blocks.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The way in which blocks are named in this cluster."""

    fingerprint: str
    block_tokens: int


class Conductor:
    """Places requests on workers."""

    def __init__(
        self,
        config: SchedulerConfig,
        ids: IdSource,
        *,
        layout: KvLayout | None = None,
        columns_from: int = COLUMNS_FROM,
    ) -> None:
        """`layout`: that of the cluster's engines, which every worker must have; None: that of the
        first worker. `columns_from`: see `pair_choice`.
        """
        self._config = config
        self._index = PrefixIndex()
        self._fetch = FetchCosts(config)
        self._replication = Replication(config.uses_per_s_per_copy)
        self._views: dict[str, InstanceView] = {}
        self.bookings = BookingTable(self._views, self._fetch)
        """All placements that have not ended, of this and other gateways."""
        self._prefills, self._decodes = Fleet(), Fleet()
        self._pools = Pools(self._index, self._fetch)
        self._choice = PairChoice(
            make_policy(config, ids), self._prefills, self._decodes,
            FleetSearch(option_maker(config), self._pools, self._index), columns_from=columns_from,
        )  # fmt: skip
        self._queues = WorkerQueues()
        self._output_tokens = RunningMean(config.expected_output_tokens, OUTPUT_WINDOW)
        self._given_layout: Layout | None = None
        if layout is not None:
            self._given_layout = Layout(
                fingerprint=layout.fingerprint, block_tokens=layout.block_tokens
            )
        self._layout = self._given_layout
        self._computes: InstanceView | None = None
        self._block_bytes = 0
        self.keeps_facts = False
        """Whether placements and rejections say what they were chosen from."""

    # ------------------------------------------------------------ facts

    @property
    def layout(self) -> Layout | None:
        """The way in which blocks are named; None while neither the cluster nor a worker says."""
        return self._layout

    @property
    def views(self) -> list[InstanceView]:
        """The live workers, in the order they joined."""
        return list(self._views.values())

    @property
    def computes(self) -> InstanceView | None:
        """One of the workers that compute prompts, or the last that there was. It is None if there
        was none yet.
        """
        views = self._prefills.views or self._decodes.views
        self._computes = views[0] if views else self._computes
        return self._computes

    def expected_output_tokens(self, request: GenerateRequest) -> float:
        """Return how many tokens an answer is expected to have."""
        return min(request.sampling.max_tokens, max(1.0, self._output_tokens.value))

    @property
    def num_indexed_blocks(self) -> int:
        """The number of distinct block keys known to be stored anywhere."""
        return self._index.num_keys

    def holders(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> how many of the leading `keys` it is known to hold."""
        return self._index.match(keys)

    def replicas(self, key: BlockKey) -> list[Replica]:
        """Return the workers that hold one block, with the tier."""
        return self._index.replicas(key)

    def held_by(self, worker_id: str, tier: Tier) -> set[BlockKey]:
        """Return all blocks that a worker is known to hold in a tier; slow (for checks)."""
        return self._index.held_by(worker_id, tier)

    def num_fetchable(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading `keys` can be fetched: each is held by a pool node or by an
        engine that is leaving.
        """
        return self._index.prefix_match(keys).run_of(0, self._pools.mask)

    def busiest(self, hello: WorkerHello) -> Iterator[tuple[list[BlockKey], list[BlockSource]]]:
        """Yield the busiest prefixes that pools hold and a joining worker may read ahead of its
        requests, and from where. There are none for a worker that computes no prompts.
        """
        prefills = len(self._prefills) or self._config.needs_prefill
        if hello.role is not (Role.PREFILL if prefills else Role.DECODE):
            return
        num_blocks = self._config.read_ahead_bytes // max(1, hello.block_bytes)
        for keys in self._replication.busiest(num_blocks):
            sources = PoolSources(self._pools, self._index.prefix_match(keys))
            covered = sources.cover(hello.node_id, remote=self._config.reads_remote)
            if covered:
                yield keys[: covered[-1].stop], covered

    def view(self, worker_id: str) -> InstanceView | None:
        """Return what is known of a live worker, or None."""
        return self._views.get(worker_id)

    def on_hello(self, hello: WorkerHello) -> str | None:
        """Add a worker, or return why it cannot be used. A repeat changes nothing; an older epoch
        must have been reported lost before.
        """
        known = self._views.get(hello.worker.worker_id)
        if known is not None:
            assert known.worker == hello.worker, "a new epoch came before the old one was lost"
            return None
        layout = Layout(fingerprint=hello.layout_fingerprint, block_tokens=hello.block_tokens)
        if self._layout is None:
            self._layout = layout
        elif layout != self._layout:
            return (
                f"its KVCache layout {layout.fingerprint} ({layout.block_tokens} tokens a block) "
                f"is not the cluster's {self._layout.fingerprint} "
                f"({self._layout.block_tokens}): start it with the same model, weights, KV dtype, "
                "block size and method of drafts"
            )
        self._block_bytes = max(self._block_bytes, hello.block_bytes)
        view = self._views[hello.worker.worker_id] = InstanceView.of(hello)
        if hello.role == Role.KVSTORE:
            self._pools.add(view)
        elif (fleet := self._fleet(hello.role)) is not None:
            view.on_change = fleet.touch
            fleet.add(view)
        tier = Tier.DRAM if hello.role == Role.KVSTORE else Tier.HBM
        self._index.add_worker(hello.worker, tier)
        return None

    def use_fingerprint(self, fingerprint: str) -> None:
        """Take only workers of the layout under other weights, once those that are here have
        left.
        """
        self._replication.forget()
        if self._given_layout is not None:
            self._given_layout = replace(self._given_layout, fingerprint=fingerprint)
            if not self._views:
                self._layout = self._given_layout

    def on_load(self, report: LoadReport, now: float) -> None:
        """Take the heartbeat of a live worker."""
        view = self._views.get(report.worker.worker_id)
        if view is None or view.worker != report.worker:
            return
        self._index.expect(report.worker, report.block_nos)
        self._fetch.observe(view, report.load.counters, now)
        view.observe(report.load, now, report.samples)
        self.bookings.on_fetched(report.fetched, report.worker)
        if report.load.draining and not view.draining:
            view.draining = True
        if report.load.lends:
            self._pools.add(view)

    def on_blocks(self, events: BlockEvents) -> None:
        """Take the block events of a live worker."""
        view = self._views.get(events.worker.worker_id)
        if view is not None and view.worker == events.worker:
            self._index.apply(events)

    def needs_snapshot(self, worker_id: str) -> bool:
        """Return whether block events of this worker were missed and no snapshot has come since."""
        return worker_id in self._views and self._index.needs_snapshot(worker_id)

    def on_draining(self, worker_id: str) -> None:
        """From now on place only work on this worker that no other worker can do."""
        view = self._views.get(worker_id)
        if view is not None:
            view.draining = True

    def on_lost(self, worker_id: str) -> None:
        """Remove a worker and all blocks it holds. Own bookings on it stay until released."""
        view = self._views.pop(worker_id, None)
        if view is None:
            return
        self._pools.remove(worker_id)
        if (fleet := self._fleet(view.role)) is not None:
            fleet.remove(worker_id)
        self._index.remove_worker(worker_id)
        self._fetch.forget(worker_id)
        self.bookings.on_worker_lost(worker_id)
        if not self._views:
            self._layout = self._given_layout

    # -------------------------------------------------------- placement

    def place(
        self,
        request: GenerateRequest,
        keys: Sequence[BlockKey],
        num_output_so_far: int,
        now: float,
        exclude: Collection[str] | None = None,
        queue_position: QueuePosition | None = None,
    ) -> Placement | Rejection:
        """Choose the workers for a request and book their share.

        `keys` name the full blocks of prompt and output so far. `exclude` is None for a new
        request. For a request that was accepted before, and has no limits any more, it names the
        workers on which it failed; they are used only when there is no other. Batch work before its
        turn, new or not, is placed only where it fills idle capacity.
        """
        admit, exclude = exclude is None, exclude or ()
        queue_position = queue_position or QueuePosition(
            (0.0, request.priority.order), is_patient=request.priority is Priority.BATCH
        )
        if not len(self._decodes):
            return no_decode()
        query = self._query(request, keys, num_output_so_far, exclude)
        chosen = self._choice.choose(query)
        if chosen is None:
            return too_large(query.wanted.num_tokens)
        prefill, decode = chosen
        ttft_s = self._ttft_s(request, chosen, queue_position, now)
        if admit or request.priority is Priority.BATCH:
            rejection = self._check(request, query, chosen, queue_position, ttft_s, now)
            if rejection is not None:
                if self.keeps_facts and rejection.reason != NOT_IDLE:  # that one is tried again
                    rejection = replace(rejection, facts=self._facts(keys, query, chosen))
                return rejection
        # Before it is booked, which changes the facts.
        facts = self._facts(keys, query, chosen) if self.keeps_facts else None
        self._queues.add(
            prefill.view.worker_id, request.request_id, queue_position.order, prefill.compute_s, now
        )
        self._book(request.request_id, keys, chosen, query.wanted, now)
        whole = prefill.view is decode.view
        num_replicate_blocks = self._replicate(keys, query.prefix_match, now)
        return Placement(
            prefill=None if whole else prefill.view.worker,
            decode=decode.view.worker,
            sources=tuple(query.sources.with_others(prefill.sources)),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=decode.tbt_s,
            num_cached_tokens=prefill.num_cached_blocks * query.wanted.block_tokens,
            num_fetch_blocks=prefill.num_fetch_blocks,
            num_replicate_blocks=0 if whole else num_replicate_blocks,
            prefix_ends=self._prefix_ends(keys, query, prefill.num_cached_blocks),
            must_wait=decode.full,
            facts=facts,
        )

    def on_prefilled(self, request: GenerateRequest, now: float) -> Rejection | None:
        """Record the first token of a request: its prompt is computed and its fetches have ended.

        Returns a rejection when its decode worker would miss the limit on gaps now
        (`recheck_decode`).
        """
        entry = self.bookings.get(request.request_id)
        rejection = None
        recheck = self._config.recheck_decode or self._config.admission == "late"
        if entry is not None and not entry.prefilled and recheck:
            booking = entry.booking
            view = self._views.get(booking.decode.worker_id)
            if view is not None and booking.computing != booking.decode:
                tbt_s = self.bookings.forecast.tbt_now_s(view, len(request.prompt_tokens), now)
                rejection = check_limits(self._config, request, 0.0, tbt_s)
        self.bookings.on_prefilled(request.request_id, now)
        self._queues.remove(request.request_id)
        return rejection

    def release(self, request_id: str, num_output_tokens: int | None = None) -> None:
        """Remove a placement because the request or the attempt has ended. `num_output_tokens` is
        given when it finished normally, to learn the length of outputs.
        """
        self._queues.remove(request_id)
        if self.bookings.release(request_id) and num_output_tokens is not None:
            self._output_tokens.add(num_output_tokens)

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError unless exactly the requests `placed` are booked."""
        self._prefills.check_integrity()
        self._decodes.check_integrity()
        self.bookings.check_integrity(placed)
        self._queues.check_integrity(placed)
        self._index.check_integrity()

    # -------------------------------------------------------- internals

    def _fleet(self, role: Role) -> Fleet | None:
        """Return the workers of a role if requests are placed on it."""
        return {Role.PREFILL: self._prefills, Role.DECODE: self._decodes}.get(role)

    def _replicate(self, keys: Sequence[BlockKey], prefix_match: PrefixMatch, now: float) -> int:
        """Return how many leading blocks should get one more copy."""
        watched = keys[:HOT_BLOCKS]
        copies: list[int] = []
        for stop, mask in prefix_match.holders(len(watched)):
            copies += [(mask & self._pools.copies_mask).bit_count()] * (stop - len(copies))
        return self._replication.on_use(watched, copies, self._pools.num_nodes, now)

    def _prefix_ends(
        self, keys: Sequence[BlockKey], query: PairQuery, num_planned: int
    ) -> PrefixEnds:
        """Return what is known about the blocks after those that a placement counts on."""
        stop = query.wanted.max_cached_blocks
        fetchable = held = num_planned
        if num_planned < stop:
            fetchable = query.prefix_match.run_of(num_planned, self._pools.mask)
            held = max(fetchable, query.prefix_match.region(fetchable).end)
        return PrefixEnds(num_planned, fetchable, held, self._index.removed_end(keys, held))

    def _query(
        self,
        request: GenerateRequest,
        keys: Sequence[BlockKey],
        num_output_so_far: int,
        exclude: Collection[str],
    ) -> PairQuery:
        layout = self._layout
        assert layout is not None, "workers without a layout"
        num_tokens = len(request.prompt_tokens) + num_output_so_far
        left = request.sampling.max_tokens - num_output_so_far
        wanted = Wanted(
            num_tokens=num_tokens,
            num_output_tokens=max(1, min(left, round(self._output_tokens.value))),
            block_tokens=layout.block_tokens,
            push_s_per_block=self._fetch.push_s_per_block(self._block_bytes),
            exclude=sorted(exclude),
            tbt_slo_s=self._config.tbt_limit_s(request),
            max_whole_tokens=max(
                self._config.whole_on_decode_max_tokens,
                WHOLE_BLOCKS * layout.block_tokens if num_output_so_far else 0,
            ),
        )
        inflight = self.bookings.inflight.match(keys)
        prefix_match = self._index.prefix_match(keys)
        return PairQuery.of(wanted, self._index, self._pools, prefix_match, inflight)

    def _facts(self, keys: Sequence[BlockKey], query: PairQuery, pair: Pair) -> ChoiceFacts:
        """Return what `pair` was chosen from: references, and copies of what changes."""
        pools = self._pools.hellos
        asked = ((hello.worker, self._fetch.blocks_asked(hello.worker)) for hello in pools)
        return ChoiceFacts(
            config=self._config,
            wanted=query.wanted,
            prefills=self._prefills.facts(),
            decodes=self._decodes.facts(),
            pools=pools,
            blocks_asked={worker.worker_id: dict(tiers) for worker, tiers in asked if tiers},
            bytes_per_s=self._fetch.bytes_per_s,
            num_blocks=len(keys),
            holders=query.prefix_match.looked_up(),
            owners=self._index.owners,
            inflight=query.own_matches.inflight,
            prefill=None if pair[0].view is pair[1].view else pair[0].view.worker_id,
            decode=pair[1].view.worker_id,
        )

    def _ttft_s(
        self, request: GenerateRequest, pair: Pair, position: QueuePosition, now: float
    ) -> float:
        """Return the predicted TTFT: the request overtakes queued work of lower rank, and higher
        classes that are still to come overtake it. Where gaps have a limit, a first token that
        comes from a prefill worker is shown with the second.
        """
        prefill, decode = pair
        overtaken = self._queues.overtaken(prefill.view.worker_id, position.order)
        planned_s = planned_ttft_s(prefill, overtaken, self._output_tokens.value, now)
        overtaken_s = self._queues.overtaken_s(prefill.view.worker_id, position.order)
        slowdown = self._queues.slowdown(position.order, len(self._prefills), now)
        over_s = overtaken_s + prefill.view.passed_s(now)
        computed_s = slowdown * (
            prefill.ttft_s - min(over_s, prefill.queue_s) if planned_s is None else planned_s
        )
        is_held = self._config.tbt_limit_s(request) is not None and prefill.view is not decode.view
        return computed_s + (HELD_STEPS * decode.tbt_s if is_held else 0.0)

    def _check(
        self,
        request: GenerateRequest,
        query: PairQuery,
        pair: Pair,
        position: QueuePosition,
        ttft_s: float,
        now: float,
    ) -> Rejection | None:
        """Return a rejection when the request would exceed its share of the limits, or when it is
        patient and would not fill idle capacity.
        """
        prefill, decode = pair
        tbt_s = self._admission_tbt_s(prefill, decode, query.wanted, now)
        if position.is_patient:
            return check_idle(self._config, prefill, decode, tbt_s, position.share)
        missed = check_limits(self._config, request, ttft_s, tbt_s, position.share)
        if missed is not None and missed.reason in OWN_LIMIT_REASONS:
            return missed  # although there may be no room either, for which batch work would yield
        return check_room(self._config, request, decode) or missed

    def _admission_tbt_s(
        self, prefill: PrefillOption, decode: DecodeOption, wanted: Wanted, now: float
    ) -> float:
        """Return the gap between tokens that is compared with the limit on arrival."""
        if prefill.view is decode.view:
            return decode.tbt_s
        match self._config.admission:
            case "late":
                return 0.0
            case "early":
                return self.bookings.forecast.tbt_now_s(decode.view, wanted.num_tokens, now)
            case _:
                stay_s = max(1.0, self._output_tokens.value) * decode.tbt_s
                at_s = now + prefill.ttft_s
                return max(
                    self.bookings.forecast.tbt_now_s(decode.view, wanted.num_tokens, now),
                    self.bookings.forecast.tbt_at_s(
                        decode.view, wanted.num_tokens, now, at_s, stay_s
                    ),
                )

    def _book(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        pair: Pair,
        wanted: Wanted,
        now: float,
    ) -> None:
        prefill, decode = pair
        self.bookings.add(
            Booking(
                request_id=request_id,
                computing=prefill.view.worker,
                decode=decode.view.worker,
                keys=KeyChain.of(keys).packed,
                sources=prefill.sources,
                num_tokens=wanted.num_tokens,
                num_new_tokens=prefill.num_new_tokens,
                prefill_s=prefill.fetch_s + prefill.compute_s,
                ttft_s=prefill.ttft_s,
                num_blocks=wanted.num_blocks_expected,
            ),
            now,
        )
