"""The audit log: who did, or tried in vain, what others may have to answer for; one JSON object a
line. Any module calls `audit`; `launch` says once where the lines go, without which there are none.

Names are written, never keys, tokens or blocks. Strangers choose how often they fail, so the lines
of one kind are few in a minute, and the next one says how many were left out.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import signal
import sys
import threading
from logging.handlers import WatchedFileHandler
from typing import IO

import msgspec

from mooncake.base.errors import ConfigError

STANDARD_ERROR = "-"
MOST_A_MINUTE = 60
"""Lines of one event; of one that names who did it, for each of them."""
OPERATOR_ROUTE = "operator_route"
FEWER = {OPERATOR_ROUTE: 1}
"""Events of which fewer are written: pages that show the cluster ask each second."""
MAX_KINDS = 1024
"""Kinds that are counted apart in a minute; all further ones of an event are one kind."""
MAX_CHARS = 1000
"""What is written of one text: who is refused chooses its path, or what he says he is."""
MINUTE_S = 60.0
_BREAKS = re.compile(r"[\x7f-\x9f\u2028\u2029]")
"""What some readers take for the end of a line, or for commands, and JSON leaves as it is."""
_LOGGER = logging.getLogger("mooncake.audit")
_LOGGER.propagate = False
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.setLevel(logging.INFO)


def audit(event: str, *, kind: str = "", **facts: object) -> None:
    """Write one line. `kind`: whose lines of this event are counted together; `facts` are fields of
    it, and those that are None or empty are left out.
    """
    shown = {name: _cut(fact) for name, fact in facts.items() if fact not in (None, "")}
    _LOGGER.info(event, extra={"kind": kind, "facts": shown})


def _cut(fact: object) -> object:
    is_long = isinstance(fact, str) and len(fact) > MAX_CHARS
    return f"{fact:.{MAX_CHARS}}..." if is_long else fact


class Throttle(logging.Filter):
    """Drops the lines of a kind beyond its number in a minute; the next that is written says in
    `left_out` how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun_s = 0.0
        self._written: dict[tuple[str, str], int] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if abs(record.created - self._begun_s) >= MINUTE_S:
            self._begun_s, self._written = record.created, {}
        kind = (record.msg, vars(record)["kind"])
        if kind not in self._written and len(self._written) >= MAX_KINDS:
            kind = (record.msg, "")
        written = self._written.get(kind, 0)
        if written >= FEWER.get(record.msg, MOST_A_MINUTE):
            if kind in self._left_out or len(self._left_out) < MAX_KINDS:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._written[kind] = written + 1
        if left_out := self._left_out.pop(kind, 0):
            vars(record)["facts"]["left_out"] = left_out
        return True


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
        text = msgspec.json.encode(line).decode()
        return _BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _File(WatchedFileHandler):
    """Appends to a file that only this user may read; after it was moved, to a new one. Several
    processes may share it: each line is one write. A line that cannot be written is told on
    standard error; who has called `audit` goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the place of a file that was moved away takes none
            self.handleError(record)

    def _open(self) -> IO[str]:  # type: ignore[override]  # the base class names a narrower type
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")


def configure_audit(process: str, target: str | None) -> None:
    """Write the lines of this process to the file `target`, "-" for standard error; None: nowhere.
    SIGHUP makes a file anew that was moved away; without it, the next line does.

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
    handler.addFilter(Throttle())
    for old in _LOGGER.handlers:
        old.close()
    _LOGGER.handlers[:] = [handler]
    if isinstance(handler, _File):
        with contextlib.suppress(ValueError):  # not the main thread: nobody sends it signals
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                signal.signal(signal.SIGHUP, lambda *_: reopen())


def reopen() -> None:
    """Open the file again if it was moved away. A signal handler may call it."""
    # Not in this thread, which may be in the middle of a line.
    threading.Thread(target=_reopen, name="audit log", daemon=True).start()


def _reopen() -> None:
    for handler in _LOGGER.handlers:
        if isinstance(handler, _File):
            with handler.lock or contextlib.nullcontext(), contextlib.suppress(OSError):
                handler.reopenIfNeeded()  # if it cannot be opened, the next line says so
