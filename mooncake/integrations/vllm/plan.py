"""The scheduler's side: which chunks of a request are looked up, loaded and saved, and when. Pure;
a port gives the pool's answers, and the caller gives the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mooncake.base import BlockKey
from mooncake.integrations.vllm.chunks import Packing, TokenChain

PROMISED = "mooncake_tokens"
"""The key of a prefill server's answer that says how many leading tokens it gives to the pool."""


class RequestView(Protocol):
    """The attributes that are read of a vLLM request."""

    request_id: str
    num_tokens: int
    num_preemptions: int
    all_token_ids: Sequence[int]
    cache_salt: str | None
    kv_transfer_params: Any


class Answer(Protocol):
    """The answer of the pool to a look-up, once it has come."""

    def done(self) -> bool: ...

    def result(self) -> int:
        """Return how many leading chunks all ranks have in the pool; 0 if the pool failed."""


class Lookups(Protocol):
    """Asks the pool, without waiting."""

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed in the pool, or None if the pool has not been reached yet."""

    def ask(self, chain: Sequence[BlockKey], promised: int, within_s: float) -> Answer:
        """Look up how many leading chunks there are. If `promised` chunks are not all there yet,
        the answer waits for them, at most this long.
        """


@dataclass(frozen=True, kw_only=True)
class Use:
    """How an engine uses the pool."""

    takes: bool = True
    """False: nothing is loaded."""
    gives: bool = True
    """False: nothing is saved."""
    lookup_timeout_s: float
    """A look-up without an answer by then is a miss."""
    load_timeout_s: float
    """How long chunks are waited for that another engine has promised."""


@dataclass(frozen=True)
class Load:
    """Chunks that are to be loaded into a request's blocks."""

    request_id: str
    chain: list[BlockKey]
    block_ids: list[int]
    """One id for each block of the chunks, except the first `num_known`."""
    num_known: int
    """Blocks at the head of the first chunk that the engine has already."""


@dataclass(frozen=True)
class Save:
    """Chunks that are complete after this step."""

    chain: list[BlockKey]
    block_ids: list[int]


@dataclass
class StepJobs:
    """What the workers do during one step, besides computing it."""

    packing: Packing | None = None
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
    """True if the step computes nothing, so that a worker may wait for the pool."""


@dataclass(frozen=True)
class Scheduled:
    """One request in a step."""

    request_id: str
    num_computed: int
    """Tokens computed before the step."""
    num_tokens: int
    """Tokens that the step computes."""
    block_ids: Sequence[int]


@dataclass
class _Tracked:
    request: RequestView
    chain: TokenChain
    packing: Packing
    answer: Answer | None = None
    deadline_s: float = 0.0
    num_found: int = 0
    """Chunks that the pool holds as far as was found out, or that were given to it."""
    asked_after: int = -1
    """Preemptions of the request when its look-up ended: it is looked up once for each."""


