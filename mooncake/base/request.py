"""A request, its sampling and its events. Past the API server a `GenerateRequest` is valid by
construction and is not checked again.

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


class Priority(str, Enum):
    """The class of service. Each class has a weight: when classes compete, each gets its share by
    weight, and none waits for ever.
    """

    PREMIUM = "premium"
    INTERACTIVE = "interactive"
    BATCH = "batch"

    @property
    def order(self) -> int:
        """The class's place among requests with equal turns; 0 goes first."""
        return _CLASS_ORDER[self]

    @property
    def weight(self) -> int:
        """The class's share as a multiple of the batch class's share."""
        return _CLASS_WEIGHT[self]


_CLASS_ORDER = {priority: order for order, priority in enumerate(Priority)}
"""The classes in the order of their definition."""
_CLASS_WEIGHT = {Priority.PREMIUM: 16, Priority.INTERACTIVE: 4, Priority.BATCH: 1}

Flow = tuple[Priority, str]
"""(class, tenant): one party among those that share."""


def fair_shares(flows: Iterable[Flow]) -> dict[Flow, float]:
    """Return the share of each flow when all flows want the same resource, by the weights of their
    classes. A tenant that uses both premium and interactive has one share, which these divide.
    """
    weights = {(priority, tenant): float(priority.weight) for priority, tenant in flows}
    for tenant in [tenant for priority, tenant in weights if priority is Priority.PREMIUM]:
        if (Priority.INTERACTIVE, tenant) in weights:
            weights[Priority.PREMIUM, tenant] /= 2
            weights[Priority.INTERACTIVE, tenant] /= 2
    total = sum(weights.values())
    return {flow: weight / total for flow, weight in weights.items()}


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A context-free grammar over the bytes and ids of the output tokens, and where it begins.

    The API server composes and checks it (`api.constrained`); the workers apply it
    (`model.grammars`). A sequence's position in its grammar is never sent: it follows from this
    value and the output tokens.

    Before it begins, tokens are free. It begins with the first token, unless `free` is set; in free
    text it begins with a trigger (which belongs to it) or after `think_end`.
    """

    text: str
    """llguidance's dialect of Lark: `<[ID]>` is a token, `%json {…}` fits a JSON schema."""
    end_ids: list[int]
    """Tokens that end the output. They are allowed only where the grammar is complete."""
    free: bool = False
    """The output begins with free text: a think block that the prompt opened, or prose that may
    lead to a tool call.
    """
    optional: bool = False
    """The output may end before the grammar has begun."""
    triggers: list[int] = []
    """These tokens end the free text; each is also the first token of the grammar."""
    think_begin: int | None = None
    """This token is allowed only as the first one. Free text up to `think_end` follows it."""
    think_end: int | None = None
    """This token ends free text. The grammar begins with the next token."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request; names and defaults are those of the OpenAI API and vLLM.

    A sampled token depends only on `seed`, its position in the output, and the distribution, so a
    request can be resumed on another worker and continues with the same tokens. The API server
    draws `seed` when the client gave none. Stop *strings* are text and therefore handled in `api`;
    `stop_token_ids` are tokens and handled by the engine.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []
    """Empty = all."""
    seed: int = 0
    """64-bit, unsigned."""
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the output with reason `stop`. Includes the model's EOS ids unless
    `ignore_eos` is set.
    """
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """None: no logprobs; 0: of the sampled token only; n: also of the n most likely tokens."""
    num_prompt_logprobs: int | None = None
    bad_words: list[list[int]] = []
    """Token sequences that never appear: after all but the last token of one, the last is masked.
    """
    grammar: Grammar | None = None
    """None: any text is allowed."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. The API server makes `n` of these for `n > 1`.

    The prompt is never empty; `len(prompt_tokens) + sampling.max_tokens` fits the model's context.
    """

    request_id: str
    prompt: Annotated[bytes, msgspec.Meta(min_length=4)]
    """Token ids, packed by `pack_tokens`."""
    sampling: SamplingParams
    tenant: str = ""
    """A part of the root of the block keys: no tenant can reuse another's cache, or learn what is
    in it.
    """
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    ttft_slo_s: float | None = None
    """The request's own limit, in place of the cluster's."""
    tbt_slo_s: float | None = None
    timeout_s: float | None = None
    """The request fails with 408 when it has not finished this many seconds after it was accepted.
    """
    num_kept_tokens: int = 0
    """Leading tokens of the prompt whose KV the pool keeps, as far as the tenant may."""
    keep_s: float = 0.0
    """How many seconds it is kept after the request."""
    keeps_answer: bool = False
    """Whether the answer is kept too, because the next turn begins with it. The whole prompt is."""
    call_token: int | None = None
    """The token that begins a call of a tool. Given: only an answer that holds it is kept."""
    traced: bool = False
    """True if workers report what they did for the request and when (`RequestOutput.spans`)."""

    def __post_init__(self) -> None:
        unpack_tokens(self.prompt)

    @property
    def prompt_tokens(self) -> memoryview[int]:
        return unpack_tokens(self.prompt)

    @property
    def prompt_price(self) -> int:
        """How many tokens the prompt counts for in the shares of tenants and keys. A prompt with
        log-probabilities is computed without a cache, and each log-probability counts as one more
        token.
        """
        wanted = self.sampling.num_prompt_logprobs
        return len(self.prompt_tokens) * (1 if wanted is None else wanted + 2)

    @property
    def flow(self) -> Flow:
        return self.priority, self.tenant

    def tokens_with(self, output_tokens: Sequence[int]) -> memoryview[int]:
        """Return the tokens of the prompt followed by its output so far."""
        return unpack_tokens(self.prompt + pack_tokens(output_tokens))


