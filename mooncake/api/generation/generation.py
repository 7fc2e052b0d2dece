"""The generation of one call: several sequences, each with its text, stop strings and end.

`Choice` turns the events of one sequence into text. `Call` runs all of them; a shutdown or a
disconnect ends it. Replies and streams are made from the same `Delta`s, so they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from mooncake.api.backend import NO_LIMITS, EventStream, LatencyLimits
from mooncake.api.errors import failure_error
from mooncake.api.generation.beam_search import BeamStream
from mooncake.api.generation.review import Review
from mooncake.api.text.answer import (
    Delta,
    Detokenizer,
    Marker,
    MessageParser,
    StopMatcher,
    reasoning_is_open,
)
from mooncake.api.text.tokenizer import Tokenizer
from mooncake.base import (
    FinalEvent,
    FinishReason,
    GenerateRequest,
    InternalError,
    MooncakeError,
    OutputEvent,
    RequestOutput,
    Unavailable,
)
from mooncake.base.request import CacheUse


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options for turning tokens into text; they are the same for all choices of a call."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    markers: Mapping[int, Marker] = {}
    """Tokens that cut the text into reasoning, content and tool calls; empty = plain text."""
    max_calls: int | None = None
    """The most tool calls; further ones are dropped."""


class Choice:
    """The text and the end of one sequence: `feed` takes its events, `take` returns what is new."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        options: TextOptions,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens: int | None = None
        self.cache: CacheUse | None = None
        self.finish_reason: str | None = None
        self._eos = frozenset(eos_token_ids)
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._min_tokens = request.sampling.min_tokens
        self._include_stop = options.include_stop
        self._detokenizer = Detokenizer(tokenizer, skip_special=options.skip_special)
        self._matcher = StopMatcher(options.stops, include_stop=options.include_stop)
        self._held_stop_id: int | None = None
        self._stop_reason: int | str | None = None
        self._parser = MessageParser(
            options.markers,
            reasoning_open=reasoning_is_open(request.prompt_tokens, options.markers),
            max_calls=options.max_calls,
        )
        self._new = Delta(index=index)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, event: OutputEvent) -> None:
        """Take the next event; events after the end of the text are ignored.

        Raises:
            MooncakeError: the sequence was refused, failed, or was ended by the server.
        """
        if isinstance(event, FinalEvent):
            self.num_cached_tokens, self.cache = event.num_cached_tokens, event.cache
            if not self.finished:
                self._end(event)
        elif not self.finished:
            self._add(event)

    def take(self) -> Delta:
        """Return what is new since the last call."""
        delta, self._new = self._new, Delta(index=self.index)
        delta.pieces = self._parser.take()
        delta.finish_reason, delta.stop_reason = self.finish_reason, self._stop_reason
        return delta

    def _add(self, event: RequestOutput) -> None:
        if event.start != self.num_tokens:
            what = f"token {event.start} came after {self.num_tokens} tokens"
            raise InternalError(f"parts of the answer are lost or repeated: {what}")
        new = self._new
        if memoryview(event.prompt_logprobs):
            new.prompt_logprobs = event.prompt_logprobs
        for at, token in enumerate(event.tokens):
            new.tokens.append(token)
            if event.logprobs is not None:
                new.logprobs.append(event.logprobs[at])
                new.runs.append(self._run_of(token))
            self.num_tokens += 1
            self._show(token)
            if self.finished:
                return

    def _run_of(self, token: int) -> int | None:
        if token in self._stop_ids or token in self._eos:
            return None
        return None if token in self._parser.markers else self._parser.run

    def _show(self, token: int) -> None:
        """Turn one token into text. A stop id is held back; it is shown only if it does not stop
        the text.
        """
        if self._held_stop_id is not None:
            held, self._held_stop_id = self._held_stop_id, None
            self._show_token(held)
        if token in self._stop_ids and not self.finished:
            self._held_stop_id = token
        elif not self.finished:
            self._show_token(token)

    def _show_token(self, token: int) -> None:
        parser = self._parser
        if parser.reasoning:
            self.num_reasoning_tokens += 1
        marker = parser.markers.get(token)
        if marker is None:
            self._show_text(self._detokenizer.push(token))
        else:
            self._detokenizer.cut()
            parser.text(self._matcher.flush())
            parser.marker(marker)

    def _show_text(self, text: str) -> None:
        """Pass on the text that cannot begin a stop string (in tool calls none is searched for)."""
        stop = None
        if self.num_tokens > self._min_tokens and not self._parser.in_section:
            text, stop = self._matcher.push(text)
        self._parser.text(text)
        if stop is not None:
            self._finish("stop")
            self._stop_reason = stop

    def _finish(self, reason: str) -> None:
        if reason == "stop":
            self._parser.end()
            if self._parser.num_calls:
                reason = "tool_calls"
        self.finish_reason = reason

    def _end(self, event: FinalEvent) -> None:
        if event.failure is not None:
            raise failure_error(event.failure)
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise Unavailable("the server ended this request before it was finished; try again")
        stop_id = event.stop_token_id
        held, self._held_stop_id = self._held_stop_id, None
        if held is not None and (held != stop_id or self._include_stop):
            self._show_token(held)
        if self.finished:
            return
        self._parser.text(self._matcher.flush())
        self._finish(event.reason.value)
        if stop_id is not None and stop_id not in self._eos:
            self._stop_reason = stop_id


