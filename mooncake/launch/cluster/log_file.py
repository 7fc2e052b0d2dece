"""Writes the log of a process of `mooncake serve`. A terminal shows warnings only, and a file has
the rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from mooncake.base import ConfigError
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.environment import cache_dir
from mooncake.telemetry.log import configure_logging

DEFAULT_LEVEL = "info"
KEPT = 10
"""Number of log files of ended starts that are kept; a start removes older ones."""


def stays_calm(config: ServeConfig) -> bool:
    """Return whether a start shows only warnings: a person watches the terminal and has not asked
    for a log.
    """
    has_wish = config.log_level or config.log_file or config.access_log
    return not has_wish and config.log_format == "text" and sys.stderr.isatty()


def new_log_file() -> str | None:
    """Return the path of an empty file for this process, and remove the oldest files beside it.
    Return None if there is no room for a file.
    """
    folder = cache_dir() / "logs"
    path = folder / f"serve-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        ended = [each for each in folder.glob("serve-*.log") if not _is_used(each)]
        for old in sorted(ended, key=lambda each: each.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return str(path)


def _is_used(path: Path) -> bool:
    """Return whether the process that owns a log file may still write to it."""
    pid = path.stem.rpartition("-")[2]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def start_log(name: str, level: str | None, form: str, file: str | None) -> None:
    """Write the log of this process under its name. The folder of `file` is made: the cluster's
    first process names a file, and other processes have it on their own machines.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        if file:
            with contextlib.suppress(FileExistsError):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
        configure_logging(name, sys.stderr, level=level or DEFAULT_LEVEL, form=form, file=file)
    except OSError as error:
        raise ConfigError(f"log-file: cannot write {file}: {error.strerror}") from None