class Planner:
    """The requests of one engine, from their look-up to their end."""

    def __init__(self, lookups: Lookups, block_tokens: int, namespace: str, use: Use) -> None:
        self._lookups = lookups
        self._block_tokens = block_tokens
        self._namespace = namespace
        self._use = use
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []

    @property
    def num_tracked(self) -> int:
        """Requests that have not ended."""
        return len(self._tracked)

    @property
    def is_asking(self) -> bool:
        """True if the answer to some look-up is still to come."""
        answers = (tracked.answer for tracked in self._tracked.values())
        return any(answer is not None and not answer.done() for answer in answers)

    def num_new_matched(
        self, request: RequestView, num_computed: int, now: float
    ) -> tuple[int | None, bool]:
        """Return how many tokens after the first `num_computed` the pool can give, and whether they
        are loaded between steps. (None, False): ask again, because the pool has not answered yet.
        """
        tracked = self._track(request)
        if tracked is None or tracked.asked_after == request.num_preemptions:
            return 0, False
        if not self._use.takes:
            return 0, False
        size = tracked.chain.chunk_tokens
        most = (request.num_tokens - 1) // size  # the last token is computed in any case
        if most * size <= num_computed:
            return 0, False
        if tracked.answer is None:
            promised = min(_promised_tokens(request) // size, most)
            if promised * size <= num_computed:
                promised = 0  # the engine has all of it
            within_s = self._use.load_timeout_s if promised else 0.0
            chain = tracked.chain.upto(request.all_token_ids, most)
            tracked.answer = self._lookups.ask(chain, promised, within_s)
            tracked.deadline_s = now + within_s + self._use.lookup_timeout_s
        if not tracked.answer.done():
            if now < tracked.deadline_s:
                return None, False
            tracked.answer, tracked.asked_after = None, request.num_preemptions
            return 0, False
        found = min(tracked.answer.result(), most)
        tracked.num_found = max(tracked.num_found, found)
        more = found * size - num_computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external: int) -> None:
        """Record the blocks that the engine gave a request for all its tokens so far. The last
        `num_external` tokens are to be loaded.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        answer, tracked.answer = tracked.answer, None
        tracked.asked_after = tracked.request.num_preemptions
        if not num_external or answer is None:
            return
        size, blocks = tracked.chain.chunk_tokens, tracked.packing.blocks
        stop = min(answer.result(), (tracked.request.num_tokens - 1) // size)
        first_block = (stop * size - num_external) // self._block_tokens
        first, num_known = divmod(first_block, blocks)
        self._loads.append(Load(
            request_id=request_id,
            chain=tracked.chain.upto(tracked.request.all_token_ids, stop)[first:],
            block_ids=list(block_ids[first_block : stop * blocks]),
            num_known=num_known,
        ))  # fmt: skip

    def step(self, scheduled: Sequence[Scheduled]) -> StepJobs:
        """Return the jobs of a step: the blocks allocated for loading, and the chunks that are
        complete once the step has ended.
        """
        jobs = StepJobs(self._lookups.packing, self._loads, idle=not scheduled)
        self._loads = []
        for each in scheduled:
            tracked = self._tracked.get(each.request_id)
            if tracked is None:
                continue
            tokens = tracked.request.all_token_ids
            # A token that was sampled and not told yet has no key.
            known = min(each.num_computed + each.num_tokens, len(tokens))
            start, stop = tracked.num_found, known // tracked.chain.chunk_tokens
            if stop > start and self._use.gives:
                blocks = tracked.packing.blocks
                jobs.saves.append(Save(
                    chain=tracked.chain.upto(tokens, stop)[start:],
                    block_ids=list(each.block_ids[start * blocks : stop * blocks]),
                ))  # fmt: skip
                tracked.num_found = stop
        return jobs

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request that has ended, for whatever reason; also an unknown one. The workers
        are still told about a load that has begun; the blocks are freed when they report that it
        has ended.

        Return what goes with the answer if another engine is to decode the request. As vLLM's
        proxies do, whoever asks gives it to that engine as it is.
        """
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or not self._use.gives:
            return None
        if not _params(tracked.request).get("do_remote_decode"):
            return None
        return {PROMISED: tracked.num_found * tracked.chain.chunk_tokens}

    def start_anew(self, namespace: str) -> None:
        """Use keys of another namespace, also for running requests: earlier keys may name KV of
        other weights.
        """
        self._namespace = namespace
        self._tracked.clear()

    def _track(self, request: RequestView) -> _Tracked | None:
        """Return the state of a request, or None if the pool has not been reached yet."""
        tracked = self._tracked.get(request.request_id)
        packing = self._lookups.packing
        if tracked is None and packing is not None:
            chain = TokenChain(
                self._namespace, request.cache_salt or "", packing.blocks * self._block_tokens
            )
            tracked = self._tracked[request.request_id] = _Tracked(request, chain, packing)
        return tracked


def _params(request: RequestView) -> Mapping[str, Any]:
    """Return the parameters that came with a request. vLLM takes them from `vllm_xargs` of a body
    too, unchecked: anything that is not an object counts as none.
    """
    params = request.kv_transfer_params
    return params if isinstance(params, Mapping) else {}


def _promised_tokens(request: RequestView) -> int:
    """Return how many leading tokens another engine has promised to give to the pool."""
    number = _params(request).get(PROMISED)
    return number if isinstance(number, int) and number > 0 else 0
