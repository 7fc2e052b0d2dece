"""When the first token of a prompt will come, by planning the steps until then as an engine does.

Pure. The functions that the engine's own planner calls (`prompt_time`) decide which
prompts go first and how much of them a step computes. So a prediction follows each change of these.
Nothing is known here of prompts that are still to come, of pages that run out, and of the turns of
tenants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.engine.prompt_time import (
    ALL_IN_TIME,
    Allowance,
    Postponement,
    Prompt,
    PromptTime,
    Stream,
    postponement,
    prompt_time,
)

MOST_WORK = 1024
"""The most sequences at which one prediction looks, over all steps, of which each counts as
`STEP_WORK` more: a few milliseconds. The rest is predicted as if there were no streams.
"""
STEP_WORK = 4
SAME_STEPS = 8
"""Steps without prompts are predicted in groups of equal ones, which grow by one after this
many.
"""


@dataclass(slots=True)
class OpenStream:
    """A stream of an engine."""

    num_before: int
    """The stream's tokens so far."""
    num_tokens: int
    """Tokens among these that were sampled."""
    num_left: float
    """How many more are expected."""
    allowance: Allowance = field(default_factory=Allowance)


@dataclass(slots=True, eq=False)
class OpenPrompt:
    """A prompt of an engine that is not computed yet."""

    since_s: float
    num_tokens: int
    """The tokens that are left to compute."""
    num_before: int
    num_output: float
    """How many tokens of its answer are expected."""
    ready_s: float = 0.0
    """When it can begin, because what it reuses was fetched."""
    is_running: bool = False


def first_token_s(
    config: EngineConfig,
    cost: StepCostModel,
    streams: Sequence[OpenStream],
    prompts: Sequence[OpenPrompt],
    asked: OpenPrompt,
    now: float,
    began_s: float,
) -> float:
    """Return when `asked` is predicted to have its first token. It comes `now`, behind `prompts`.

    streams, prompts: those of the engine when its step began, in rank order; they are used up.
    began_s: when a step began, of which streams and prompts are as given.
    """
    play = _Play(config, cost, list(streams), list(prompts), began_s)
    while play.now < now and play.has_work and play.work < MOST_WORK:
        play.step()
    play.now = max(play.now, now)
    play.prompts.append(asked)
    while asked.num_tokens:
        if play.work >= MOST_WORK:
            return play.now + play.rest_s(asked)
        play.step()
    return play.now


