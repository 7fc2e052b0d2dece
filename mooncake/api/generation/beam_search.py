"""Beam search over a backend that returns logprobs. A step computes one token of each beam, by a
request of its own that continues the beam's cached prefix.

`BeamSearch` decides and is pure; `BeamStream` runs the searches of a call and then returns their
answers as the events of ordinary requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake.api.backend import Backend, EventStream
from mooncake.api.errors import failure_error
from mooncake.base import (
    FinalEvent,
    FinishReason,
    GenerateRequest,
    MooncakeError,
    OutputEvent,
    SamplingParams,
    TokenLogprobs,
    TokensEvent,
    Unavailable,
    pack_tokens,
)


class Beam(msgspec.Struct, frozen=True):
    """An answer so far, or a whole one."""

    tokens: tuple[int, ...] = ()
    entries: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`."""
    logprob: float = 0.0
    """Natural logarithm, the sum over all tokens."""
    stop_token_id: int | None = None
    """The token that ended it; None = the limit of its length, or it goes on."""


class BeamSearch:
    """The search of one prompt. `live` beams wait for their next token, best first."""

    def __init__(self, sampling: SamplingParams, width: int, length_penalty: float) -> None:
        """`length_penalty`: answers compare by logprob / length ** length_penalty; the length is in
        tokens and includes the one that ended it."""
        self.live: list[Beam] = [Beam()]
        self._ended: list[Beam] = []
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._width = width
        self._length_penalty = length_penalty

    def advance(self, nexts: Sequence[TokenLogprobs]) -> None:
        """Extend the live beams by their most likely next tokens, 2 * width for each: among so many
        there are always `width` that do not end a beam."""
        grown: list[Beam] = []
        for beam, entry in zip(self.live, nexts, strict=True):
            for rank, (token, logprob) in enumerate(entry.top[: 2 * self._width], start=1):
                longer = self._longer(beam, token, TokenLogprobs(logprob, rank, entry.top))
                if longer.stop_token_id is None:
                    grown.append(longer)
                elif len(beam.tokens) >= self._sampling.min_tokens:
                    self._ended.append(longer)
        grown.sort(key=lambda beam: -beam.logprob)
        self.live = grown[: self._width]
        if self.live and len(self.live[0].tokens) == self._sampling.max_tokens:
            self._ended += self.live
            self.live = []
        self._ended.sort(key=lambda beam: -self.score(beam))
        del self._ended[self._width :]
        if len(self._ended) == self._width:
            worst = self.score(self._ended[-1])
            self.live = [beam for beam in self.live if self._best_end(beam) > worst]

    def best(self, count: int) -> list[Beam]:
        """Return the `count` best whole answers, best first."""
        return self._ended[:count]

    def score(self, beam: Beam) -> float:
        """Return the number that answers compare by; higher is better."""
        return self._score(beam.logprob, len(beam.tokens))

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._length_penalty)

    def _best_end(self, beam: Beam) -> float:
        """Return a bound on the score that a live beam may still reach: more tokens never raise its
        logprob, but the length penalty may favour a longer or a shorter answer."""
        lengths = (len(beam.tokens) + 1, self._sampling.max_tokens)
        return max(self._score(beam.logprob, length) for length in lengths)

    def _longer(self, beam: Beam, token: int, entry: TokenLogprobs) -> Beam:
        top = entry.top[: self._sampling.num_logprobs or 0]
        return Beam(
            (*beam.tokens, token),
            (*beam.entries, TokenLogprobs(entry.logprob, entry.rank, top)),
            beam.logprob + entry.logprob,
            token if token in self._stop_ids else None,
        )


