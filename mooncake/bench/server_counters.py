"""What a server's counters say of a run, by their values before and after it: what became of its
drafts (speculative decoding), and how evenly the ranks that share experts were loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict

Series = tuple[str, dict[str, str], float]
"""Name, labels, value."""
_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OF_DRAFTS = ":spec_decode_num_"
"""Part of the names of drafts' counters in Mooncake and in vLLM."""


def parse_metrics(text: str) -> list[Series]:
    """Return the series of a text in Prometheus' format. Other lines are left out."""
    found: list[Series] = []
    for line in text.splitlines():
        if match := _SERIES.match(line):
            try:
                value = float(match.group(3))
            except ValueError:
                continue
            found.append((match.group(1), dict(_LABEL.findall(match.group(2) or "")), value))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """What became of drafts, since a server's start or during one run."""

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
    found, at = defaultdict[str, float](float), defaultdict[int, float](float)
    for name, labels, value in parse_metrics(text):
        kind = name.partition(_OF_DRAFTS)[2].removesuffix("_total")
        position = labels.get("position", "")
        if kind != "accepted_tokens_per_pos":
            found[kind] += value
        elif position.isdecimal() and len(position) <= 2:
            at[int(position)] += value
    return DraftCounts(
        drafts=round(found["drafts"]),
        draft_tokens=round(found["draft_tokens"]),
        accepted_tokens=round(found["accepted_tokens"]),
        accepted_at=tuple(round(at[position]) for position in range(max(at, default=-1) + 1)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Rows of ranks, over all windows since a server's start, or over those that ended in a run."""

    mean: float = 0.0
    most: float = 0.0
    """The rows of the busiest rank, summed over windows and layers."""

    def since(self, before: ExpertRows) -> ExpertRows:
        """Return what has been added since `before`."""
        return ExpertRows(mean=self.mean - before.mean, most=self.most - before.most)

    @property
    def balance(self) -> float | None:
        """The mean divided by the most; 1 means that all ranks had the same number. It is None if
        nothing was counted.
        """
        return self.mean / self.most if self.most > 0 else None


def parse_rows(text: str) -> ExpertRows:
    """Return the sums over all workers in a text in Prometheus' format; zeros when there
    are none.
    """
    found = defaultdict[str, float](float)
    for name, labels, value in parse_metrics(text):
        if name == "mooncake:worker_events_total":
            found[labels.get("name", "")] += value
    return ExpertRows(mean=found["expert_rank_rows_mean"], most=found["expert_rank_rows_most"])
