"""The settings of one benchmark of a server, above all when requests are sent: constant, random or
growing rates. Pure: rates and a seed give times.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Literal

from mooncake.base import ConfigError

TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client Queue Time", "Client Queue Time"),
}
"""Latency that is shown -> (heading, short name)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp:
    """A request rate that grows from the first request to the last."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if not 0 <= self.start_rps < self.end_rps:
            raise ConfigError(
                f"ramp-up-end-rps: {self.end_rps:g} must be more than `ramp-up-start-rps` "
                f"({self.start_rps:g}), which must be at least 0"
            )
        if self.strategy == "exponential" and self.start_rps == 0:
            raise ConfigError(
                "ramp-up-start-rps: an exponential ramp cannot begin at 0; give a rate above 0"
            )

    def rate(self, share: float) -> float:
        """Return the rate after `share` (0 to 1) of all requests, never zero."""
        if self.strategy == "linear":
            rate = self.start_rps + (self.end_rps - self.start_rps) * share
        else:
            rate = self.start_rps * (self.end_rps / self.start_rps) ** share
        return max(rate, self.end_rps / 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When requests are sent: a mean rate, its burstiness, and an optional ramp."""

    rate: float = math.inf
    """Requests per second; infinite: all at once."""
    burstiness: float = 1.0
    """The shape of the gamma distribution of gaps: 1 is a Poisson process, a larger value is more
    even.
    """
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(
                f"request-rate: {self.rate:g} is not above 0; give requests per second, or inf"
            )
        if not self.burstiness > 0:
            raise ConfigError(
                f"burstiness: {self.burstiness:g} is not above 0; 1 is Poisson's process"
            )
        if self.ramp is not None and self.rate != math.inf:
            raise ConfigError(
                "ramp-up-strategy: a ramp has its own rates; leave out `request-rate`"
            )

    def times_s(self, count: int, seed: int) -> list[float]:
        """Return when each of `count` requests is sent, in seconds after the beginning.

        Without a ramp the last request is sent at exactly count / rate, so that no seed changes the
        load.
        """
        if self.ramp is None and self.rate == math.inf:
            return [0.0] * count
        source = random.Random(seed)
        gaps = []
        for number in range(count):
            rate = self.ramp.rate(number / max(1, count - 1)) if self.ramp else self.rate
            if self.burstiness == math.inf:
                gaps.append(1 / rate)
            else:
                gaps.append(source.gammavariate(self.burstiness, 1 / (rate * self.burstiness)))
        times = list(itertools.accumulate(gaps))
        if self.ramp is None and times and times[-1] > 0:
            scale = count / self.rate / times[-1]
            times = [time * scale for time in times]
        return times


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
