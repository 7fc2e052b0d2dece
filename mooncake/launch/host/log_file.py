"""Where a process of `mooncake serve` writes its log. On a terminal that shows warnings, and a file
has the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mooncake.base import ConfigError
from mooncake.launch.host.environment import cache_dir
from mooncake.telemetry.log import configure_logging

KEPT = 10
"""The newest files of earlier starts; a start removes older ones."""
_WISHES = {"log_level", "log_file", "log_format", "access_log", "role", "dry_run", "check"}


def goes_to_file(written: Mapping[str, object]) -> bool:
    """Return whether a start with these settings, as they were written, keeps its terminal calm:
    somebody looks at it, and asked for nothing of the log.
    """
    return not _WISHES & written.keys() and sys.stderr.isatty()


def new_log_file() -> str | None:
    """Return the path of an empty file for this process, and remove the oldest beside it; None:
    there is no room for one.
    """
    folder = cache_dir() / "logs"
    path = folder / f"serve-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        files = sorted(folder.glob("serve-*.log"), key=lambda each: each.stat().st_mtime)
        for old in files[: -KEPT - 1]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return str(path)


def start_log(name: str, level: str, form: str, file: str | None) -> None:
    """Write the log of this process, under its name.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        configure_logging(name, sys.stderr, level=level, form=form, file=file)
    except OSError as error:
        raise ConfigError(f"log-file: cannot write {file}: {error.strerror}") from None
