"""A request and its events. Past the API server a `GenerateRequest` is valid by construction and is
not checked again.

RequestState: the life of a request as the gateway sees it (`TRANSITIONS` is the one table of legal
transitions).

    QUEUED ──► PREFILLING ──► DECODING ──► FINISHED
       │            │  ▲          │  │
       │            │  └──────────┘  │      (worker lost: placed again, with the tokens so far)
       └────────────┴────────────────┴───► FINISHED   (refused, aborted, failed)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Annotated

import msgspec

from mooncake.base.blocks import pack_tokens, unpack_tokens
from mooncake.base.sampling import SamplingParams
from mooncake.base.work_span import WorkSpan


class Priority(str, Enum):
    """The class of service. A class is a weight: where classes compete for something, each gets its
    part of it, and none waits for ever.
    """

    PREMIUM = "premium"
    INTERACTIVE = "interactive"
    BATCH = "batch"

    @property
    def order(self) -> int:
        """The rank of the class among those whose turns are equal; 0 goes first."""
        return _CLASS_ORDER[self]

    @property
    def weight(self) -> int:
        """How many times the share of a batch request it has."""
        return _CLASS_WEIGHT[self]


_CLASS_ORDER = {priority: order for order, priority in enumerate(Priority)}
"""In the order of their definition."""
_CLASS_WEIGHT = {Priority.PREMIUM: 16, Priority.INTERACTIVE: 4, Priority.BATCH: 1}

Flow = tuple[Priority, str]
"""(class, tenant): who shares with whom."""


def fair_shares(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Return each flow's part of a whole that all of them want, by the weights of their classes. A
    tenant that uses premium and interactive has one share, which it divides between them.
    """
    weights = {(priority, tenant): float(priority.weight) for priority, tenant in flows}
    for tenant in [tenant for priority, tenant in weights if priority is Priority.PREMIUM]:
        if (Priority.INTERACTIVE, tenant) in weights:
            weights[Priority.PREMIUM, tenant] /= 2
            weights[Priority.INTERACTIVE, tenant] /= 2
    total = sum(weights.values())
    return {flow: weight / total for flow, weight in weights.items()}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. The API server makes `n` of these for `n > 1`.

    The prompt is never empty; `len(prompt_tokens) + sampling.max_tokens` fits the model's context.
    """

    request_id: str
    prompt: Annotated[bytes, msgspec.Meta(min_length=4)]
    """Token ids, packed by `pack_tokens`."""
    sampling: SamplingParams
    tenant: str = ""
    """Part of the root of the block keys: a tenant can neither hit nor probe another's cache."""
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    ttft_slo_s: float | None = None
    """Overrides the cluster's limit for this request."""
    tbt_slo_s: float | None = None
    timeout_s: float | None = None
    """The request fails with 408 when it has not finished this long after it was accepted."""
    traced: bool = False
    """Its workers tell what they did for it and when (`RequestOutput.spans`)."""

    def __post_init__(self) -> None:
        unpack_tokens(self.prompt)

    @property
    def prompt_tokens(self) -> memoryview[int]:
        return unpack_tokens(self.prompt)

    @property
    def prompt_price(self) -> int:
        """What the prompt counts in tokens where tenants and keys share: with log-probabilities it
        is computed without a cache, and each of them counts as one more."""
        wanted = self.sampling.num_prompt_logprobs
        return len(self.prompt_tokens) * (1 if wanted is None else wanted + 2)

    @property
    def flow(self) -> Flow:
        return self.priority, self.tenant

    def tokens_with(self, output_tokens: Sequence[int]) -> memoryview[int]:
        """Return the tokens of the prompt followed by its output so far."""
        return unpack_tokens(self.prompt + pack_tokens(output_tokens))


class RequestState(str, Enum):
    """The state of a request at the gateway; see the module's picture."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset(
        {RequestState.PREFILLING, RequestState.DECODING, RequestState.FINISHED}
    ),
    RequestState.PREFILLING: frozenset(
        {RequestState.QUEUED, RequestState.DECODING, RequestState.FINISHED}
    ),
    RequestState.DECODING: frozenset({RequestState.QUEUED, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}
"""Legal transitions; back to QUEUED means "to be placed again" after a worker was lost."""


class FinishReason(str, Enum):
    """Why a request ended. STOP and LENGTH are successes, named as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The client disconnected or asked for it."""
    REJECTED = "rejected"
    """Refused before any work was done; `Failure` has the status and reason."""
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one token under the raw (temperature 1) distribution."""

    logprob: float
    """Of the token itself."""
    rank: int
    """1 = the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob) of the most likely tokens, best first."""


PromptLogprobs = list[TokenLogprobs | None]
"""One entry per prompt token, None for the first."""
NO_LOGPROBS = msgspec.Raw()


