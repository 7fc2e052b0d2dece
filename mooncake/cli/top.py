"""`mooncake top` is `mooncake status --watch` under the name that people look for."""

from __future__ import annotations

import dataclasses

from mooncake.cli.command import Command
from mooncake.cli.status import ServerAddress, Status, show
from mooncake.launch.config.options import positive, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top(ServerAddress):
    interval: float = setting(2.0, positive, "output", "S", "seconds between two questions")


def run(wanted: Top) -> int:
    """Show the workers until Ctrl-C."""
    return show(Status(url=wanted.url, api_key=wanted.api_key, watch=wanted.interval))


COMMANDS = (
    Command(
        words="top", summary="show what each worker does, again and again",
        settings=Top, run=run, examples="mooncake top\nmooncake top --interval 0.5",
        notes="Rates are those since the last question. Of an engine: tokens computed (new) and "
        "found in caches\n(reused); of a pool node: blocks stored (new) and read (reused).",
    ),
)  # fmt: skip
