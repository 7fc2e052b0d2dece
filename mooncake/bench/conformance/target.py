"""The server under test and what a check may do to it. Owns the random prompts of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mooncake.bench.conformance.endpoint import Answer, Endpoint
from mooncake.bench.conformance.processes import Processes
from mooncake.bench.conformance.verdict import Failed

_IDS = range(32, 256)
"""Every vocabulary has these ids, and none of them ends an answer."""
_POLL_S = 0.25
PROBE_TOKENS = 24


@dataclass
class Target:
    """The server of one run, its neighbours, and how long an answer may take."""

    main: Endpoint
    prefill: Endpoint | None
    """The server's prefill worker, if that worker gives clients handles of KV."""
    other: Endpoint | None
    """Another server with the same weights."""
    processes: Processes | None
    """The server's processes; None: the checks leave them alone."""
    draw: Random
    kv_gauge: str | None
    deadline_s: float
    """A request that has not ended after this time hangs."""
    prompt_tokens: int
    output_tokens: int
    stop_s: float
    lease_s: float
    num_replacements: int

    def prompt(self, length: int) -> list[int]:
        """Return a prompt that no request had before."""
        return [self.draw.choice(_IDS) for _ in range(length)]

    async def whole(self, prompt: Sequence[int], max_tokens: int = 0, **more: Any) -> Answer:
        asked = max_tokens or self.output_tokens
        return await self._whole(self.main, prompt, asked, **more)

    async def whole_of_other(self, prompt: Sequence[int], max_tokens: int = 0) -> Answer:
        """Return the whole answer of the other server. Raises Failed when there is none in time."""
        assert self.other is not None
        return await self._whole(self.other, prompt, max_tokens or self.output_tokens)

    async def _whole(
        self, endpoint: Endpoint, prompt: Sequence[int], max_tokens: int, **more: Any
    ) -> Answer:
        try:
            async with asyncio.timeout(self.deadline_s):
                answer = await endpoint.complete(prompt, max_tokens, **more)
        except TimeoutError:
            raise Failed(
                f"a request of {len(prompt)} tokens did not end within {self.deadline_s:g} s"
            ) from None
        if answer.error or len(answer.ends) != 1:
            raise Failed(f"a request of {len(prompt)} tokens ended with: {answer.told}")
        return answer

    async def settled_kv(self) -> float:
        """Return how much KV is held once that no longer changes. Raises NotPossible when the
        server has no such figure.
        """
        last, same = await self.main.kv_in_use(self.kv_gauge), 0
        deadline = time.monotonic() + self.deadline_s
        while same < 3 and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            now = await self.main.kv_in_use(self.kv_gauge)
            same, last = (same + 1 if now == last else 0), now
        return last

    async def returns_to(self, start: float) -> float:
        """Wait until no more KV is held than at the start. Return the seconds that it took.

        Raises:
            Failed: more KV stays held.
        """
        begun = time.monotonic()
        while (now := await self.main.kv_in_use(self.kv_gauge)) > start:
            if time.monotonic() - begun > self.deadline_s:
                raise Failed(
                    f"KV in use was {start:g} before and is {now:g} {self.deadline_s:g} s after "
                    "the last request has ended"
                )
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - begun

    async def answers_again(self, prompt: Sequence[int], wanted: Answer) -> float:
        """Wait until the server gives the same answer as before. Return the seconds.

        Raises:
            Failed: it gives another answer, or none in time.
        """
        begun = time.monotonic()
        while True:
            answer = await self.main.complete(prompt, PROBE_TOKENS)
            if not answer.error and answer.tokens == wanted.tokens:
                return time.monotonic() - begun
            if not answer.error and answer.ends:
                raise Failed(f"the answer afterwards differs: {difference(wanted, answer)}")
            if time.monotonic() - begun > 2 * self.deadline_s:
                raise Failed(f"the server does not answer again: {answer.told}")
            await asyncio.sleep(_POLL_S)


def difference(wanted: Answer, found: Answer) -> str:
    pairs = zip(wanted.tokens, found.tokens, strict=False)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return f"{len(found.tokens)} tokens instead of {len(wanted.tokens)}"
    return f"token {place} is {found.tokens[place]!r} instead of {wanted.tokens[place]!r}"
