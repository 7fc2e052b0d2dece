"""The settings of one benchmark of a server. Values only."""

from __future__ import annotations

import dataclasses

from mooncake.bench.arrivals import Arrivals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of one benchmark run."""

    arrivals: Arrivals
    max_concurrency: int | None = None
    num_warmups: int = 0
    """This many of the first samples are sent before the run and not counted."""
    ready_timeout_s: float = 0.0
    """How many seconds to wait for the server's first answer; 0: do not check the server before the
    run.
    """
    self_timed: bool = False
    """Send the requests at the times that the dataset gives."""
    progress: bool = True
    seed: int = 0
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: dict[str, float] = dataclasses.field(default_factory=dict)
