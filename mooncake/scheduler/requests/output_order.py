"""Puts one request's tokens in order. They come from two senders, over several attempts, and with
repeats.

Pure; one for each request, owned by its record. It looks only at positions in the output and does
not know workers.
"""

from __future__ import annotations

import msgspec

from mooncake.base import RequestOutput
from mooncake.base.request import NO_LOGPROBS, FinishInfo


class OutputOrder:
    """Accepts outputs in any order and releases each position once, in order.

    Bounded: the positions held back lie below `max_tokens`.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.tokens: list[int] = []
        """The tokens released so far."""
        self.num_conflicts = 0
        """Repeated tokens that differed from those released: a worker was not deterministic."""
        self._held: dict[int, RequestOutput] = {}
        self._finish: tuple[int, FinishInfo] | None = None

    @property
    def has_gap(self) -> bool:
        """True if an output is held back because earlier tokens are missing."""
        return bool(self._held) or (self._finish is not None and self.due_finish() is None)

    def drop_held(self) -> None:
        """Drop what is held back: the attempt that sent it has ended."""
        self._held.clear()
        self._finish = None

    def add(self, output: RequestOutput) -> list[RequestOutput]:
        """Add an output; return the events that can be delivered now."""
        if output.finish is not None:
            self._finish = output.start + len(output.tokens), output.finish
        if not output.tokens:
            return []
        if output.start > len(self.tokens):
            if output.start < self._max_tokens:
                self._held.setdefault(output.start, output)
            return []
        events = self._release(output, [])
        while self._held:
            first = min(self._held)
            if first > len(self.tokens):
                break
            events = self._release(self._held.pop(first), events)
        return events

    def due_finish(self) -> FinishInfo | None:
        """Return how the sequence ended, once all tokens before its end were released. A failure is
        returned at once, even if tokens are missing.
        """
        if self._finish is None:
            return None
        position, finish = self._finish
        if position <= len(self.tokens) or finish.failure is not None:
            return finish
        return None

    def _release(self, output: RequestOutput, events: list[RequestOutput]) -> list[RequestOutput]:
        """Release the new part of `output`, which starts at or before the next position."""
        known = len(self.tokens) - output.start
        if known:
            mine = self.tokens[output.start : output.start + len(output.tokens)]
            self.num_conflicts += sum(
                old != new for old, new in zip(mine, output.tokens, strict=False)
            )
        stop = self._max_tokens - output.start
        fresh = output.tokens[known:stop]
        if not fresh:
            return events
        start = len(self.tokens)
        self.tokens.extend(fresh)
        events.append(
            msgspec.structs.replace(
                output,
                start=start,
                tokens=fresh,
                logprobs=None if output.logprobs is None else output.logprobs[known:stop],
                prompt_logprobs=NO_LOGPROBS if start else output.prompt_logprobs,
                finish=None,
            )
        )
        return events
