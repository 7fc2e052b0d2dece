"""A request and what comes back. Past the door a `GenerateRequest` is valid by construction:
nothing checks it twice.

RequestState: the life of a request as the gateway sees it (one table of legal moves,
`TRANSITIONS`).

    QUEUED ──► PREFILLING ──► DECODING ──► FINISHED
       │            │  ▲          │  │
       │            │  └──────────┘  │      (worker lost: placed again, with the tokens so far)
       └────────────┴────────────────┴───► FINISHED   (refused, aborted, failed)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import msgspec

from mooncake.base.blocks import pack_tokens, unpack_tokens
from mooncake.base.sampling import SamplingParams


class Priority(str, Enum):
    """Who yields to whom: premium before interactive before batch (job completion time only)."""

    PREMIUM = "premium"
    INTERACTIVE = "interactive"
    BATCH = "batch"

    @property
    def order(self) -> int:
        """0 goes first."""
        return _CLASS_ORDER[self]


_CLASS_ORDER = {priority: order for order, priority in enumerate(Priority)}
"""In the order they are named."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. `n > 1` is `n` of these, made by the door.

    The prompt is never empty; `len(prompt_tokens) + sampling.max_tokens` fits the model's context.
    """

    request_id: str
    prompt: Annotated[bytes, msgspec.Meta(min_length=4)]
    """Its token ids, made by `pack_tokens`."""
    sampling: SamplingParams
    tenant: str = ""
    """Salts the block keys: one tenant can neither hit nor time another's cache."""
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    ttft_slo_s: float | None = None
    """Overrides the cluster's limit for this request."""
    tbt_slo_s: float | None = None
    timeout_s: float | None = None
    """The request fails with 408 when it has not finished this long after it was accepted."""

    def __post_init__(self) -> None:
        unpack_tokens(self.prompt)

    @property
    def prompt_tokens(self) -> memoryview[int]:
        return unpack_tokens(self.prompt)

    def tokens_with(self, output_tokens: Sequence[int]) -> memoryview[int]:
        """Return the tokens of the prompt and of its output so far."""
        return unpack_tokens(self.prompt + pack_tokens(output_tokens))


class RequestState(str, Enum):
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
"""Legal moves; QUEUED again means "to be placed again" after a worker was lost."""


class FinishReason(str, Enum):
    """Why a request ended. The first two are successes as OpenAI names them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The client went away or asked for it."""
    REJECTED = "rejected"
    """Refused before any work was done; `Failure` has status and reason."""
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one token under the raw (temperature 1, unpenalised)
    distribution.
    """

    logprob: float
    """Of the token itself."""
    rank: int
    """1 = the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob) of the most likely tokens, best first."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request did not succeed, in the terms of `base.errors`."""

    status: int
    error_type: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None

    @classmethod
    def unavailable(cls, message: str) -> Failure:
        """Return a 503: another placement, or a later try, may go well."""
        return cls(status=503, error_type="ServiceUnavailableError", message=message)

    @classmethod
    def turned_away(cls, message: str) -> Failure:
        """Return a 429: a worker takes nothing (more) now, and has not tried."""
        return cls(status=429, error_type="RateLimitError", message=message)


class TokensEvent(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """New output tokens. `start` is the output position of the first, so a repeat can be
    recognised.
    """

    request_id: str
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first tokens only: one entry a prompt token, None for the first."""


class FinalEvent(msgspec.Struct, frozen=True, kw_only=True, tag="final"):
    """The one last event of every accepted request."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was reused rather than computed."""
    stop_token_id: int | None = None
    failure: Failure | None = None
    """Set exactly when `reason` is REJECTED or ERROR."""


OutputEvent = TokensEvent | FinalEvent
