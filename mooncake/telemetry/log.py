"""One line a log record, as text for people or JSON for machines. Called once by `launch`; all
other modules use `logging.getLogger(__name__)` and never print.
"""

from __future__ import annotations

import logging
from typing import TextIO

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`12:30:01.123 INFO decode-0 mooncake.decode.worker: text key=value`, on one line."""

    def __init__(self, worker_id: str) -> None:
        super().__init__("%(asctime)s", datefmt="%H:%M:%S")
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        extra = "".join(f" {name}={value}" for name, value in _extras(record).items())
        stamp = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        line = f"{stamp} {record.levelname} {self._worker_id} {record.name}: {text}{extra}"
        if record.exc_info:
            line += " | " + self.formatException(record.exc_info)
        return line.replace("\n", " | ")


class JsonFormatter(logging.Formatter):
    """One JSON object a record: `time`, `level`, `worker`, `logger`, `message`, then the extras."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "worker": self._worker_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: str(value) for name, value in _extras(record).items()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def configure_logging(
    worker_id: str, stream: TextIO, *, level: str = "INFO", json_lines: bool = False
) -> None:
    """Send the records of `mooncake.*` to `stream`, once, each on one line with the worker's name.

    Raises:
        ValueError: no such level.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(worker_id) if json_lines else TextFormatter(worker_id))
    logger = logging.getLogger("mooncake")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")  # others (Ray) add private ones
    }
