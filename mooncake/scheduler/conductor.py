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
    LoadReport,
    Overloaded,
    Role,
    Tier,
    WorkerHello,
    WorkerRef,
)
from mooncake.kvstore.index import PrefixIndex
from mooncake.scheduler.admission import Rejection, check_limits, no_decode, reject, too_large
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.cost import RunningMean
from mooncake.scheduler.decode_choice import DecodeOption, DecodeQuery, choose_decode, evaluate
from mooncake.scheduler.fetch_costs import FetchCosts
from mooncake.scheduler.forecast import DecodeForecast
from mooncake.scheduler.inflight_prefixes import InflightPrefixes
from mooncake.scheduler.prefill_choice import (
    PrefillOption,
    PrefillQuery,
    PrefixSources,
    StoreRun,
    make_policy,
    option_maker,
)
from mooncake.scheduler.replication import Replication
from mooncake.scheduler.views import Assignment, InstanceView

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What names blocks in this cluster; set by the first worker."""

    fingerprint: str
    block_tokens: int


@dataclass(slots=True)
class _Booking:
    computing: str
    """Worker that computes the prompt."""
    decode: str
    keys: tuple[BlockKey, ...]
    sources: tuple[BlockSource, ...]
    prefilled: bool = False


class Conductor:
    """Places requests on workers."""

    def __init__(self, config: SchedulerConfig, ids: IdSource) -> None:
        self._config = config
        self._policy = make_policy(config, ids)
        self._option = option_maker(config)
        self._index = PrefixIndex()
        self._inflight = InflightPrefixes()
        self._fetch = FetchCosts(config)
        self._forecast = DecodeForecast()
        self._replication = Replication(config.uses_per_s_per_copy, self._num_pool_copies)
        self._views: dict[str, InstanceView] = {}
        self._books: dict[str, _Booking] = {}
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
        self._views[hello.worker.worker_id] = InstanceView.of(hello)
        tier = Tier.DRAM if hello.role == Role.KVSTORE else Tier.HBM
        self._index.add_worker(hello.worker, tier)
        return None

    def on_load(self, report: LoadReport, now: float) -> None:
        """Take in a heartbeat of a live worker."""
        view = self._views.get(report.worker.worker_id)
        if view is None or view.worker != report.worker:
            return
        self._fetch.observe(report.worker.worker_id, report.load.counters)
        view.observe(report.load, now)
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
        if self._views.pop(worker_id, None) is None:
            return
        self._index.remove_worker(worker_id)
        self._fetch.forget(worker_id)
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
    ) -> Placement | Rejection:
        """Choose the workers for a request and book their share.

        `keys` name the full blocks of prompt and output so far. `exclude` is None for a new
        request; for one that has been accepted before (and is held to no limit any more) it names
        the workers it failed on, which are used only when there is no other.
        """
        admit, exclude = exclude is None, exclude or ()
        decodes = self._usable(Role.DECODE, exclude)
        if not decodes:
            return no_decode()
        layout = self._layout
        assert layout is not None, "workers without a layout"
        num_tokens = len(request.prompt_tokens) + num_output_so_far
        query = self._prefill_query(num_tokens, keys, layout)
        wanted = self._decode_query(request, num_output_so_far, layout, query.own_matches)
        chosen = self._choose(query, wanted, exclude, decodes, request)
        if chosen is None:
            return too_large(num_tokens)
        prefill, decode = chosen
        if admit:
            rejection = self._admit(request, prefill, decode, wanted, now)
            if rejection is not None:
                return rejection
        self._book(request.request_id, keys, prefill, decode, wanted, now)
        whole = prefill.view is decode.view
        return Placement(
            prefill=None if whole else prefill.view.worker,
            decode=decode.view.worker,
            sources=prefill.sources,
            predicted_ttft_s=prefill.ttft_s,
            predicted_tbt_s=decode.tbt_s,
            num_cached_blocks=prefill.num_cached_blocks,
            num_cached_tokens=prefill.num_cached_blocks * layout.block_tokens,
            num_fetch_blocks=prefill.num_fetch_blocks,
            num_replicate_blocks=0 if whole else self._replication.use(keys, now, self._num_pools),
        )

    def on_prefilled(self, request: GenerateRequest, now: float) -> Rejection | None:
        """The request has its first token: its prompt is computed, its fetches are over.

        Returns a rejection when its decode worker would miss the limit now (`recheck_decode`).
        """
        booking = self._books.get(request.request_id)
        rejection = None
        recheck = self._config.recheck_decode or self._config.admission == "late"
        if booking is not None and not booking.prefilled and recheck:
            view = self._views.get(booking.decode)
            if view is not None and booking.computing != booking.decode:
                tbt_s = self._forecast.tbt_now_s(view, len(request.prompt_tokens))
                rejection = check_limits(self._config, request, 0.0, tbt_s)
        self._prefilled(request.request_id)
        self._forecast.joined(request.request_id, now)
        return rejection

    def _prefilled(self, request_id: str) -> None:
        booking = self._books.get(request_id)
        if booking is None or booking.prefilled:
            return
        booking.prefilled = True
        self._inflight.remove(booking.computing, booking.keys)
        self._fetch.ended(booking.sources)
        view = self._views.get(booking.computing)
        if view is not None:
            view.prefilled(request_id)
            if booking.computing != booking.decode:
                view.release(request_id)

    def release(self, request_id: str, num_output_tokens: int | None = None) -> None:
        """Take a placement back: the request has ended, or the attempt has. `num_output_tokens`
        where it ended by itself, to learn how long outputs are.
        """
        self._prefilled(request_id)
        self._forecast.ended(request_id)
        booking = self._books.pop(request_id, None)
        if booking is None:
            return
        for worker_id in {booking.computing: None, booking.decode: None}:
            view = self._views.get(worker_id)
            if view is not None:
                view.release(request_id)
        if num_output_tokens is not None:
            self._output_tokens.add(num_output_tokens)

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError unless exactly the requests `placed` are on the books."""
        assert set(self._books) == placed, "the Conductor's books and the gateway's disagree"
        assert self._forecast.num_expected == len(placed), "somebody else is expected on decode"
        for view in self._views.values():
            for request_id in (*view.pending, *view.reported):
                booking = self._books.get(request_id)
                assert booking is not None, "a share without a booking"
                assert view.worker_id in {booking.computing, booking.decode}
        if all(booking.prefilled for booking in self._books.values()):
            assert self._inflight.num_keys == 0, "prefixes in flight that nobody computes"
            self._fetch.check_idle()
        self._index.check_integrity()

    # -------------------------------------------------------- internals

    @property
    def _num_pools(self) -> int:
        return sum(view.role == Role.KVSTORE for view in self._views.values())

    def _num_pool_copies(self, key: BlockKey) -> int:
        return sum(replica.tier != Tier.HBM for replica in self._index.replicas(key))

    def _usable(self, role: Role, exclude: Collection[str]) -> list[InstanceView]:
        """Return the workers of a role that take work, excluded ones only for want of others."""
        views = [v for v in self._views.values() if v.role == role and not v.draining]
        return [v for v in views if v.worker_id not in exclude] or views

    def _prefill_query(
        self, num_tokens: int, keys: Sequence[BlockKey], layout: Layout
    ) -> PrefillQuery:
        matches = self._index.match(keys)
        own = {
            worker_id: length
            for worker_id, length in matches.items()
            if self._views[worker_id].role != Role.KVSTORE
        }
        for worker_id, length in self._inflight.match(keys).items():
            own[worker_id] = max(length, own.get(worker_id, 0))

        def look_up(first: int) -> list[StoreRun]:
            found = self._index.match(keys[first:]) if first else matches
            runs = [
                self._fetch.run(self._views[worker_id], first, length)
                for worker_id, length in found.items()
                if self._views[worker_id].role == Role.KVSTORE
            ]
            return sorted(
                runs, key=lambda run: (-run.stop, run.remote_fixed_s, run.store.worker_id)
            )

        return PrefillQuery(
            num_tokens=num_tokens,
            block_tokens=layout.block_tokens,
            own_matches=own,
            sources=PrefixSources(look_up),
        )

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

    def _choose(
        self,
        query: PrefillQuery,
        wanted: DecodeQuery,
        exclude: Collection[str],
        decodes: Sequence[InstanceView],
        request: GenerateRequest,
    ) -> tuple[PrefillOption, DecodeOption] | None:
        """Return who computes the prompt and who decodes (the same view = whole on decode)."""
        num_blocks = -(-query.num_tokens // query.block_tokens)
        live = self._usable(Role.PREFILL, exclude)
        prefills = [view for view in live if view.hello.num_blocks >= num_blocks]
        if not live:
            return self._choose_whole(query, wanted, decodes)
        decode = choose_decode(wanted, decodes)
        prefill = self._policy.choose(query, prefills)
        if decode is None or prefill is None:
            return None
        if self._config.whole_on_decode_max_tokens:
            whole = self._choose_whole(query, wanted, decodes)
            if whole is not None and self._whole_is_better(whole, prefill, request):
                return whole
        return prefill, decode

    def _choose_whole(
        self, query: PrefillQuery, wanted: DecodeQuery, decodes: Sequence[InstanceView]
    ) -> tuple[PrefillOption, DecodeOption] | None:
        """Return the decode worker that does a whole request soonest, those with room first."""
        pairs = [
            (self._option(query, view, view.queued_s()), evaluate(wanted, view))
            for view in decodes
            if view.hello.num_blocks >= wanted.num_blocks_now
        ]
        return min(
            pairs,
            key=lambda pair: (
                pair[1].full,
                pair[0].ttft_s,
                pair[1].tbt_s,
                pair[0].view.num_assigned,
                pair[0].view.worker_id,
            ),
            default=None,
        )

    def _whole_is_better(
        self,
        whole: tuple[PrefillOption, DecodeOption],
        split: PrefillOption,
        request: GenerateRequest,
    ) -> bool:
        """Whether a short prompt should run on its decode worker: sooner there, there is room, and
        the batch it delays stays inside the limit on gaps.
        """
        option, decode = whole
        if option.num_new_tokens > self._config.whole_on_decode_max_tokens or decode.full:
            return False
        limit_s = request.tbt_slo_s or self._config.tbt_slo_s
        gap_s = decode.tbt_s + option.compute_s
        return option.ttft_s <= split.ttft_s and (limit_s is None or gap_s <= limit_s)

    def _admit(
        self,
        request: GenerateRequest,
        prefill: PrefillOption,
        decode: DecodeOption,
        wanted: DecodeQuery,
        now: float,
    ) -> Rejection | None:
        limited = request.tbt_slo_s is not None or self._config.tbt_slo_s is not None
        if decode.full and limited:
            return reject(
                Overloaded,
                "decode_full",
                "All decode workers are full, so the limit on gaps between tokens cannot be met. "
                "Retry later.",
                2.0,
            )
        tbt_s = self._admission_tbt_s(prefill, decode, wanted, now)
        return check_limits(self._config, request, prefill.ttft_s, tbt_s)

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
                return self._forecast.tbt_now_s(decode.view, wanted.num_tokens)
            case _:
                stay_s = max(1.0, self._output_tokens.value) * decode.tbt_s
                at_s = now + prefill.ttft_s
                return max(
                    self._forecast.tbt_now_s(decode.view, wanted.num_tokens),
                    self._forecast.tbt_at_s(decode.view, wanted.num_tokens, now, at_s, stay_s),
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
        assert request_id not in self._books, "placed twice"
        computing, decoding = prefill.view, decode.view
        whole = computing is decoding
        compute = Assignment(
            request_id=request_id,
            placed_s=now,
            num_prefill_tokens=prefill.num_new_tokens,
            prefill_s=prefill.fetch_s + prefill.compute_s,
            num_context_tokens=wanted.num_tokens if whole else 0,
            num_blocks=wanted.num_blocks_expected if whole else 0,
        )
        computing.assign(compute)
        if not whole:
            decoding.assign(
                Assignment(
                    request_id=request_id,
                    placed_s=now,
                    num_context_tokens=wanted.num_tokens,
                    num_blocks=wanted.num_blocks_expected,
                )
            )
        self._forecast.expect(
            request_id, decoding.worker_id, wanted.num_tokens, now + prefill.ttft_s
        )
        held = tuple(keys)
        self._books[request_id] = _Booking(
            computing=computing.worker_id,
            decode=decoding.worker_id,
            keys=held,
            sources=prefill.sources,
        )
        self._inflight.add(computing.worker_id, held)
        self._fetch.started(prefill.sources)
