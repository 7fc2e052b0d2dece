"""What became of a server's drafts (speculative decoding) during a run, from its counters before
and after.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

_COUNTER = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
"""The names of the counters in Mooncake and in vLLM."""
_AT = re.compile(
    r"^\w+:spec_decode_num_accepted_tokens_per_pos(?:_total)?"
    r'\{(?:.*,)?position="(\d{1,2})"(?:,.*)?\} (\S+)$',
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Counts since a server's start, or of a run."""

    drafts: int = 0
    """Steps of a sequence that had drafts."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    """Accepted drafts by their position in the step, as far as the server counts them."""

    def since(self, before: DraftCounts) -> DraftCounts:
        """Return what has been added since `before`."""
        at_before = itertools.chain(before.accepted_at, itertools.repeat(0))
        return DraftCounts(
            drafts=self.drafts - before.drafts,
            draft_tokens=self.draft_tokens - before.draft_tokens,
            accepted_tokens=self.accepted_tokens - before.accepted_tokens,
            accepted_at=tuple(
                now - was for now, was in zip(self.accepted_at, at_before, strict=False)
            ),
        )

    @property
    def acceptance_rate(self) -> float:
        """The share of drafts that were accepted, in percent."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """The shares of steps with drafts in which the first, the second (and so on) draft was
        accepted.
        """
        return [number / self.drafts for number in self.accepted_at] if self.drafts else []

    @property
    def acceptance_length(self) -> float:
        """The average number of tokens that a step with drafts gave a sequence."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0


NO_DRAFTS = DraftCounts()


def parse_counts(text: str) -> DraftCounts:
    """Return the sums of the counters in Prometheus' text; zeros where there are none."""
    found = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0.0)
    for name, value in _COUNTER.findall(text):
        found[name] += float(value)
    at: dict[int, float] = {}
    for position, value in _AT.findall(text):
        at[int(position)] = at.get(int(position), 0.0) + float(value)
    positions = range(max(at, default=-1) + 1)
    return DraftCounts(
        drafts=round(found["drafts"]),
        draft_tokens=round(found["draft_tokens"]),
        accepted_tokens=round(found["accepted_tokens"]),
        accepted_at=tuple(round(at.get(position, 0.0)) for position in positions),
    )