class _Play:
    """An engine whose steps are planned and take their predicted time."""

    def __init__(
        self,
        config: EngineConfig,
        cost: StepCostModel,
        streams: list[OpenStream],
        prompts: list[OpenPrompt],
        now: float,
    ) -> None:
        self._config = config
        self._cost = cost
        self._streams = streams
        self.prompts = prompts
        self.now = now
        self.work = 0
        self._num_idle = 0

    @property
    def has_work(self) -> bool:
        """Whether a step has something to compute."""
        return bool(self._streams) or any(each.ready_s <= self.now for each in self.prompts)

    def step(self) -> None:
        """Plan a step, or several equal ones, and let their predicted time pass."""
        self.work += STEP_WORK + len(self._streams) + len(self.prompts)
        chunks = self._chunks()
        context = sum(stream.num_before for stream in self._streams)
        num_steps = 1
        if chunks:
            seconds = self._cost.beside_s(len(self._streams), context)
            for prompt, num_tokens in chunks:
                seconds += self._cost.step_s(num_tokens, prompt.num_before, 1)
                seconds -= self._cost.coefficients[0]
        elif self._streams:
            fewest = min(stream.num_left for stream in self._streams)
            num_steps = max(1, min(1 + self._num_idle // SAME_STEPS, math.ceil(fewest)))
            self._num_idle += 1
            seconds = num_steps * self._cost.streams_s(len(self._streams), context)
        else:
            seconds = max(0.0, min(each.ready_s for each in self.prompts) - self.now)
        self.now += seconds
        self._end(chunks, num_steps)

    def rest_s(self, asked: OpenPrompt) -> float:
        """Return how long it takes to compute the prompts that go before `asked`, and that one. It
        cannot begin before it is ready.
        """
        line = self._line()
        places = self._postponement(line).places
        goes_last = asked not in line or line.index(asked) in places
        kept = self.prompts if goes_last else [
            each for place, each in enumerate(line) if place not in places
        ]  # fmt: skip
        others_s = sum(self._prefill_s(each) for each in kept if each is not asked)
        return max(others_s, asked.ready_s - self.now) + self._prefill_s(asked)

    def _prefill_s(self, prompt: OpenPrompt) -> float:
        most = self._config.max_chunk_tokens
        return self._cost.prefill_s(prompt.num_tokens, prompt.num_before, most)

    def _chunks(self) -> list[tuple[OpenPrompt, int]]:
        """Return what the step computes of prompts."""
        config = self._config
        line = self._line()
        found = self._postponement(line)
        time = self._prompt_time(line, found)
        budget = config.max_batched_tokens - len(self._streams)
        chunks: list[tuple[OpenPrompt, int]] = []
        for place, prompt in enumerate(line):
            if budget <= 0:
                break
            if place in found.places or (time is not None and _waits(time, prompt)):
                continue
            most = min(config.max_chunk_tokens, prompt.num_tokens, budget)
            if found.most_late is not None and not found.is_crowded:
                most = min(most, found.most_late)
            if time is not None:
                most = time.take(most, prompt.num_before, is_limited=False)
            if most:
                chunks.append((prompt, most))
                budget -= most
        return chunks

    def _line(self) -> list[OpenPrompt]:
        """Return the prompts that can be computed: those that run, and as many others as there are
        seats.
        """
        running = [each for each in self.prompts if each.is_running]
        seats = self._config.max_num_seqs - len(self._streams) - len(running)
        waiting = [
            each for each in self.prompts if not each.is_running and each.ready_s <= self.now
        ]
        return running + waiting[: max(0, seats)]

    def _postponement(self, line: Sequence[OpenPrompt]) -> Postponement:
        if self._config.first_token_s is None or not line:
            return ALL_IN_TIME
        prompts = [_prompt(each) for each in line]
        return postponement(self._config, self._cost, prompts, len(self._streams), self.now)

    def _prompt_time(self, line: Sequence[OpenPrompt], found: Postponement) -> PromptTime | None:
        if self._config.max_gap_s is None or not self._streams or not line:
            return None
        streams = [
            Stream(each.num_before, each.num_tokens, each.allowance) for each in self._streams
        ]
        prompts = (
            _prompt(each)
            for place, each in enumerate(line)
            if found.most_late is None and place not in found.places
        )
        longest = max(each.num_before + each.num_tokens for each in line)
        return prompt_time(
            self._config, self._cost, streams, longest, prompts, self.now, found.is_crowded
        )

    def _end(self, chunks: Sequence[tuple[OpenPrompt, int]], num_steps: int) -> None:
        """Give streams and prompts what the steps computed."""
        for stream in self._streams:
            stream.num_before += num_steps
            stream.num_tokens += num_steps
            stream.num_left -= num_steps
            if num_steps > 1:
                stream.allowance.last_s = self.now
            elif self._config.max_gap_s is not None:
                stream.allowance.count(self.now, self._config.max_gap_s)
        self._streams = [stream for stream in self._streams if stream.num_left > 0]
        for prompt, num_tokens in chunks:
            prompt.is_running = True
            prompt.num_tokens -= num_tokens
            prompt.num_before += num_tokens
            if not prompt.num_tokens:
                self.prompts.remove(prompt)
                if prompt.num_output > 1:
                    allowance = Allowance(last_s=self.now)
                    self._streams.append(
                        OpenStream(prompt.num_before + 1, 1, prompt.num_output - 1, allowance)
                    )


def _waits(time: PromptTime, prompt: OpenPrompt) -> bool:
    return time.is_used_up(is_limited=False) or (
        time.may_wait and time.is_too_short(prompt.num_tokens, prompt.num_before, is_limited=False)
    )


def _prompt(prompt: OpenPrompt) -> Prompt:
    return Prompt(prompt.since_s, prompt.num_tokens, prompt.num_before)