class RequestState(str, Enum):
    """The state of a request at the gateway; see the picture in the module's docstring."""

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
"""The legal transitions. Back to QUEUED means that a worker was lost and the request is placed
again.
"""


class FinishReason(str, Enum):
    """Why a request ended. STOP and LENGTH are successes, named as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The client disconnected, or asked for the end."""
    REJECTED = "rejected"
    """The request was refused before any work was done; `Failure` has the status and reason."""
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one token under the raw (temperature 1) distribution."""

    logprob: float
    """The log-probability of the token itself."""
    rank: int
    """The token's rank; 1 is the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob) of the most likely tokens, best first."""


PromptLogprobs = list[TokenLogprobs | None]
"""One entry per prompt token, None for the first."""
NO_LOGPROBS = msgspec.Raw()


def packed_logprobs(entries: PromptLogprobs | None) -> msgspec.Raw:
    """Return `entries` encoded as they travel, so that the gateway's event loop passes them on
    without reading up to a hundred thousand of them. None becomes `NO_LOGPROBS`.
    """
    return NO_LOGPROBS if entries is None else msgspec.Raw(_ENCODER.encode(entries))


def unpacked_logprobs(packed: msgspec.Raw) -> PromptLogprobs:
    """Return the entries that `packed_logprobs` encoded."""
    return _DECODER.decode(packed)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PromptLogprobs)


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request did not succeed. The codes are those of `base.errors`."""

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
    """How many tokens of a prompt were reused, by the place that they came from."""

    hbm: int = 0
    """The pages of the worker that computed the prompt."""
    dram: int = 0
    """The memory of the pool node of this worker's machine."""
    ssd: int = 0
    """The disks of that node; the block has not been read from them since it went there."""
    object: int = 0
    """The bucket of an object store, likewise."""
    peer: int = 0
    """The pool node of another machine, or an engine that leaves."""


