"""Writes each log record on one line, as text for people or JSON for machines. `launch` calls this
once. All other modules use `logging.getLogger(__name__)` and never print.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TextIO

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

MAX_ALIKE_A_MINUTE = 120
"""The most records of one message and logger in a minute. There is a limit because clients choose
how often they are refused.
"""
MINUTE_S = 60.0
LOGGERS = ("mooncake", "opentelemetry")
"""The loggers whose records are written. The second says why traces cannot be sent."""
COMPLETE_LOGGERS = frozenset({"mooncake.api.http.tracing"})
"""Loggers whose records are all written, because the user asked for the access log."""
MAX_KINDS = 1024
"""How many kinds are counted separately in a minute. Further kinds of a message count as one."""


class Throttle(logging.Filter):
    """Drops the records of a kind beyond its number in a minute. The next one that is written says
    in `left_out` how many. A kind is a logger, a message and the record's `kind`, if it has one.
    """

    def __init__(self, most: int, fewer: Mapping[str, int] = MappingProxyType({})) -> None:
        """most: records of a kind in a minute. fewer: smaller numbers for some messages."""
        super().__init__()
        self._most = most
        self._fewer = fewer
        self._begun_s = 0.0
        self._written: dict[tuple[str, str, str], int] = {}
        self._left_out: dict[tuple[str, str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in COMPLETE_LOGGERS:
            return True
        if abs(record.created - self._begun_s) >= MINUTE_S:
            self._begun_s, self._written = record.created, {}
        facts, message = vars(record), str(record.msg)
        kind = (record.name, message, str(facts.get("kind", "")))
        if kind not in self._written and len(self._written) >= MAX_KINDS:
            kind = (record.name, message, "")
        written = self._written.get(kind, 0)
        if written >= self._fewer.get(message, self._most):
            if kind in self._left_out or len(self._left_out) < MAX_KINDS:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._written[kind] = written + 1
        if left_out := self._left_out.pop(kind, 0):
            facts.get("facts", facts)["left_out"] = left_out
        return True


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:30:01.123+00:00 INFO decode-0 mooncake.decode.worker: text key=value`, on one
    line.
    """

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        extra = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{_time(record)} {record.levelname} {self._worker_id} {record.name}: {text}{extra}"
        if record.exc_info:
            line += " | " + self.formatException(record.exc_info)
        return _CONTROL.sub(_spelled, line.replace("\n", " | "))


def _spelled(found: re.Match[str]) -> str:
    """Return a control character as visible text, because clients may put some into what
    is logged.
    """
    return found[0].encode("unicode_escape").decode()


class JsonFormatter(logging.Formatter):
    """One JSON object a record: `time`, `level`, `worker`, `logger`, `message`, then the extras."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname,
            "worker": self._worker_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: str(value) for name, value in _extras(record).items()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_line(entry)


def json_line(entry: dict[str, Any]) -> str:
    """Return an object as JSON without control characters. Those that JSON allows are escaped, too,
    because some readers take them for the end of a line or for commands.
    """
    text = msgspec.json.encode(entry).decode()
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def configure_logging(
    worker_id: str,
    stream: TextIO,
    *,
    level: str = "info",
    form: str = "text",
    file: str | None = None,
) -> None:
    """Send the records of `LOGGERS` to `stream`, once, each on one line with the worker's name.
    Append records of level info and above to `file` too; several processes may share it.

    Raises:
        ValueError: there is no such level.
        OSError: the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    handlers[0].setLevel(level.upper())
    if file:
        handlers.append(logging.FileHandler(file))
        handlers[1].setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(FORMATTERS[form](worker_id))
        handler.addFilter(Throttle(MAX_ALIKE_A_MINUTE))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for before in logger.handlers:
            before.close()
        logger.handlers[:] = handlers
        logger.setLevel(min(handler.level for handler in handlers))
        logger.propagate = False


def _time(record: logging.LogRecord) -> str:
    """Return the time of a record, as ISO 8601 with milliseconds and the zone of this machine."""
    at = datetime.datetime.fromtimestamp(record.created).astimezone()
    return at.isoformat(timespec="milliseconds")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")  # Ray adds private ones
    }
