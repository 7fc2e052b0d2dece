"""Settings of one instance's dealings with its cluster (the engine has its own)."""

from __future__ import annotations

import msgspec

from mooncake.base.errors import ConfigError


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and bounds; seconds unless the name says otherwise."""

    report_interval_s: float = 0.25
    """Heartbeat and load report."""
    fetch_timeout_s: float = 5.0
    """A prefix that has not come from the pool by then is recomputed."""
    verify_fetches: bool = True
    """Compare fetched blocks with the pool's checksums, where pages lie in host memory."""
    push_timeout_s: float = 30.0
    """A push to decode or pool that takes longer has failed."""
    hold_s: float = 10.0
    """Prefill keeps finished blocks this long for a decode worker without room; then they stay in
    the pool only and decode fetches them from there."""
    quarantine_s: float = 30.0
    """Pages reserved for a lost prefill worker are not used again before: cut off but not dead, it
    may go on writing until its pushes time out."""
    ask_again_s: float = 10.0
    """How often decode asks a prefill worker about pages reserved for so long: the word that its
    push has ended may have been lost."""
    max_reservations: int = 4096
    """Requests that may wait for room on a decode worker; more are refused. They hold nothing yet:
    the bound is above what gateways let in, so that it is they who say no, at once."""

    def __post_init__(self) -> None:
        for name in (
            "report_interval_s", "fetch_timeout_s", "push_timeout_s", "hold_s", "ask_again_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if self.quarantine_s < 0:
            raise ConfigError(f"quarantine_s must not be negative, not {self.quarantine_s}")
        if self.max_reservations < 1:
            raise ConfigError(f"max_reservations must be at least 1, not {self.max_reservations}")
