"""How evenly the ranks that share experts were loaded, before a run and during it. The figures are
the server's counters at both times.
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
    """Rows of ranks, over all windows since a server's start, or over those that ended in a run."""

    mean: float = 0.0
    most: float = 0.0
    """The rows of the busiest rank, summed over windows and layers."""

    def since(self, before: ExpertRows) -> ExpertRows:
        """Return what has been added since `before`."""
        return ExpertRows(mean=self.mean - before.mean, most=self.most - before.most)

    @property
    def balance(self) -> float | None:
        """The mean divided by the most; 1 means that all ranks had the same number. None: nothing
        was counted.
        """
        return self.mean / self.most if self.most > 0 else None


def parse_rows(text: str) -> ExpertRows:
    """Return the sums over all workers in a text in Prometheus' format; zeros when there
    are none.
    """
    found = {"mean": 0.0, "most": 0.0}
    for name, value in _COUNTER.findall(text):
        found[name] += float(value)
    return ExpertRows(**found)
