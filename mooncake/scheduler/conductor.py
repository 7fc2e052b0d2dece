"""The Conductor: knows every worker from what it reports, and says where a request goes.

Owns the views, the prefix index and the books of what was placed; state is rebuilt from facts. No
I/O and no request state: the gateway sends and receives, and keeps the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mooncake.base import (
    BlockEvents,
    BlockKey,
    BlockSource,
    GenerateRequest,
    IdSource,
    KeyChain,
    LoadReport,
    Priority,
    Role,
    Tier,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.messages import Booking
from mooncake.kvstore.directory import Replica
from mooncake.kvstore.index import PrefixIndex
from mooncake.kvstore.survey import Survey
from mooncake.scheduler.admission import (
    Rejection,
    check_idle,
    check_limits,
    check_room,
    no_decode,
    too_large,
)
from mooncake.scheduler.books import Books
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.cost import RunningMean
from mooncake.scheduler.decode_choice import DecodeOption, DecodeQuery
from mooncake.scheduler.fairness import Lines, Standing
from mooncake.scheduler.fetch_costs import FetchCosts
from mooncake.scheduler.fleet import Fleet
from mooncake.scheduler.fleet_choice import FleetSearch, Holdings
from mooncake.scheduler.pair_choice import Ask, PairChoice
from mooncake.scheduler.pools import Pools, PoolSources
from mooncake.scheduler.prefill_choice import (
    PrefillOption,
    PrefillQuery,
    make_policy,
    option_maker,
)
from mooncake.scheduler.replication import HOT_BLOCKS, Replication
from mooncake.scheduler.views import InstanceView

OUTPUT_WINDOW = 512

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a request goes and what is expected of it."""

    prefill: WorkerRef | None
    """None: the decode worker does the whole request."""
    decode: WorkerRef
    sources: tuple[BlockSource, ...]
    """For whoever computes the prompt."""
    predicted_ttft_s: float
    predicted_tbt_s: float
    num_cached_blocks: int
    """Leading blocks that are reused: those of the computing worker, then those fetched."""
    num_cached_tokens: int
    num_fetch_blocks: int
    num_replicate_blocks: int = 0
    """Leading blocks that get a copy in the pool of the prefill worker's node."""
    must_wait: bool = False
    """Decode has no room for it now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What names blocks in this cluster; set by the first worker."""

    fingerprint: str
    block_tokens: int


