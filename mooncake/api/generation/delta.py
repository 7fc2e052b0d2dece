"""The additions to one choice, from which replies and streams are made."""

from __future__ import annotations

import msgspec

from mooncake.api.schema.replies import SchemaError
from mooncake.api.text.message_parser import Piece, TextDelta, ToolCallDelta
from mooncake.base import TokenLogprobs

_ENTRY_BYTES = 16
"""Bytes of one encoded log-probability of a prompt."""


class Delta(msgspec.Struct, kw_only=True):
    """The additions to one choice since its last `Delta`."""

    index: int
    pieces: list[Piece]
    """Text, reasoning and tool calls in the model's order."""
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """As long as `tokens` when asked for, else empty."""
    runs: list[int | None]
    """For each of `logprobs` the number of the run of text that its token belongs to
    (`TextDelta.run`); None = reasoning, part of a call, a marker or the end."""
    prompt_logprobs: msgspec.Raw | None = None
    """Set in the first `Delta` of a prompt's first choice; `unpacked_logprobs` reads them."""
    finish_reason: str | None = None
    """"stop", "length" or "tool_calls" in the last one."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None at the model's own end of text."""
    schema_errors: list[SchemaError] = []
    """Set in the last one: where the answer violates a schema that its grammar does not follow as a
    whole.
    """

    @property
    def size(self) -> int:
        """Approximate number of tokens and log-probabilities: the cost of writing it."""
        num = len(self.tokens)
        if self.logprobs:
            num += len(self.logprobs) * (1 + len(self.logprobs[0].top))
        if self.prompt_logprobs is not None:
            num += len(memoryview(self.prompt_logprobs)) // _ENTRY_BYTES
        return num

    @property
    def text(self) -> str:
        """All text, without reasoning and tool calls."""
        return self._joined(is_reasoning=False)

    @property
    def reasoning(self) -> str:
        return self._joined(is_reasoning=True)

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        return [piece for piece in self.pieces if isinstance(piece, ToolCallDelta)]

    def _joined(self, *, is_reasoning: bool) -> str:
        return "".join(
            piece.text
            for piece in self.pieces
            if isinstance(piece, TextDelta) and piece.is_reasoning is is_reasoning
        )