class CacheMisses(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of a prompt were computed, by the reason why they were not reused."""

    not_seen: int = 0
    """The gateway knows of no copy of the block, or of a block before it, now or in the recent
    past.
    """
    evicted: int = 0
    """The block was cached. It, or a block after it, has been removed, and no copy is left of it or
    of a block before it.
    """
    out_of_reach: int = 0
    """Only another engine, which lends no pages, holds the block or a block before it."""
    recomputed: int = 0
    """Pools held the block, but placement expected that computing it is faster, or its policy does
    not fetch.
    """
    fetch_failed: int = 0
    """Placement counted on the block, but the worker did not find it or could not fetch it."""


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """How each token in a prompt's reusable blocks was obtained: hits and misses together are all
    of them. The last token is always computed, so its block is not reusable.
    """

    hits: CacheHits = CacheHits()
    misses: CacheMisses = CacheMisses()

    def __add__(self, other: CacheUse) -> CacheUse:
        """Return the sum of both."""
        return CacheUse(
            hits=CacheHits(**_sums(self.hits, other.hits)),
            misses=CacheMisses(**_sums(self.misses, other.misses)),
        )


def _sums(one: msgspec.Struct, other: msgspec.Struct) -> dict[str, int]:
    """Return the fields of two structs of numbers, added."""
    return {name: getattr(one, name) + getattr(other, name) for name in one.__struct_fields__}


Fact = str | int | float | bool
"""The type of an attribute's value."""


class WorkEvent(msgspec.Struct, frozen=True, array_like=True):
    """A moment within a span."""

    name: str
    at_s: float
    facts: dict[str, Fact] = {}


class WorkSpan(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a worker's work on a traced request: "fetch", "queue", "prefill", "reserve",
    "transfer" or "decode". It holds names and figures, no tokens and no text.
    """

    name: str
    worker_id: str
    """The worker whose clock gives the times; `LoadReport.clock_s` tells that clock."""
    start_s: float
    end_s: float
    facts: dict[str, Fact] = {}
    events: list[WorkEvent] = []


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request, or its end, from a worker to the gateway. The gateway passes on
    what has new tokens, in order of position and each position once, to the client's call, which
    gets the end by its `FinalEvent`.
    """

    request_id: str
    attempt: int
    start: int
    """The position in the output of the first of `tokens`."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: msgspec.Raw = NO_LOGPROBS
    """Made by `packed_logprobs`."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was reused. Set in the first output of an attempt."""
    fetched: CacheHits | None = None
    """How many blocks of these were fetched. Set in the same output; None: none were."""
    spans: tuple[WorkSpan, ...] = ()
    """What the worker did since its last output, if the request is traced."""
    finish: FinishInfo | None = None


class FinalEvent(msgspec.Struct, frozen=True, kw_only=True, tag="final"):
    """The last event of every accepted request. Each request has exactly one."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused instead of computed."""
    cache: CacheUse | None = None
    """None: the prompt was not computed, or was computed without a cache for its log-probabilities.
    """
    stop_token_id: int | None = None
    failure: Failure | None = None
    """Set exactly when `reason` is REJECTED or ERROR."""


OutputEvent = RequestOutput | FinalEvent
Sink = Callable[[OutputEvent], None]
"""Receives the events of one request in order. It may call the gateway, but must not raise."""


def request_finish(
    request: GenerateRequest, output_tokens: Sequence[int], max_model_len: int | None = None
) -> FinishInfo | None:
    """Return how the newest of `output_tokens` ends the request; None if it does not.

    A stop token ends it only after `min_tokens` tokens before it, in agreement with the sampler's
    mask.
    """
    sampling, num_outputs = request.sampling, len(output_tokens)
    if num_outputs > sampling.min_tokens and output_tokens[-1] in sampling.stop_token_ids:
        return FinishInfo(reason=FinishReason.STOP, stop_token_id=output_tokens[-1])
    num_tokens = len(request.prompt_tokens) + num_outputs
    if num_outputs >= sampling.max_tokens or num_tokens >= (max_model_len or math.inf):
        return FinishInfo(reason=FinishReason.LENGTH)
    return None