def packed_logprobs(entries: PromptLogprobs | None) -> msgspec.Raw:
    """Return `entries` as they travel: encoded, so that the gateway's event loop passes them on
    without reading up to a hundred thousand of them. None = `NO_LOGPROBS`.
    """
    return NO_LOGPROBS if entries is None else msgspec.Raw(_ENCODER.encode(entries))


def unpacked_logprobs(packed: msgspec.Raw) -> PromptLogprobs:
    """Return what `packed_logprobs` was given."""
    return _DECODER.decode(packed)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PromptLogprobs)


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request did not succeed, in the terms of `base.errors`."""

    status: int
    error_type: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None

    @classmethod
    def invalid(cls, message: str) -> Failure:
        """Return a 400: no other worker could do this request."""
        return cls(status=400, error_type="BadRequestError", message=message)

    @classmethod
    def unavailable(cls, message: str) -> Failure:
        """Return a 503: another worker, or a later retry, may succeed."""
        return cls(status=503, error_type="ServiceUnavailableError", message=message)

    @classmethod
    def turned_away(cls, message: str) -> Failure:
        """Return a 429: a worker has no room now, and has not tried."""
        return cls(status=429, error_type="RateLimitError", message=message)


class FinishInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a sequence ended on a worker."""

    reason: FinishReason
    stop_token_id: int | None = None
    failure: Failure | None = None


class CacheHits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt was reused, by the place it came from."""

    hbm: int = 0
    """The pages of the worker that computed the prompt."""
    dram: int = 0
    """The memory of the pool node of this worker's machine."""
    ssd: int = 0
    """The disks of that node; the block has not been read from them since it went there."""
    peer: int = 0
    """The pool node of another machine, or an engine that leaves."""


class CacheMisses(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt was computed, by the reason why it was not reused."""

    not_seen: int = 0
    """The gateway knows of no copy, now or lately, of it or of a block before it."""
    evicted: int = 0
    """It was cached: it, or a block behind it, has been removed, and no copy of it, or of a block
    before it, is left.
    """
    out_of_reach: int = 0
    """It, or a block before it, is only in the pages of another engine, which lends none."""
    recomputed: int = 0
    """Pools had it; placement took computing it for quicker, or its policy does not fetch it."""
    fetch_failed: int = 0
    """Placement counted on it, and the worker did not find it or could not fetch it."""


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the tokens in a prompt's reusable blocks: hits and misses are all of them. The
    last token is always computed, so its block is not reusable.
    """

    hits: CacheHits = CacheHits()
    misses: CacheMisses = CacheMisses()

    def __add__(self, other: CacheUse) -> CacheUse:
        """Return what became of both prompts."""
        return CacheUse(
            hits=CacheHits(**_sums(self.hits, other.hits)),
            misses=CacheMisses(**_sums(self.misses, other.misses)),
        )


def _sums(one: msgspec.Struct, other: msgspec.Struct) -> dict[str, int]:
    """Return the fields of two structs of numbers, added."""
    return {name: getattr(one, name) + getattr(other, name) for name in one.__struct_fields__}


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request, or its end: from a worker to the gateway, and, without the end and
    in order of position, from there to the client's call. Repeats show by `start`.
    """

    request_id: str
    attempt: int
    start: int
    """Output position of the first token of `tokens`."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: msgspec.Raw = NO_LOGPROBS
    """By `packed_logprobs`."""
    num_cached_tokens: int | None = None
    """With the first output of an attempt: prompt tokens whose KV was reused."""
    fetched: CacheHits | None = None
    """With the same output: how many blocks of these were fetched; None: none were."""
    spans: tuple[WorkSpan, ...] = ()
    """Of a traced request: what the worker did for it since its last output."""
    finish: FinishInfo | None = None


class FinalEvent(msgspec.Struct, frozen=True, kw_only=True, tag="final"):
    """The one last event of every accepted request."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused instead of computed."""
    cache: CacheUse | None = None
    """None: the prompt was not computed, or for its log-probabilities, without a cache."""
    stop_token_id: int | None = None
    failure: Failure | None = None
    """Set exactly when `reason` is REJECTED or ERROR."""


OutputEvent = RequestOutput | FinalEvent
Sink = Callable[[OutputEvent], None]
"""Gets the events of one request in order. It may call the gateway from within; must not raise."""


def request_finish(
    request: GenerateRequest, output_tokens: Sequence[int], max_model_len: int | None = None
) -> tuple[FinishReason | None, int | None]:
    """Return (reason, stop token) when the newest of `output_tokens` ends the request, else Nones.

    A stop token ends it only after `min_tokens` tokens before it, in agreement with the sampler's
    mask.
    """
    sampling, num_outputs = request.sampling, len(output_tokens)
    if num_outputs > sampling.min_tokens and output_tokens[-1] in sampling.stop_token_ids:
        return FinishReason.STOP, output_tokens[-1]
    num_tokens = len(request.prompt_tokens) + num_outputs
    if num_outputs >= sampling.max_tokens or num_tokens >= (max_model_len or math.inf):
        return FinishReason.LENGTH, None
    return None, None
