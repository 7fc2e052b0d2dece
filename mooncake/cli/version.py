"""`mooncake version` prints the version of this package and of Python."""

from __future__ import annotations

import dataclasses
import sys

import mooncake
from mooncake.cli.command import Command
from mooncake.launch.host.build import revision


@dataclasses.dataclass(frozen=True)
class Version:
    """The command takes no settings."""


def version_line() -> str:
    """Return what `mooncake version` and `mooncake --version` print."""
    commit = revision()[:12]
    built = f"{mooncake.__version__} ({commit})" if commit else mooncake.__version__
    return f"mooncake {built}, Python {sys.version.split()[0]}"


def run(_: Version) -> int:
    print(version_line())
    return 0


COMMANDS = (
    Command(
        words="version", examples="mooncake version", settings=Version, run=run,
    ),
)  # fmt: skip