class _Totals(NamedTuple):
    """What the choices of a call have together. Chunks of a stream may each say it, so it is not
    counted anew for each: there may be a thousand in a step.
    """

    num_output_tokens: int
    num_reasoning_tokens: int
    num_cached_tokens: int
    cache: CacheUse | None


class Call:
    """All sequences of one call. Leaving the `async with` block aborts those that still run."""

    def __init__(
        self,
        open_stream: Callable[[Sequence[GenerateRequest]], EventStream | BeamStream],
        call_id: str,
        requests: Sequence[GenerateRequest],
        choices: Sequence[Choice],
        num_per_prompt: int,
        *,
        num_kept: int | None = None,
        review: Review | None = None,
        receipt_id: str = "",
        is_traceable: bool = True,
    ) -> None:
        """`open_stream` returns the events of `requests`, as they are when the block is entered.
        `num_kept`: `finish` returns this many choices of each prompt, the most likely ones; None =
        all. `review` checks finished answers. `receipt_id` names the receipt of the call, if there
        is to be one. `is_traceable`: a trace can show what becomes of `requests`, because the
        backend gets them and no others.
        """
        self.call_id = call_id
        self.receipt_id = receipt_id
        self.is_traceable = is_traceable
        self.requests = requests
        """The requests of the returned choices, in their order."""
        self._num_kept = num_kept or num_per_prompt
        self._firsts = requests[::num_per_prompt]
        self.choices = choices
        self._num_per_prompt = num_per_prompt
        self._by_id = {
            request.request_id: choice for request, choice in zip(requests, choices, strict=True)
        }
        self._open_stream = open_stream
        self._review = review
        self._known_totals: _Totals | None = None

    @property
    def chooses(self) -> bool:
        """True if `finish` returns only some of the choices; `deltas` would return all."""
        return self._num_kept < self._num_per_prompt

    @cached_property
    def _stream(self) -> EventStream | BeamStream:
        return self._open_stream(self.requests)

    def run_as(
        self, tenant: str, *, traced: bool = False, limits: LatencyLimits = NO_LIMITS
    ) -> None:
        """Count all sequences as `tenant`'s, have them traced if `traced`, and give each the
        `limits`. Call it before the block is entered.
        """
        ttft_s, tbt_s = limits
        self.requests = [
            msgspec.structs.replace(
                each, tenant=tenant, traced=traced, ttft_slo_s=ttft_s, tbt_slo_s=tbt_s
            )
            for each in self.requests
        ]
        if self._review is not None:
            self._review.run_as(tenant)

    async def __aenter__(self) -> Call:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.__aexit__(*error)

    def fail(self, error: MooncakeError) -> None:
        """End the call from outside: `deltas` and `finish` raise `error`."""
        self._stream.fail(error)

    async def deltas(self) -> list[Delta] | None:
        """Wait for events and return what is new, at most one `Delta` for each choice; None at the
        end.

        Raises:
            MooncakeError: a sequence was refused or failed, or the call was ended by `fail`.
        """
        events = await self._stream.batch()
        if not events:
            return None
        deltas = [choice.take() for choice in self._feed(events)]
        if self._review is not None:
            await self._review.add(deltas)
        return deltas

    async def finish(self) -> list[Delta]:
        """Run to the end and return one `Delta` with the whole of each choice, in order."""
        while events := await self._stream.batch():
            self._feed(events)
        deltas = [choice.take() for choice in self.choices]
        if self.chooses:
            deltas = self._most_likely(deltas)
        if self._review is not None:
            await self._review.add(deltas)
        return deltas

    def _most_likely(self, deltas: list[Delta]) -> list[Delta]:
        """Return the most likely answers to each prompt, best first, with new numbers."""
        kept: list[Delta] = []
        requests: list[GenerateRequest] = []
        for first in range(0, len(deltas), self._num_per_prompt):
            group = deltas[first : first + self._num_per_prompt]
            prompt_logprobs = group[0].prompt_logprobs
            for delta in sorted(group, key=_mean_logprob, reverse=True)[: self._num_kept]:
                requests.append(self.requests[delta.index])
                kept.append(
                    msgspec.structs.replace(delta, index=len(kept), prompt_logprobs=prompt_logprobs)
                )
                prompt_logprobs = None  # they belong to the prompt: only the first answer has them
        self.requests = requests
        return kept

    def _feed(self, events: Sequence[OutputEvent]) -> list[Choice]:
        """Feed the choices and return those that have something new."""
        self._known_totals = None
        fed: dict[int, Choice] = {}
        for event in events:
            choice = self._by_id[event.request_id]
            was_finished = choice.finished
            choice.feed(event)
            if was_finished:
                continue
            fed[choice.index] = choice
            if choice.finished and not isinstance(event, FinalEvent):
                self._stream.abort(event.request_id)  # a stop string ended it
        return list(fed.values())

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts. Each prompt counts once, however many choices it has."""
        return sum(len(request.prompt_tokens) for request in self._firsts)

    @property
    def num_output_tokens(self) -> int:
        return self._totals.num_output_tokens

    @property
    def max_logprobs(self) -> int:
        """The number of log-probabilities, of prompts and of the longest answers."""
        total = 0
        for request in self.requests:
            sampling = request.sampling
            if sampling.num_logprobs is not None:
                total += sampling.max_tokens * (sampling.num_logprobs + 1)
            if sampling.num_prompt_logprobs is not None:
                total += len(request.prompt_tokens) * (sampling.num_prompt_logprobs + 1)
        return total

    @property
    def prompt_price(self) -> int:
        """The charge for all prompts, in tokens. Each prompt counts once, however many choices it
        has.
        """
        return sum(request.prompt_price for request in self._firsts)

    @property
    def num_dropped_tokens(self) -> int:
        """Output tokens that no answer shows: those of a search's other beams."""
        return self._stream.num_dropped_tokens

    @property
    def num_charged_tokens(self) -> int:
        """Output tokens, including those that no answer shows."""
        return self.num_output_tokens + self.num_dropped_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._totals.num_reasoning_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in a cache, for the first choice of each prompt."""
        return self._totals.num_cached_tokens

    @property
    def cache(self) -> CacheUse | None:
        """What became of the prompts' tokens, for the same choices; None before the first has
        ended.
        """
        return self._totals.cache

    @property
    def _totals(self) -> _Totals:
        if self._known_totals is None:
            firsts = self.choices[:: self._num_per_prompt]
            known = [choice.cache for choice in firsts if choice.cache is not None]
            self._known_totals = _Totals(
                sum(choice.num_tokens for choice in self.choices),
                sum(choice.num_reasoning_tokens for choice in self.choices),
                sum(choice.num_cached_tokens or 0 for choice in firsts),
                sum(known[1:], known[0]) if known else None,
            )
        return self._known_totals


def _mean_logprob(delta: Delta) -> float:
    """Return the mean logprob of an answer's tokens, OpenAI's measure for `best_of`."""
    if not delta.logprobs:
        return -math.inf
    return sum(entry.logprob for entry in delta.logprobs) / len(delta.logprobs)