class Conductor:
    """Places requests on workers."""

    def __init__(self, config: SchedulerConfig, ids: IdSource) -> None:
        self._config = config
        self._index = PrefixIndex()
        self._fetch = FetchCosts(config)
        self._replication = Replication(config.uses_per_s_per_copy)
        self._views: dict[str, InstanceView] = {}
        self.books = Books(self._views, self._fetch)
        """What was placed and is not over, here and by other gateways."""
        self._prefills, self._decodes = Fleet(), Fleet()
        self._pools = Pools(self._index, self._fetch)
        self._choice = PairChoice(
            config, make_policy(config, ids), self._prefills, self._decodes,
            FleetSearch(option_maker(config), self._pools, self._index),
        )  # fmt: skip
        self._lines = Lines()
        self._output_tokens = RunningMean(config.expected_output_tokens, OUTPUT_WINDOW)
        self._layout: Layout | None = None
        self._block_bytes = 0

    # ------------------------------------------------------------ facts

    @property
    def layout(self) -> Layout | None:
        """How blocks are named here; None before the first worker."""
        return self._layout

    @property
    def views(self) -> list[InstanceView]:
        """The live workers, in the order they came."""
        return list(self._views.values())

    @property
    def num_indexed_blocks(self) -> int:
        """Distinct block keys known to be somewhere."""
        return self._index.num_keys

    def holders(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> how many of the leading `keys` it is known to hold."""
        return self._index.match(keys)

    def replicas(self, key: BlockKey) -> list[Replica]:
        """Return who holds one block, and in which tier."""
        return self._index.replicas(key)

    def held_by(self, worker_id: str, tier: Tier) -> set[BlockKey]:
        """Return all blocks that a worker is known to hold in a tier; slow (for checks)."""
        return self._index.held_by(worker_id, tier)

    def view(self, worker_id: str) -> InstanceView | None:
        """Return what is known of a live worker."""
        return self._views.get(worker_id)

    def on_hello(self, hello: WorkerHello) -> str | None:
        """Take a worker in, or return why it cannot be used. Repeats change nothing; another epoch
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
                f"({self._layout.block_tokens}): start it with the same model, weights, KV dtype "
                "and block size"
            )
        self._block_bytes = max(self._block_bytes, hello.block_bytes)
        view = self._views[hello.worker.worker_id] = InstanceView.of(hello)
        if hello.role == Role.KVSTORE:
            self._pools.add(view)
        else:
            fleet = self._fleet(hello.role)
            view.on_change = fleet.touch
            fleet.add(view)
        tier = Tier.DRAM if hello.role == Role.KVSTORE else Tier.HBM
        self._index.add_worker(hello.worker, tier)
        return None

    def on_load(self, report: LoadReport, now: float) -> None:
        """Take in a heartbeat of a live worker."""
        view = self._views.get(report.worker.worker_id)
        if view is None or view.worker != report.worker:
            return
        self._index.expect(report.worker, report.block_nos)
        self._fetch.observe(report.worker.worker_id, report.load.counters)
        view.observe(report.load, now)
        if report.load.draining and not view.draining:
            view.draining = True
        view.cost.observe(report.samples)

    def on_blocks(self, events: BlockEvents) -> None:
        """Take in block events of a live worker."""
        view = self._views.get(events.worker.worker_id)
        if view is not None and view.worker == events.worker:
            self._index.apply(events)

    def needs_snapshot(self, worker_id: str) -> bool:
        """Whether block events of this worker were missed and no snapshot has come since."""
        return worker_id in self._views and self._index.needs_snapshot(worker_id)

    def on_draining(self, worker_id: str) -> None:
        """Place nothing more on this worker."""
        view = self._views.get(worker_id)
        if view is not None:
            view.draining = True

    def on_lost(self, worker_id: str) -> None:
        """Forget a worker and everything it holds. Bookings on it stay until released."""
        view = self._views.pop(worker_id, None)
        if view is None:
            return
        if view.role == Role.KVSTORE:
            self._pools.remove(worker_id)
        else:
            self._fleet(view.role).remove(worker_id)
        self._index.remove_worker(worker_id)
        self._fetch.forget(worker_id)
        self.books.worker_lost(worker_id)
        if not self._views:
            self._layout = None

    # -------------------------------------------------------- placement

    def place(
        self,
        request: GenerateRequest,
        keys: Sequence[BlockKey],
        num_output_so_far: int,
        now: float,
        exclude: Collection[str] | None = None,
        standing: Standing | None = None,
    ) -> Placement | Rejection:
        """Choose the workers for a request and book their share.

        `keys` name the full blocks of prompt and output so far. `exclude` is None for a new
        request; for one that has been accepted before (and is held to no limit any more) it names
        the workers it failed on, which are used only when there is no other. Batch work is
        placed only where it fills what is idle, whether or not it is new.
        """
        admit, exclude = exclude is None, exclude or ()
        standing = standing or Standing((request.priority.order, 0.0))
        if all(view.draining for view in self._decodes.views):
            return no_decode()
        layout = self._layout
        assert layout is not None, "workers without a layout"
        num_tokens = len(request.prompt_tokens) + num_output_so_far
        survey = self._index.survey(keys)
        held = Holdings(self._index, survey, ~self._pools.mask, self.books.inflight.match(keys))
        sources = PoolSources(self._pools, survey)
        query = PrefillQuery(
            num_tokens=num_tokens,
            block_tokens=layout.block_tokens,
            own_matches=held,
            sources=sources,
        )
        wanted = self._decode_query(request, num_output_so_far, layout, held)
        limit_s = request.tbt_slo_s or self._config.tbt_slo_s
        chosen = self._choice.choose(Ask(query, wanted, held, survey, exclude, limit_s))
        if chosen is None:
            return too_large(num_tokens)
        prefill, decode = chosen
        behind_s = self._lines.behind_s(prefill.view.worker_id, standing.order)
        stretch = self._lines.stretch(standing.order, len(self._prefills), now)
        ttft_s = stretch * (prefill.ttft_s - min(behind_s, prefill.queue_s))
        rejection = None
        if request.priority is Priority.BATCH:
            tbt_s = self._admission_tbt_s(prefill, decode, wanted, now)
            rejection = check_idle(self._config, prefill, decode, tbt_s, standing.share)
        elif admit:
            tbt_s = self._admission_tbt_s(prefill, decode, wanted, now)
            rejection = check_room(self._config, request, decode) or check_limits(
                self._config, request, ttft_s, tbt_s, standing.share
            )
        if rejection is not None:
            return rejection
        self._lines.add(
            prefill.view.worker_id, request.request_id, standing.order, prefill.compute_s, now
        )
        self._book(request.request_id, keys, prefill, decode, wanted, now)
        whole = prefill.view is decode.view
        return Placement(
            prefill=None if whole else prefill.view.worker,
            decode=decode.view.worker,
            sources=tuple(sources.with_others(prefill.sources)),
            predicted_ttft_s=ttft_s,
            predicted_tbt_s=decode.tbt_s,
            num_cached_blocks=prefill.num_cached_blocks,
            num_cached_tokens=prefill.num_cached_blocks * layout.block_tokens,
            num_fetch_blocks=prefill.num_fetch_blocks,
            num_replicate_blocks=0 if whole else self._replicate(keys, survey, now),
            must_wait=decode.full,
        )

    def on_prefilled(self, request: GenerateRequest, now: float) -> Rejection | None:
        """The request has its first token: its prompt is computed, its fetches are over.

        Returns a rejection when its decode worker would miss the limit now (`recheck_decode`).
        """
        entry = self.books.get(request.request_id)
        rejection = None
        recheck = self._config.recheck_decode or self._config.admission == "late"
        if entry is not None and not entry.prefilled and recheck:
            booking = entry.booking
            view = self._views.get(booking.decode.worker_id)
            if view is not None and booking.computing != booking.decode:
                tbt_s = self.books.forecast.tbt_now_s(view, len(request.prompt_tokens), now)
                rejection = check_limits(self._config, request, 0.0, tbt_s)
        self.books.prefilled(request.request_id, now)
        self._lines.remove(request.request_id)
        return rejection

    def release(self, request_id: str, num_output_tokens: int | None = None) -> None:
        """Take a placement back: the request has ended, or the attempt has. `num_output_tokens`
        where it ended by itself, to learn how long outputs are.
        """
        self._lines.remove(request_id)
        if self.books.release(request_id) and num_output_tokens is not None:
            self._output_tokens.add(num_output_tokens)

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError unless exactly the requests `placed` are on the books."""
        self._prefills.check_integrity()
        self._decodes.check_integrity()
        self.books.check_integrity(placed)
        self._lines.check_integrity(placed)
        self._index.check_integrity()

    # -------------------------------------------------------- internals

    def _fleet(self, role: Role) -> Fleet:
        return self._prefills if role == Role.PREFILL else self._decodes

    def _replicate(self, keys: Sequence[BlockKey], survey: Survey, now: float) -> int:
        """Return how many leading blocks should get one more copy."""
        watched = keys[:HOT_BLOCKS]
        copies: list[int] = []
        for stop, mask in survey.holders(len(watched)):
            copies += [(mask & self._pools.mask).bit_count()] * (stop - len(copies))
        return self._replication.use(watched, copies, len(self._pools), now)

    def _decode_query(
        self,
        request: GenerateRequest,
        num_output_so_far: int,
        layout: Layout,
        own_matches: Mapping[str, int],
    ) -> DecodeQuery:
        left = request.sampling.max_tokens - num_output_so_far
        return DecodeQuery(
            num_tokens=len(request.prompt_tokens) + num_output_so_far,
            num_output_tokens=max(1, min(left, round(self._output_tokens.value))),
            block_tokens=layout.block_tokens,
            own_matches=own_matches,
            push_s_per_block=self._fetch.push_s_per_block(self._block_bytes),
        )

    def _admission_tbt_s(
        self, prefill: PrefillOption, decode: DecodeOption, wanted: DecodeQuery, now: float
    ) -> float:
        """Return the gap between tokens that the limit is held against on arrival."""
        if prefill.view is decode.view:
            return decode.tbt_s
        match self._config.admission:
            case "late":
                return 0.0
            case "early":
                return self.books.forecast.tbt_now_s(decode.view, wanted.num_tokens, now)
            case _:
                stay_s = max(1.0, self._output_tokens.value) * decode.tbt_s
                at_s = now + prefill.ttft_s
                return max(
                    self.books.forecast.tbt_now_s(decode.view, wanted.num_tokens, now),
                    self.books.forecast.tbt_at_s(decode.view, wanted.num_tokens, now, at_s, stay_s),
                )

    def _book(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        prefill: PrefillOption,
        decode: DecodeOption,
        wanted: DecodeQuery,
        now: float,
    ) -> None:
        self.books.add(
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