class BeamStream:
    """An `EventSource` that returns the events of all requests when the searches have ended."""

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[GenerateRequest],
        num_per_prompt: int,
        width: int,
        length_penalty: float,
    ) -> None:
        """`requests`: those to answer, `num_per_prompt` for each prompt, alike but for their ids.
        `width`: the number of beams for each prompt, at least `num_per_prompt`."""
        self._backend = backend
        self._groups = [
            list(requests[first : first + num_per_prompt])
            for first in range(0, len(requests), num_per_prompt)
        ]
        self._width = width
        self._searches = [
            BeamSearch(group[0].sampling, width, length_penalty) for group in self._groups
        ]
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None] | None] = {}
        self._num_cached: dict[int, int] = {}
        self._step = 0
        self._running: EventStream | None = None
        self._failure: MooncakeError | None = None
        self._told = False
        self._num_dropped = 0

    @property
    def num_dropped_tokens(self) -> int:
        """The tokens of all beams at all steps, less those of the answers."""
        return self._num_dropped

    def run_as(self, tenant: str) -> None:
        """Have all requests run for `tenant`; called before the block is entered."""
        self._groups = [
            [msgspec.structs.replace(request, tenant=tenant) for request in group]
            for group in self._groups
        ]

    async def __aenter__(self) -> BeamStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None  # a step aborts its own requests

    async def batch(self) -> list[OutputEvent]:
        """Search to the end and return the events of all answers; [] after that.

        Raises:
            MooncakeError: a step failed, or the call was ended from outside.
        """
        if self._told:
            return []
        self._told = True
        while any(search.live for search in self._searches):
            if self._failure is not None:
                raise self._failure
            await self._advance()
        return [event for number in range(len(self._groups)) for event in self._answers(number)]

    def abort(self, request_id: str) -> None:
        """Do nothing: when an answer is returned, its search has ended."""

    def fail(self, error: MooncakeError) -> None:
        """End the call: `batch` raises `error`."""
        self._failure = error
        if self._running is not None:
            self._running.fail(error)

    async def _advance(self) -> None:
        """Ask for the next token of every live beam of every prompt."""
        asked = {
            request.request_id: (number, request)
            for number, search in enumerate(self._searches)
            for request in self._requests(number, search)
        }
        entries: dict[str, TokenLogprobs] = {}
        self._running = EventStream(self._backend, [request for _, request in asked.values()])
        try:
            async with self._running as stream:
                while events := await stream.batch():
                    for event in events:
                        self._take(event, asked[event.request_id][0], entries)
        finally:
            self._running = None
        for number, search in enumerate(self._searches):
            mine = [name for name, (owner, _) in asked.items() if owner == number]
            if mine:
                search.advance([entries[name] for name in mine])
        self._step += 1
        self._num_dropped += len(asked)

    def _requests(self, number: int, search: BeamSearch) -> list[GenerateRequest]:
        first = self._groups[number][0]
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            num_logprobs=max(2 * self._width, first.sampling.num_logprobs or 0),
            num_prompt_logprobs=None if self._step else first.sampling.num_prompt_logprobs,
        )
        return [
            msgspec.structs.replace(
                first,
                request_id=f"{first.request_id}-{self._step}-{at}",
                prompt=first.prompt + pack_tokens(beam.tokens),
                sampling=sampling,
            )
            for at, beam in enumerate(search.live)
        ]

    def _take(self, event: OutputEvent, number: int, entries: dict[str, TokenLogprobs]) -> None:
        if isinstance(event, TokensEvent):
            assert event.logprobs is not None
            entries[event.request_id] = event.logprobs[0]
            if event.prompt_logprobs is not None:
                self._prompt_logprobs[number] = event.prompt_logprobs
            return
        if event.failure is not None:
            raise failure_error(event.failure)
        if event.request_id not in entries:
            raise Unavailable("the server ended this request before it was finished; try again")
        self._num_cached.setdefault(number, event.num_cached_tokens)

    def _answers(self, number: int) -> list[OutputEvent]:
        group = self._groups[number]
        events: list[OutputEvent] = []
        beams = self._searches[number].best(len(group))
        # There are fewer where every next token would end an answer before `min_tokens`.
        beams += [Beam()] * (len(group) - len(beams))
        for request, beam in zip(group, beams, strict=True):
            self._num_dropped -= len(beam.tokens)
            logprobs = None if request.sampling.num_logprobs is None else list(beam.entries)
            tokens = TokensEvent(
                request_id=request.request_id,
                start=0,
                tokens=list(beam.tokens),
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs.get(number),
            )
            final = FinalEvent(
                request_id=request.request_id,
                reason=FinishReason.LENGTH if beam.stop_token_id is None else FinishReason.STOP,
                num_prompt_tokens=len(request.prompt_tokens),
                num_output_tokens=len(beam.tokens),
                num_cached_tokens=self._num_cached.get(number, 0),
                stop_token_id=beam.stop_token_id,
            )
            events += [tokens, final]
        return events
