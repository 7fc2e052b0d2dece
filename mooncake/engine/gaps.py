"""How much of a step prompts get beside streams whose gaps have a limit. Pure.

Chunks are cut so that a step is predicted to keep the limit. Where even the smallest chunk would
break it, prompts wait for streams to end, as long as their first tokens can still come in time.
When one of those that wait is late, all prompts are computed as if there were no limit: one long
gap costs streams less than a row of steps that each break the limit. A late prompt whose chunks fit
changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mooncake.engine.chunks import UNIT, largest_chunk
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel


class Prompt(NamedTuple):
    """What a prompt still has to compute."""

    added_s: float
    num_tokens: int
    num_before: int
    """The tokens before these, which are computed or cached."""


@dataclass(slots=True)
class PromptTime:
    """The time of one step that is left for prompts beside its streams."""

    cost: StepCostModel
    left_s: float
    may_wait: bool
    """Whether a prompt waits when its smallest chunk does not fit."""
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
        return self.may_wait and self._chunk_s(min(UNIT, num_tokens), num_before) > left_s

    def take(self, most: int, num_before: int, is_limited: bool) -> int:
        """Count a chunk of a prompt, of at most `most` tokens, and return how many it has. Unless
        prompts wait, the first prompt, and the first of flows that are not limited, get `UNIT`
        tokens in any case: streams slow them down and never stop them.
        """
        is_first = not self.has_prompt or not (is_limited or self.has_free_prompt)
        self.has_prompt = True
        self.has_free_prompt |= not is_limited
        chunk_s = self._chunk_s(most, num_before)
        if chunk_s <= self.left_s:
            self.left_s -= chunk_s
            return most
        least = min(UNIT, most) if is_first else 0
        limit_s = self.left_s + self.cost.coefficients[0]
        self.left_s = 0.0  # prompts behind it wait for the next step
        return largest_chunk(self.cost, most, least, num_before, limit_s)

    def _chunk_s(self, num_tokens: int, num_before: int) -> float:
        """Return the predicted time that a chunk adds to a step."""
        return self.cost.step_s(num_tokens, num_before, 1) - self.cost.coefficients[0]


def prompt_time(
    config: EngineConfig,
    cost: StepCostModel,
    streams: list[int],
    longest: int,
    prompts: Iterable[Prompt],
    now: float,
) -> PromptTime:
    """Return the time that streams leave for prompts in a step.

    streams: the tokens before each stream's own. prompts: those that run or wait, in rank order;
    they are looked at only if the smallest chunk of one of `longest` tokens does not fit.
    """
    limit_s = math.inf if config.max_gap_s is None else config.max_gap_s
    left_s = limit_s / config.num_stages - cost.streams_s(len(streams), sum(streams))
    time = PromptTime(cost, left_s, config.first_token_s is not None, streams_left_s=left_s)
    time.may_wait = time.is_too_short(UNIT, longest, is_limited=False)
    if time.may_wait and _any_is_late(prompts, now, config, time):
        time.left_s = time.streams_left_s = math.inf
    return time


def _any_is_late(
    prompts: Iterable[Prompt], now: float, config: EngineConfig, time: PromptTime
) -> bool:
    """Return whether a prompt has waited for streams so long that its first token would just come
    in time, if prompts were computed one after the other from now on.
    """
    ready_s = now
    for added_s, num_tokens, num_before in prompts:
        ready_s += time.cost.prefill_s(num_tokens, num_before, config.max_chunk_tokens)
        is_late = ready_s > added_s + (config.first_token_s or 0.0)
        if is_late and time.is_too_short(num_tokens, num_before, is_limited=False):
            return True
    return False
