"""The process of a worker: `python -m mooncake.launch.cluster.supervision.worker_program SOCKET`.

It is a worker for the supervisor that connects first. If a ready worker's supervisor is gone, it
serves on for a while and waits for another one; otherwise it ends with its supervisor.
Owns the worker and the thread that answers supervisors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import msgspec

from mooncake.base import MooncakeError
from mooncake.base.threads import VitalThread
from mooncake.launch.cluster.log_file import start_log
from mooncake.launch.cluster.supervision.worker_handle import (
    ANSWER_S,
    PACKET_BYTES,
    Begin,
    Leave,
    Told,
)
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
from mooncake.launch.worker import process
from mooncake.launch.worker.worker import Worker
from mooncake.telemetry.audit import configure_audit

END_S = 10.0
"""A worker that nobody adopted, or whose place another one takes, is killed if it has not ended by
then.
"""

_log = logging.getLogger(__name__)


class WorkerProgram:
    """Is one worker until it has left or nobody supervises it any more."""

    def __init__(self, listener: socket.socket) -> None:
        listener.listen()  # the kernel then names this process to those that connect
        self._listener = listener
        self._connection: socket.socket | None = None
        self._begin: Begin | None = None
        self._told = Told(pid=os.getpid())
        self._worker: Worker | None = None
        self._is_leaving = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Be the worker that the first supervisor asks for, then end this process."""
        self._listener.settimeout(ANSWER_S)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            os._exit(1)  # who started it has ended before it could connect
        begin = self._greet(connection)
        if begin is None:
            os._exit(1)  # it left without a word
        end_with_vital_threads()
        VitalThread(self._attend, "supervision").start()
        settings = begin.settings
        try:
            start_log(
                settings.worker_id, settings.log_level, settings.log_format, settings.log_file
            )
            configure_audit(settings.worker_id, settings.audit_log)
            process.run(
                msgspec.structs.replace(settings, cluster_secret=begin.secret),
                secret_file=begin.secret_file,
                progress=self._progress,
                started=self._started,
                advertise_host=begin.advertise_host,
            )
        except MooncakeError as error:
            if not self._told.ready:
                self._tell(refusal=error.message)
            _end(1)
        except BaseException:
            # The driver has logged it. The process has to end: its state is unknown.
            if not self._told.ready:
                _log.exception("%s cannot start", settings.worker_id)
            _end(1)
        _end(0)

    def _progress(self, what: str, done: int, whole: int) -> None:
        if not self._told.ready:
            self._tell(what=what, done=done, whole=whole)

    def _started(self, worker: Worker) -> None:
        if worker.admin_url:
            _log.info("admin at %s", worker.admin_url)
        with self._lock:
            self._worker = worker
            assert self._begin is not None
            worker.meet(self._begin.settings.gateway_address)
            if self._is_leaving:
                worker.leave(0.0)  # it has nothing yet
        self._tell(ready=True)

    def _tell(self, **changes: object) -> None:
        """Tell the supervisor how the worker is. One that has gone learns nothing."""
        with self._lock:
            self._told = msgspec.structs.replace(self._told, **changes)
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.send(msgspec.msgpack.encode(self._told))

    def _attend(self) -> None:
        """Answer supervisors, one after the other, until this process ends."""
        orphan_until_s: float | None = None
        while True:
            poll = select.poll()
            for each in filter(None, [self._listener, self._connection]):
                poll.register(each, select.POLLIN)
            left_s = orphan_until_s and max(0.0, orphan_until_s - time.monotonic())
            ready = dict(poll.poll(None if left_s is None else left_s * 1000))
            if not ready:
                _log.warning("nobody has adopted this worker in time: it ends")
                self._make_way()
            elif self._listener.fileno() in ready:
                connection, _ = self._listener.accept()
                if self._greet(connection) is not None:
                    orphan_until_s = None
            elif not self._heard():
                orphan_s = self._let_go()
                _log.warning(
                    "the supervisor of this worker is gone; it serves on for %.0f s, and longer if "
                    "the same `mooncake serve` is started again by then", orphan_s,
                )  # fmt: skip
                _write_nowhere()
                orphan_until_s = time.monotonic() + orphan_s

    def _greet(self, connection: socket.socket) -> Begin | None:
        """Take a new supervisor in place of the old one. If it wants another worker, this one makes
        way; if it wants none, this one leaves. Return None if it says nothing.
        """
        connection.settimeout(ANSWER_S)
        files: list[int] = []
        try:
            packet, files, _, _ = socket.recv_fds(connection, PACKET_BYTES, 2)
            word = msgspec.msgpack.decode(packet, type=Begin | Leave)
            known = self._begin
            begin = known if isinstance(word, Leave) else word
            if begin is None:
                raise OSError("it is not a worker yet")
            if known is not None and known.fingerprint != begin.fingerprint:
                _log.warning("this worker ends: a `mooncake serve` with other settings replaces it")
                self._make_way()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
        except (OSError, msgspec.DecodeError):
            connection.close()
            return None
        finally:
            for file in files:
                os.close(file)
        with self._lock:
            before, self._connection, self._begin = self._connection, connection, begin
            if self._worker is not None:
                self._worker.meet(begin.settings.gateway_address)
        if before is not None:
            before.close()
        if isinstance(word, Leave):
            self._leave(word)
        self._tell()
        return begin

    def _heard(self) -> bool:
        """Do what the supervisor says; return False if it is gone."""
        assert self._connection is not None
        try:
            packet = self._connection.recv(PACKET_BYTES)
            message = msgspec.msgpack.decode(packet, type=Leave) if packet else None
        except (OSError, msgspec.DecodeError):
            message = None
        if message is None:
            return False
        self._leave(message)
        return True

    def _leave(self, message: Leave) -> None:
        with self._lock:
            self._is_leaving = True
            if self._worker is not None:
                self._worker.leave(message.limit_s, waits=message.waits)

    def _let_go(self) -> float:
        """Return for how long the worker goes on without a supervisor. It ends now if it is not
        ready or leaves.
        """
        with self._lock:
            connection, self._connection = self._connection, None
            begin, told = self._begin, self._told
        assert connection is not None
        assert begin is not None
        connection.close()
        if not told.ready or self._is_leaving or begin.orphan_s <= 0:
            _end(1)
        return begin.orphan_s

    def _make_way(self) -> None:
        """End this process, in order if that does not take long."""
        with self._lock:
            self._is_leaving = True
            if self._worker is not None:
                self._worker.leave(0.0)
        if self._told.ready:
            threading.Event().wait(END_S)
        _end(1)


def _write_nowhere() -> None:
    """Close a terminal or pipe of the supervisor that is gone, because its reader would wait for
    this process. Files stay open.
    """
    with Path(os.devnull).open("wb") as nothing:
        for number in (1, 2):
            if not stat.S_ISREG(os.fstat(number).st_mode):
                os.dup2(nothing.fileno(), number)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    WorkerProgram(socket.socket(fileno=int(sys.argv[1]))).run()
