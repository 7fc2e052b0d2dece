"""How even the rows of ranks are that share experts, before a run and in it: the server's counters,
twice.
"""

from __future__ import annotations

import dataclasses
import re

_COUNTER = re.compile(
    r'^mooncake:worker_events_total\{(?:.*,)?name="expert_rank_rows_(mean|most)"(?:,.*)?\} (\S+)$',
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Rows of ranks, of all windows since a server's start, or of those that ended in a run."""

    mean: float = 0.0
    most: float = 0.0
    """Of the rank that had most in each window and layer."""

    def since(self, before: ExpertRows) -> ExpertRows:
        """Return what has been added since `before`."""
        return ExpertRows(mean=self.mean - before.mean, most=self.most - before.most)

    @property
    def balance(self) -> float | None:
        """Mean over most, 1 where all ranks have as many; None: nothing was counted."""
        return self.mean / self.most if self.most > 0 else None


def parse_rows(text: str) -> ExpertRows:
    """Return the sums of all workers in Prometheus' text; zeros where there are none."""
    found = {"mean": 0.0, "most": 0.0}
    for name, value in _COUNTER.findall(text):
        found[name] += float(value)
    return ExpertRows(**found)
