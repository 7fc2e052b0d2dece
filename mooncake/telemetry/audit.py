"""The audit log: who did, or failed to do, what others may have to answer for. One JSON object a
line. Any module calls `audit`. `launch` sets once where the lines go; until then there are none.

Lines hold names, never keys, tokens or blocks. Strangers choose how often they fail, so only a few
lines of one kind are written in a minute, and the next line says how many were left out.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import sys
import threading
from logging.handlers import WatchedFileHandler
from typing import IO

from mooncake.base.errors import ConfigError
from mooncake.telemetry.log import Throttle, json_line

STANDARD_ERROR = "-"
MOST_A_MINUTE = 60
"""The most lines of one event in a minute. For an event that names who did it, this holds for each
of them.
"""
OPERATOR_ROUTE = "operator_route"
FEWER = {OPERATOR_ROUTE: 1}
"""The smaller limits of some events, because pages that show the cluster ask every second."""
MAX_CHARS = 1000
"""How much of one text is written, because a refused client chooses its path and its name."""
_LOGGER = logging.getLogger("mooncake.audit")
_LOGGER.propagate = False
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.setLevel(logging.INFO)


def audit(event: str, *, kind: str = "", **facts: object) -> None:
    """Write one line.

    kind: lines of this event with an equal kind are counted together. facts: fields of the line.
    Those that are None or empty are left out.
    """
    shown = {name: _cut(fact) for name, fact in facts.items() if fact not in (None, "")}
    _LOGGER.info(event, extra={"kind": kind, "facts": shown})


def _cut(fact: object) -> object:
    is_long = isinstance(fact, str) and len(fact) > MAX_CHARS
    return f"{fact:.{MAX_CHARS}}..." if is_long else fact


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"), "process": self._process,
            "event": record.msg, **vars(record)["facts"],
        }  # fmt: skip
        return json_line(line)


class _File(WatchedFileHandler):
    """Appends to a file that only this user may read. After the file was moved, it begins a new
    one. Several processes may share it, because each line is one write. When a line cannot be
    written, standard error says so, and the caller of `audit` goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # nothing is written where the moved file was
            self.handleError(record)

    def _open(self) -> IO[str]:  # type: ignore[override]  # the base class names a narrower type
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")


def configure_audit(process: str, target: str | None) -> None:
    """Write the lines of this process to the file `target`, or to standard error for "-", or
    nowhere for None. When the file was moved away, SIGHUP creates it anew; without SIGHUP, the next
    line does.

    Raises:
        ConfigError: the file cannot be opened.
    """
    handler: logging.Handler
    try:
        if target is None:
            handler = logging.NullHandler()
        elif target == STANDARD_ERROR:
            handler = logging.StreamHandler(sys.stderr)
        else:
            handler = _File(target)
    except OSError as error:
        raise ConfigError(f"audit-log: cannot open {target}: {error.strerror}") from error
    handler.setFormatter(_Formatter(process))
    handler.addFilter(Throttle(MOST_A_MINUTE, FEWER))
    for old in _LOGGER.handlers:
        old.close()
    _LOGGER.handlers[:] = [handler]
    if isinstance(handler, _File):
        with contextlib.suppress(ValueError):  # not the main thread: nobody sends it signals
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                signal.signal(signal.SIGHUP, lambda *_: reopen())


def reopen() -> None:
    """Open the file again if it was moved away. A signal handler may call it."""
    # Another thread opens it, because this one may be in the middle of a line.
    threading.Thread(target=_reopen, name="audit log", daemon=True).start()


def _reopen() -> None:
    for handler in _LOGGER.handlers:
        if isinstance(handler, _File):
            with handler.lock or contextlib.nullcontext(), contextlib.suppress(OSError):
                handler.reopenIfNeeded()  # if it cannot be opened, the next line says so
