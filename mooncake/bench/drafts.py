"""What became of a server's drafts (speculative decoding) during a run: its counters, twice."""

from __future__ import annotations

import dataclasses
import itertools
import re

_COUNTER = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
"""As Mooncake and vLLM name them."""
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
    """By their position among a step's drafts, as far as there are any."""

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
        """Accepted drafts, in percent."""
        return 100 * self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Of all steps with drafts the share in which the first, second... was accepted."""
        return [number / self.drafts for number in self.accepted_at] if self.drafts else []

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step with drafts gave a sequence, on average."""
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
