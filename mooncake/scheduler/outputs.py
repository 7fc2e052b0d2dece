"""Puts the tokens of one request in order: from two senders, over several attempts, with repeats.

Pure; one per request, owned by its record. Positions in the output decide; nothing here knows
workers.
"""

from __future__ import annotations

from mooncake.base import RequestOutput, TokenLogprobs, TokensEvent
from mooncake.base.messages import FinishInfo


class OutputOrder:
    """Accepts outputs in any order and gives out each position once, in order.

    Bounded: the positions held back lie below `max_tokens`.
    """

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self._request_id = request_id
        self._max_tokens = max_tokens
        self.tokens: list[int] = []
        """Given out so far."""
        self.num_conflicts = 0
        """Repeats that were not the token given out (a worker broke determinism)."""
        self._held: dict[int, RequestOutput] = {}
        self._finish: tuple[int, FinishInfo] | None = None

    @property
    def has_gap(self) -> bool:
        """Whether something is held back because earlier tokens are missing."""
        return bool(self._held) or (self._finish is not None and self.due_finish() is None)

    def forget_held(self) -> None:
        """A new attempt begins: what the old one sent ahead is not waited for."""
        self._held.clear()
        self._finish = None

    def offer(self, output: RequestOutput) -> list[TokensEvent]:
        """Take one output in; return what can be given out now."""
        if output.finish is not None:
            self._finish = output.start + len(output.tokens), output.finish
        if not output.tokens:
            return []
        if output.start > len(self.tokens):
            if output.start < self._max_tokens:
                self._held.setdefault(output.start, output)
            return []
        events = self._take(output, [])
        while self._held:
            first = min(self._held)
            if first > len(self.tokens):
                break
            events = self._take(self._held.pop(first), events)
        return events

    def due_finish(self) -> FinishInfo | None:
        """Return how the sequence ended, once every token before the end has been given out. A
        failure does not wait for missing tokens.
        """
        if self._finish is None:
            return None
        position, finish = self._finish
        if position <= len(self.tokens) or finish.failure is not None:
            return finish
        return None

    def _take(self, output: RequestOutput, events: list[TokensEvent]) -> list[TokensEvent]:
        """Give out the part of `output` that is new (its start is not beyond the end)."""
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
        logprobs: list[TokenLogprobs] | None = None
        if output.logprobs is not None:
            logprobs = output.logprobs[known:stop]
        self.tokens.extend(fresh)
        events.append(
            TokensEvent(
                request_id=self._request_id,
                start=start,
                tokens=fresh,
                logprobs=logprobs,
                prompt_logprobs=output.prompt_logprobs if start == 0 else None,
            )
        )
        return events
