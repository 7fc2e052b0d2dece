"""Checks finished answers against schemas that their grammars could not follow as a whole.

Owns one process (`check_program`), which starts with the first schema to check, and is killed when
a check exceeds its time. Checks wait in a bounded queue, and none waits long: rather than waiting
for others' schemas, an answer is reported as not checked. Tenants take turns by the time that their
checks take. So a tenant that sends costly schemas delays mainly itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mooncake.api.lane import FairQueue
from mooncake.base.bounded_map import BoundedMap

CPU_LIMIT_S = 0.5
"""CPU time of one check; real ones take about a millisecond."""
WALL_LIMIT_S = 5.0
"""Time of one check on a busy machine, and of the start of the process."""
QUEUE_LIMIT_S = 2.0
MAX_WAITING = 256
MAX_TOO_COSTLY = 256
MAX_VALUE_CHARS = 4_000_000

_PROGRAM = Path(__file__).with_name("check_program.py")
_START = ("{}", "0")

_log = logging.getLogger(__name__)


class SchemaToCheck(msgspec.Struct, frozen=True):
    """A schema as text, with its digest."""

    text: str
    digest: bytes

    @classmethod
    def of(cls, schema: Any) -> SchemaToCheck:
        text = json.dumps(schema)
        return cls(text, hashlib.blake2b(text.encode(), digest_size=16).digest())


class Fault(msgspec.Struct, frozen=True):
    """The reason why a value is not known to be valid against its schema."""

    path: str
    """JSON pointer to the part of the value; "" = the whole."""
    keyword: str | None
    """The keyword of the schema; None = the value could not be checked."""
    message: str


def _unchecked(reason: str) -> list[Fault]:
    return [Fault("", None, f"not checked: {reason}")]


class _Question(NamedTuple):
    """A check that waits."""

    schema: SchemaToCheck
    value: str
    asked_s: float
    found: Future[list[Fault]]


class SchemaChecker:
    """Checks values one after another, on a thread that waits for the process."""

    def __init__(
        self,
        *,
        cpu_limit_s: float = CPU_LIMIT_S,
        wall_limit_s: float = WALL_LIMIT_S,
        queue_limit_s: float = QUEUE_LIMIT_S,
    ) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._wall_limit_s = wall_limit_s
        self._queue_limit_s = queue_limit_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="schema-check")
        self._queue: FairQueue[_Question] = FairQueue(MAX_WAITING)
        self._closing = threading.Event()
        # The rest is touched by the pool's only thread.
        self._process: subprocess.Popen[bytes] | None = None
        self._too_costly: BoundedMap[bytes, int] = BoundedMap(MAX_TOO_COSTLY)
        """Schemas, each with the length of the shortest value that took too long."""

    def warm_up(self) -> None:
        """Start the process if it does not run, because an answer to check comes soon. Any thread
        may call this.
        """
        with contextlib.suppress(RuntimeError):  # closed
            self._pool.submit(self._start)

    async def check(self, schema: SchemaToCheck, value: str, tenant: str = "") -> list[Fault]:
        """Return the first faults of the JSON text `value`, or one that says why it could not be
        checked; [] when it is valid. It takes a few seconds at most. Call it in the event loop.
        """
        if len(value) > MAX_VALUE_CHARS:
            return _unchecked(f"it has more than {MAX_VALUE_CHARS} characters")
        question = _Question(schema, value, time.monotonic(), Future())
        if not self._queue.add(tenant, question):
            return _unchecked("too many answers wait to be checked")
        try:
            self._pool.submit(self._next)
        except RuntimeError:
            return _unchecked("the server is shutting down")
        return await asyncio.wrap_future(question.found)

    def _next(self) -> None:
        """Answer the next question in turn. It is called once for each question."""
        taken = self._queue.take()
        assert taken is not None
        tenant, question = taken
        began_s = time.monotonic()
        if question.found.set_running_or_notify_cancel():
            try:
                question.found.set_result(self._check(*question[:3]))
            except BaseException as error:
                question.found.set_exception(error)
        self._queue.charge(tenant, time.monotonic() - began_s)

    def close(self) -> None:
        """End the process and the thread. A second call does nothing."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._end)
        self._pool.shutdown(wait=True)

    def _check(self, schema: SchemaToCheck, value: str, asked_s: float) -> list[Fault]:
        if self._closing.is_set():
            return _unchecked("the server is shutting down")
        if time.monotonic() - asked_s > self._queue_limit_s:
            return _unchecked("others took all the time")
        if len(value) >= self._too_costly.get(schema.digest, len(value) + 1):
            return _unchecked("this schema took too long before")
        try:
            if not self._start():
                return _unchecked("the process that checks does not start")
            said = self._ask(schema.text, value)
        except (OSError, EOFError, ValueError):  # it has ended: of time, or of memory
            self._end()
            self._too_costly[schema.digest] = len(value)
            _log.warning("checking an answer against a schema took too much time or memory")
            self._start()  # in the time of the tenant whose schema ended it
            return _unchecked("it took too much time or memory")
        if isinstance(said, str):
            return _unchecked(said)
        return [Fault(*each) for each in said]

    def _start(self) -> bool:
        """Start the process if it does not run; return whether it runs."""
        if self._process is not None and self._process.poll() is None:
            return True
        self._end()
        if self._closing.is_set():
            return False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": os.pathsep.join(sys.path)},  # it gets no keys or secrets
            )
            self._ask(*_START)
        except (OSError, EOFError, ValueError) as error:
            _log.error("the process that checks answers against schemas does not start: %s", error)
            self._end()
            return False
        return True

    def _ask(self, schema: str, value: str) -> Any:
        """Send one question and return its answer.

        Raises:
            OSError, EOFError, ValueError: the process has ended, or does not answer in time.
        """
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        question = json.dumps([self._cpu_limit_s, schema, value]).encode()
        stdin.write(len(question).to_bytes(4, "big") + question)
        stdin.flush()
        end_s = time.monotonic() + self._wall_limit_s
        data = self._read(stdout.fileno(), 4, end_s)
        return json.loads(self._read(stdout.fileno(), int.from_bytes(data, "big"), end_s))

    @staticmethod
    def _read(descriptor: int, size: int, end_s: float) -> bytes:
        data = b""
        poll = select.poll()  # `select` takes only small descriptors
        poll.register(descriptor, select.POLLIN)
        while len(data) < size:
            ready = poll.poll(max(0.0, end_s - time.monotonic()) * 1000)
            more = os.read(descriptor, size - len(data)) if ready else b""
            if not more:
                raise EOFError
            data += more
        return data

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # unsent bytes are lost
                        pipe.close()
