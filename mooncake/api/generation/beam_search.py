"""Beam search over a backend that returns logprobs. A step computes one token of each beam, by a
separate request that continues the beam's cached prefix.

`BeamSearch` decides and is pure; `BeamStream` runs the searches of a call and then returns their
answers as the events of ordinary requests.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import msgspec

from mooncake.api.backend import Backend, EventStream
from mooncake.api.errors import failure_error
from mooncake.base import (
    FinalEvent,
    FinishReason,
    GenerateRequest,
    MooncakeError,
    OutputEvent,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    Unavailable,
    pack_tokens,
)
from mooncake.base.request import NO_LOGPROBS, CacheUse


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished or finished answer: its last token, and the beam that it continues."""

    before: Beam | None = None
    """The beam that it continues; None = it has no token yet."""
    token: int = -1
    entry: TokenLogprobs | None = None
    """The logprob entry of `token`, with as many likely tokens as the request asked for."""
    length: int = 0
    """Length in tokens."""
    logprob: float = 0.0
    """Sum over all tokens, natural logarithm."""
    stop_token_id: int | None = None
    """The token that ended it; None = it reached its maximum length, or it goes on."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(beam.token for beam in self._path())

    @property
    def entries(self) -> tuple[TokenLogprobs, ...]:
        """One entry for each of `tokens`."""
        return tuple(beam.entry for beam in self._path() if beam.entry is not None)

    def _path(self) -> list[Beam]:
        """Return the beams that led here and itself, each one token longer than the one before."""
        path: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.before is not None:
            path.append(beam)
            beam = beam.before
        path.reverse()
        return path


class BeamSearch:
    """The search of one prompt. `live` beams wait for their next token, best first.

    A step costs 2 * width ** 2 candidates, however long the beams are: survivors are chosen before
    anything is built from them. The reference is a full sort of whole answers
    (tests/unit/api/generation/test_beam_search.py).
    """

    def __init__(self, sampling: SamplingParams, width: int, length_penalty: float) -> None:
        """`length_penalty`: answers are compared by logprob / length ** length_penalty. The length
        is in tokens and includes the token that ended the answer.
        """
        self.live: list[Beam] = [Beam()]
        self.continuations: list[bytes] = [b""]
        """The tokens of each live beam, packed."""
        self._ended: list[Beam] = []
        self._sampling = sampling
        self._width = width
        self._length_penalty = length_penalty

    def advance(self, nexts: Sequence[TokenLogprobs]) -> None:
        """Extend the live beams by their most likely next tokens, 2 * width for each: among these
        there are always `width` that do not end a beam. Of equally likely ones the better beam's
        comes first, then the lower token.
        """
        going: list[_Candidate] = []
        ending: list[_Candidate] = []
        may_end = self.live[0].length >= self._sampling.min_tokens
        stop_ids = self._sampling.stop_token_ids
        for at, (beam, entry) in enumerate(zip(self.live, nexts, strict=True)):
            for rank, (token, logprob) in enumerate(entry.top[: 2 * self._width], start=1):
                candidate = (-(beam.logprob + logprob), at, token, rank)
                if token not in stop_ids:
                    going.append(candidate)
                elif may_end:
                    ending.append(candidate)
        best = heapq.nsmallest(self._width, going)
        self._ended += [self._longer(each, nexts) for each in heapq.nsmallest(self._width, ending)]
        self.continuations = [
            self.continuations[at] + pack_tokens([token]) for _, at, token, _ in best
        ]
        self.live = [self._longer(each, nexts) for each in best]
        if self.live and self.live[0].length == self._sampling.max_tokens:
            self._ended += self.live
            self.live = []
        self._ended.sort(key=lambda beam: -self.score(beam))
        del self._ended[self._width :]
        if len(self._ended) == self._width:
            worst = self.score(self._ended[-1])
            keep = [self._best_end(beam) > worst for beam in self.live]
            self.live = list(compress(self.live, keep))
            self.continuations = list(compress(self.continuations, keep))

    def best(self, count: int) -> list[Beam]:
        """Return the `count` best whole answers, best first."""
        return self._ended[:count]

    def score(self, beam: Beam) -> float:
        """Return the number by which answers are compared; higher is better."""
        return self._score(beam.logprob, beam.length)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._length_penalty)

    def _best_end(self, beam: Beam) -> float:
        """Return a bound on the score that a live beam may still reach: more tokens never raise its
        logprob, but the length penalty may favour a longer or a shorter answer."""
        lengths = (beam.length + 1, self._sampling.max_tokens)
        return max(self._score(beam.logprob, length) for length in lengths)

    def _longer(self, candidate: _Candidate, nexts: Sequence[TokenLogprobs]) -> Beam:
        less, at, token, rank = candidate
        top = nexts[at].top
        shown = top[: self._sampling.num_logprobs or 0]
        return Beam(
            before=self.live[at],
            token=token,
            entry=TokenLogprobs(top[rank - 1][1], rank, shown),
            length=self.live[at].length + 1,
            logprob=-less,
            stop_token_id=token if token in self._sampling.stop_token_ids else None,
        )


_Candidate = tuple[float, int, int, int]
"""A beam made one token longer: (minus its logprob, place of the beam, token, rank of the token);
the smallest is the best."""


class BeamStream:
    """An `EventStream` that returns the events of all requests when the searches have ended."""

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[GenerateRequest],
        num_per_prompt: int,
        width: int,
        length_penalty: float,
    ) -> None:
        """`requests`: the requests to answer, `num_per_prompt` for each prompt, which differ only
        in their ids. Their limits on latency hold for every step.
        `width`: the number of beams for each prompt, at least `num_per_prompt`.
        """
        self._backend = backend
        self._groups = [
            list(requests[first : first + num_per_prompt])
            for first in range(0, len(requests), num_per_prompt)
        ]
        self._num_answers = num_per_prompt
        self._width = width
        self._searches = [
            BeamSearch(group[0].sampling, width, length_penalty) for group in self._groups
        ]
        self._prompt_logprobs: dict[int, msgspec.Raw] = {}
        self._cached: dict[int, tuple[int, CacheUse | None]] = {}
        self._step = 0
        self._running: EventStream | None = None
        self._failure: MooncakeError | None = None
        self._answers: Iterator[list[OutputEvent]] | None = None
        self._num_dropped = 0

    @property
    def num_dropped_tokens(self) -> int:
        """Number of tokens of all beams at all steps, minus those of the answers."""
        return self._num_dropped

    async def __aenter__(self) -> BeamStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None  # a step aborts its own requests

    async def batch(self) -> list[OutputEvent]:
        """Search to the end. Then return the events of the answers, one part at each call, and []
        at the end.

        Raises:
            MooncakeError: a step failed, or the call was ended from outside.
        """
        while any(search.live for search in self._searches):
            await self._advance()
        if self._answers is None:
            self._answers = self._parts()
            self._num_dropped -= sum(
                beam.length for search in self._searches for beam in search.best(self._num_answers)
            )
        await asyncio.sleep(0)  # other tasks' turn: long answers are many parts
        if self._failure is not None:
            raise self._failure
        return next(self._answers, [])

    def abort(self, request_id: str) -> None:
        """Do nothing: when an answer is returned, its search has ended."""

    def fail(self, error: MooncakeError) -> None:
        """End the call: `batch` raises `error`."""
        self._failure = error
        if self._running is not None:
            self._running.fail(error)

    async def _advance(self) -> None:
        """Ask for the next token of every live beam of every prompt."""
        if self._failure is not None:
            raise self._failure
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
                prompt=first.prompt + continuation,
                sampling=sampling,
            )
            for at, continuation in enumerate(search.continuations[: len(search.live)])
        ]

    def _take(self, event: OutputEvent, number: int, entries: dict[str, TokenLogprobs]) -> None:
        if isinstance(event, RequestOutput):
            assert event.logprobs is not None
            entries[event.request_id] = event.logprobs[0]
            if memoryview(event.prompt_logprobs):
                self._prompt_logprobs[number] = event.prompt_logprobs
            return
        if event.failure is not None:
            raise failure_error(event.failure)
        if event.request_id not in entries:
            raise Unavailable("the server ended this request before it was finished; try again")
        self._cached.setdefault(number, (event.num_cached_tokens, event.cache))

    def _parts(self) -> Iterator[list[OutputEvent]]:
        """Return the events of all answers, in parts that each take the event loop only a
        moment.
        """
        part: list[OutputEvent] = []
        num_tokens = 0
        for number in range(len(self._groups)):
            for event in self._events(number):
                part.append(event)
                num_tokens += len(event.tokens) if isinstance(event, RequestOutput) else 0
                if num_tokens >= _PART_TOKENS:
                    yield part
                    part, num_tokens = [], 0
        yield part

    def _events(self, number: int) -> Iterator[OutputEvent]:
        group = self._groups[number]
        beams = self._searches[number].best(self._num_answers)
        # There are fewer where every next token would end an answer before `min_tokens`.
        beams += [Beam()] * (len(group) - len(beams))
        prompt_logprobs = self._prompt_logprobs.get(number, NO_LOGPROBS)
        num_cached, cache = self._cached.get(number, (0, None))
        for request, beam in zip(group, beams, strict=True):
            tokens = list(beam.tokens)
            entries = None if request.sampling.num_logprobs is None else list(beam.entries)
            for start in range(0, max(1, len(tokens)), _PART_TOKENS):
                yield RequestOutput(
                    request_id=request.request_id,
                    attempt=0,
                    start=start,
                    tokens=tokens[start : start + _PART_TOKENS],
                    logprobs=None if entries is None else entries[start : start + _PART_TOKENS],
                    prompt_logprobs=prompt_logprobs,
                )
                prompt_logprobs = NO_LOGPROBS  # only the first answer has them
            yield FinalEvent(
                request_id=request.request_id,
                reason=FinishReason.LENGTH if beam.stop_token_id is None else FinishReason.STOP,
                num_prompt_tokens=len(request.prompt_tokens),
                num_output_tokens=beam.length,
                num_cached_tokens=num_cached,
                cache=cache,
                stop_token_id=beam.stop_token_id,
            )


_PART_TOKENS = 512
"""Tokens of answers in one part: making their text takes about a millisecond."""
