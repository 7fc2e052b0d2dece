"""Settings of an instance in its cluster. The engine has its own settings."""

from __future__ import annotations

import msgspec

from mooncake.base.errors import ConfigError


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and bounds; seconds unless the name says otherwise."""

    report_interval_s: float = 0.25
    """Seconds between two heartbeats with load reports."""
    fetch_timeout_s: float = 5.0
    """A prefix that has not come from the pool after this time is recomputed."""
    verify_fetches: bool = True
    """Whether to compare fetched blocks with the checksums that pool nodes give."""
    push_checksums: bool = False
    """Prefill hashes the blocks that it pushes; decode compares them before it uses them."""
    push_timeout_s: float = 30.0
    """A push to decode or to the pool that takes longer counts as failed."""
    hold_s: float = 10.0
    """How long prefill keeps the pages of finished blocks for a decode worker without room; after
    that, decode fetches the blocks from the pool."""
    quarantine_s: float = 30.0
    """How long pages that were reserved for a lost prefill worker are not reused. A worker that is
    cut off but alive may go on writing until its pushes time out.
    """
    ask_again_s: float = 10.0
    """How often decode asks a prefill worker about pages that have been reserved for this long. The
    message that its push has ended may have been lost.
    """
    max_reservations: int = 4096
    """Requests that may wait for room on a decode worker; more are refused. They hold no pages. The
    bound is above what gateways admit, so that gateways refuse first, at once."""

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
