"""What a receipt says of one call: who was chosen for it and why, what was predicted, what came.

Values only. `receipts.py` keeps what they are made of. Figures, names and times: no tokens and no
text.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from mooncake.base.request import CacheUse, Fact


class PrefillEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker would have needed for the prompt, as far as was known at the choice."""

    worker: str
    taken: bool
    ttft_s: float
    """The sum of the next three."""
    queue_s: float
    """Seconds until what was queued there is computed."""
    fetch_s: float
    """Seconds to read the part of the prefix that is fetched."""
    compute_s: float
    """Seconds to compute the rest of the prompt."""
    num_cached_tokens: int
    """Tokens of the prompt that it would reuse."""
    num_fetch_blocks: int
    """Blocks with some of these tokens that it would fetch from pools."""
    fetch_blocks: dict[str, int]
    """The same by the tier in which the pools have them."""


class DecodeEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What joining the batch of one worker would have meant."""

    worker: str
    taken: bool
    tbt_s: float
    """The gap between tokens with this request in the batch."""
    push_s: float
    """Seconds to push the KV of the prompt there."""
    num_short_blocks: int
    """Blocks that it lacks for the expected answer; 0: it fits."""
    full: bool
    """True if not even the prompt fits now."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What one placement chose from, the best first."""

    prefill: list[PrefillEstimate]
    """The estimates of decode workers, if one of them does the whole request."""
    decode: list[DecodeEstimate]
    num_prefill: int
    """Workers that were compared for the prompt; not more are shown than `prefill` has."""
    num_decode: int
    unusable: dict[str, str]
    """Worker -> why it was not compared; some of them."""


class PlacementFacts(Protocol):
    """What was known when the workers of a request were chosen. The scheduler makes it."""

    @property
    def num_bytes(self) -> int:
        """About how much memory these facts take."""

    def choice(self) -> Choice:
        """Return the estimates of all workers; slow."""

    def bundled(self) -> Any:
        """Return the facts as a value that can be written, from which the choice is replayed."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One placement of a sequence. Times are seconds since the call began."""

    number: int
    prefill: str | None
    """None: its decode worker does the whole request."""
    decode: str
    start_s: float
    end_s: float | None
    """None: it has not ended."""
    lost: str | None
    """Why it did not come to its end."""
    predicted_ttft_s: float
    """Seconds from the start of the attempt to the first token."""
    ttft_s: float | None
    """The same, measured; None: the first token came in another attempt, or has not come."""
    predicted_tbt_s: float
    num_predicted_cached_tokens: int
    num_fetch_blocks: int
    choice: Choice | None
    """None: what it chose from was not kept."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work or a wait. Times are seconds since the call began."""

    name: str
    start_s: float
    end_s: float | None
    """None: it has not ended."""
    worker: str | None
    """None: the gateway."""
    attempt: int | None
    """None: it belongs to no attempt."""
    facts: dict[str, Fact]
    """Blocks, bytes, path, tokens."""


class SequenceReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one sequence of a call."""

    request_id: str
    """The id that logs name."""
    state: str
    """"waiting", "placed" or "answering", or how it ended: a `FinishReason`."""
    status: int
    """The HTTP status of its failure, or 200."""
    refused: str | None
    """Why it was refused, in a word."""
    num_prompt_tokens: int
    num_output_tokens: int
    cache: CacheUse | None
    """What became of the prompt; None before the first token."""
    ttft_s: float | None
    """Seconds from its permit to its first token."""
    ttft_slo_s: float | None
    """The limit on it, if there is one."""
    tbt_s: float | None
    """The mean time of a token after the first."""
    longest_gap_s: float | None
    tbt_slo_s: float | None
    attempts: list[Attempt]
    choice: Choice | None
    """The estimates by which it would have missed a limit. None: it was not refused."""
    steps: list[Step]
    num_left_out: int
    """Events that were not kept: there were too many."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call."""

    id: str
    """The value of the header `x-mooncake-receipt`."""
    call_id: str
    """The `id` of the answer."""
    gateway: str
    tenant: str
    begun_at: int
    """Unix time, in seconds."""
    num_sequences: int
    """All sequences of the call; `sequences` leaves some out if there are too many."""
    sequences: list[SequenceReceipt]


class BundleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One placement of a sequence."""

    request_id: str
    attempt: int
    """1: the first; 0: it was refused, and these workers would have had it."""
    placement: Any
    """What it was chosen from, as `PlacementFacts.bundled` returns it."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of all placements of a call."""

    receipt: str
    """The name of its receipt."""
    placements: list[BundleEntry]
    version: int = 2
