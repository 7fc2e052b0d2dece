"""How much of a step prompts get beside streams whose gaps have a limit, and which prompts go
first, so that as many first tokens as possible come in time. Pure.

Chunks are cut so that a step is predicted to keep the limit. The limit is on the mean of the
slowest tenth of a stream's gaps, so a stream with many tokens may have a long gap now and then
(`Allowance`): a step may take as long as the stream with the least allowance can afford. Where even
the smallest chunk would take longer, prompts wait for streams to end or to have more tokens, as
long as their first tokens can still come in time. When one of those that wait is late, all prompts
are computed as if there were no limit: one long gap costs streams less than a row of steps that
each break the limit. A late prompt whose chunks fit changes nothing.

A limit that is only a target must not cost throughput: no chunk is so small that its tokens take
much longer than those of a whole chunk, and a late prompt lifts the limit even where its chunks
fit.

Prompts go in rank order. When not all can be in time, some are postponed so that as few as possible
are late (Moore, An n Job, One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs,
1968): whenever one would be late, the longest up to it is postponed. It is computed when no other
prompt is there. Its chunks are smaller then, because the next prompt waits for the end of its step.
A prompt that has waited for `PATIENCE` times its limit is no longer postponed.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import neg
from typing import NamedTuple

from mooncake.engine.chunks import UNIT, largest_chunk
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel

SLOW_ONE_IN = 10
"""The limit on gaps is on the mean of the slowest of this many."""
PATIENCE = 10
"""A prompt is postponed for at most this many times as long as its first token may take. The class
batch has no limit, so the first token of its prompts may take this many times as long.
"""
CROWD = 4
"""When prompts are late, are at least this many, and are no fewer than the streams, they are
computed whatever this costs the streams: there is more to do than can be in time.
"""
SLACK = 1.25
"""A first token is too late for its limit after this many times `first_token_s`, because `launch`
sets that to 0.8 of the limit.
"""
EFFICIENT_LOSS = 0.1
"""Tokens take longer by at most this part in the smallest efficient chunk than in a whole one."""


class Prompt(NamedTuple):
    """What a prompt still has to compute."""

    since_s: float
    """Since when it waits."""
    num_tokens: int
    num_before: int
    """The tokens before these, which are computed or cached."""
    is_batch: bool = False

    def due_s(self, config: EngineConfig, times: float = 1.0) -> float:
        """Return when the prompt's first token is due, or would be if it might take `times` times
        as long.
        """
        if config.first_token_s is None:
            return math.inf
        return self.since_s + times * config.first_token_s * (PATIENCE if self.is_batch else 1)


def postponed(
    config: EngineConfig, cost: StepCostModel, prompts: Sequence[Prompt], now: float
) -> set[int]:
    """Return the places of the prompts that wait until all others are computed. prompts: in the
    order in which they are computed otherwise.
    """
    found: set[int] = set()
    kept: list[tuple[float, int]] = []
    ready_s = now
    for place, prompt in enumerate(prompts):
        seconds = cost.prefill_s(prompt.num_tokens, prompt.num_before, config.max_chunk_tokens)
        ready_s += seconds
        if now <= prompt.due_s(config, PATIENCE):
            heapq.heappush(kept, (-seconds, -place))
        if ready_s > prompt.due_s(config, SLACK) and kept:
            longest_s, other = heapq.heappop(kept)
            ready_s += longest_s
            found.add(-other)
    return found


class Postponement(NamedTuple):
    """Which prompts wait until others are computed."""

    places: frozenset[int]
    """The places of those prompts in the line."""
    most_late: int | None = None
    """The most tokens of a chunk if all prompts are too late in any case. None: whole ones."""
    is_crowded: bool = False
    """Whether there are so many prompts that they are computed whatever it costs streams."""


ALL_IN_TIME = Postponement(frozenset())
"""No prompt waits for others."""


def postponement(
    config: EngineConfig,
    cost: StepCostModel,
    prompts: Sequence[Prompt],
    num_streams: int,
    now: float,
) -> Postponement:
    """Return which of the prompts wait in the next step, and what that means for the others. When
    all are too late, the first ones are computed in chunks that are small and efficient.

    prompts: in the order in which they are computed otherwise.
    """
    places = postponed(config, cost, prompts, now)
    if not places:
        return ALL_IN_TIME
    is_crowded = len(prompts) >= max(CROWD, num_streams)
    if len(places) < len(prompts):
        return Postponement(frozenset(places), None, is_crowded)
    most_late = efficient_chunk(config, cost)
    left = config.max_batched_tokens if is_crowded else most_late
    for place, prompt in enumerate(prompts):
        if left <= 0:
            break
        places.remove(place)
        left -= prompt.num_tokens
    return Postponement(frozenset(places), most_late, is_crowded)


def efficient_chunk(config: EngineConfig, cost: StepCostModel) -> int:
    """Return the smallest efficient chunk: the fixed time of its step is only `EFFICIENT_LOSS` of
    the time of its tokens.
    """
    most = config.max_chunk_tokens
    fixed_s = cost.coefficients[0]
    token_s = (cost.step_s(most, 0, 1) - fixed_s) / most
    if token_s * most * EFFICIENT_LOSS <= fixed_s:
        return most
    return min(most, -(-math.ceil(fixed_s / (EFFICIENT_LOSS * token_s)) // UNIT) * UNIT)


@dataclass(slots=True)
class Allowance:
    """What long gaps a stream has had, and what it can still afford."""

    last_s: float | None = None
    """When its last token was sampled."""
    long_s: list[float] = field(default_factory=list)
    """The stream's gaps above half the limit, the longest first."""

    def count(self, now: float, limit_s: float) -> None:
        """Take in a token that was sampled at `now`."""
        if self.last_s is not None and now - self.last_s > limit_s / 2:
            insort(self.long_s, now - self.last_s, key=neg)
        self.last_s = now

    def longest_s(self, num_tokens: int, limit_s: float, usual_s: float) -> float:
        """Return how long the next gap may be, at least `limit_s`, so that the mean of the slowest
        tenth keeps the limit if the stream ends after it. Its short gaps count as `usual_s`.

        num_tokens: how many tokens it has so far.
        """
        num_others = max(0, -(-num_tokens // SLOW_ONE_IN) - 1)
        others_s = sum(self.long_s[:num_others])
        others_s += usual_s * max(0, num_others - len(self.long_s))
        return max(limit_s, (num_others + 1) * limit_s - others_s)


class Stream(NamedTuple):
    num_before: int
    """The tokens before its own."""
    num_tokens: int
    """The tokens that were sampled for it."""
    allowance: Allowance | None
    """None: it is of the class batch, whose gaps have no limit."""


@dataclass(slots=True)
class PromptTime:
    """The time of one step that is left for prompts beside its streams."""

    cost: StepCostModel
    left_s: float
    may_wait: bool
    """Whether a prompt waits when its smallest chunk does not fit."""
    least: int = UNIT
    """The tokens of the smallest chunk, for a prompt that has more."""
    streams_left_s: float = 0.0
    """What the streams alone leave."""
    has_prompt: bool = False
    has_free_prompt: bool = False
    """Whether the step has a prompt of a flow that gets all it wants."""

    def is_used_up(self, is_limited: bool) -> bool:
        """Return whether other prompts have used up the time. Prompts of limited flows, which get
        less than they want, never keep out the first prompt of the other flows.
        """
        return self.has_prompt and self.left_s <= 0 and (self.has_free_prompt or is_limited)

    def is_too_short(self, num_tokens: int, num_before: int, is_limited: bool) -> bool:
        """Return whether a prompt with `num_tokens` to compute after `num_before` waits for the
        streams to end. What prompts of limited flows have used does not count against the first
        prompt of the others.
        """
        is_first = not (is_limited or self.has_free_prompt)
        left_s = self.streams_left_s if is_first else self.left_s
        return self.may_wait and self._chunk_s(min(self.least, num_tokens), num_before) > left_s

    def take(self, most: int, num_before: int, is_limited: bool) -> int:
        """Count a chunk of a prompt, of at most `most` tokens, and return how many it has. Unless
        prompts wait, the first prompt, and the first of flows that are not limited, get `least`
        tokens in any case: streams slow them down and never stop them.
        """
        is_first = not self.has_prompt or not (is_limited or self.has_free_prompt)
        self.has_prompt = True
        self.has_free_prompt |= not is_limited
        chunk_s = self._chunk_s(most, num_before)
        if chunk_s <= self.left_s:
            self.left_s -= chunk_s
            return most
        least = min(self.least, most) if is_first else 0
        limit_s = self.left_s + self.cost.coefficients[0]
        self.left_s = 0.0  # prompts behind it wait for the next step
        return largest_chunk(self.cost, most, least, num_before, limit_s)

    def _chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Return the predicted time that a chunk adds to a step."""
        return self.cost.step_s(num_tokens, num_before, 1) - self.cost.coefficients[0]


def prompt_time(
    config: EngineConfig,
    cost: StepCostModel,
    streams: Sequence[Stream],
    longest: int,
    prompts: Iterable[Prompt],
    now: float,
    is_crowded: bool = False,
) -> PromptTime:
    """Return the time that streams leave for prompts in a step.

    longest: the tokens of the longest prompt. prompts: those that run or wait and are not
    postponed, in rank order; they are looked at only if one may have to wait, or where the limit is
    a target. is_crowded: whether prompts are computed as if one were late.
    """
    context = sum(stream.num_before for stream in streams)
    left_s = _longest_s(config, cost, streams) - cost.beside_s(len(streams), context)
    least = efficient_chunk(config, cost) if config.max_gap_is_target else UNIT
    waits = config.first_token_s is not None
    time = PromptTime(cost, left_s, waits, least, streams_left_s=left_s)
    time.may_wait = time.is_too_short(least, longest, is_limited=False)
    may_lift = waits and (time.may_wait or config.max_gap_is_target)
    if may_lift and (is_crowded or _any_is_late(prompts, now, config, time)):
        time.left_s = time.streams_left_s = math.inf
    return time


def _longest_s(config: EngineConfig, cost: StepCostModel, streams: Sequence[Stream]) -> float:
    """Return how long a step may take, for the sake of its streams. In a pipeline streams that wait
    behind the step have their say, too, so it keeps the limit whatever its own could afford.
    """
    if config.max_gap_s is None:
        return math.inf
    if config.num_stages > 1 or not streams:
        return config.max_gap_s / config.num_stages
    usual_s = cost.streams_s(len(streams), sum(stream.num_before for stream in streams))
    return min(
        (
            one.allowance.longest_s(one.num_tokens, config.max_gap_s, usual_s)
            for one in streams
            if one.allowance is not None
        ),
        default=math.inf,
    )


def _any_is_late(
    prompts: Iterable[Prompt], now: float, config: EngineConfig, time: PromptTime
) -> bool:
    """Return whether a prompt has waited for streams so long that its first token would just come
    in time, if prompts were computed one after the other from now on.
    """
    ready_s = now
    for prompt in prompts:
        _, num_tokens, num_before, _ = prompt
        ready_s += time.cost.prefill_s(num_tokens, num_before, config.max_chunk_tokens)
        if ready_s > prompt.due_s(config) and (
            config.max_gap_is_target or time.is_too_short(num_tokens, num_before, is_limited=False)
        ):
            return True
    return False
