"""What one benchmark of a server is asked to do. Values only."""

from __future__ import annotations

import dataclasses

from mooncake.bench.arrivals import Arrivals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one benchmark run."""

    arrivals: Arrivals
    max_concurrency: int | None = None
    num_warmups: int = 0
    """So many of the first samples are sent before, and not counted."""
    ready_timeout_s: float = 0.0
    """How long to wait for the server's first answer; 0: no look before the run."""
    self_timed: bool = False
    """Send at the dataset's own times."""
    progress: bool = True
    seed: int = 0
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: dict[str, float] = dataclasses.field(default_factory=dict)
