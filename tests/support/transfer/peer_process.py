"""A second process with a transfer engine, told what to do over a pipe.

All are forked from one process that has imported the engine: a fresh interpreter for each would
take most of the time of the tests that use them, above all on an emulated machine.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mooncake.base.clock import MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, Region, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from tests.support import forks

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "mooncake.transfer.rdma.backend"])


class PeerProcess:
    """One child process; `stop` ends it whatever state it is in."""

    segment: SegmentRef

    def __init__(
        self, protocols: list[str], *, secret: str = "secret", engine_id: str = "peer"
    ) -> None:
        config = TransferConfig(secret=secret, host="host", protocols=protocols)
        self._pipe, theirs = _FORKS.Pipe()
        self._child = _FORKS.Process(target=_serve, args=(config, engine_id, theirs), daemon=True)
        forks.start(self._child)
        theirs.close()
        self.segment = self.ask("segment")

    @property
    def pid(self) -> int:
        assert self._child.pid is not None
        return self._child.pid

    def ask(self, verb: str, *values: Any) -> Any:
        """Have the child call its method `verb` and return its answer.

        Raises AssertionError when the child has died.
        """
        try:
            self._pipe.send((verb, values))
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise AssertionError(f"the peer process died on {verb}") from error

    def allocate(self, num_bytes: int) -> int:
        """Return the id of new memory of the child."""
        region: int = self.ask("allocate", num_bytes)
        return region

    def get(self, region: int, offset: int, num_bytes: int) -> bytes:
        """Read the child's memory from within."""
        data: bytes = self.ask("get", region, offset, num_bytes)
        return data

    def digest(self, region: int) -> str:
        """Return the digest of a whole region of the child."""
        text: str = self.ask("digest", region)
        return text

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop the child's threads; returns when they stand still."""
        self.signal(signal.SIGSTOP)
        while not _is_stopped(self.pid):
            os.sched_yield()

    def resume(self) -> None:
        """Let a paused child go on."""
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the child and wait for it."""
        self._child.kill()
        self._child.join()
        self._pipe.close()


def digest_of(data: bytes | memoryview) -> str:
    """Return what `PeerProcess.digest` returns for the same bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _is_stopped(pid: int) -> bool:
    """Whether every thread of a process has the state T (stopped)."""
    states = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(each.read_text().rpartition(") ")[2][0] == "T" for each in states)


class _Server:
    """The child's side: what it can be asked for."""

    def __init__(self, config: TransferConfig, engine_id: str) -> None:
        self._lines: list[str] = []
        keeper = logging.Handler()
        keeper.emit = lambda record: self._lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mooncake").addHandler(keeper)
        self.transfer = open_transfer(config, engine_id, MonotonicClock())
        self._regions: dict[int, Region] = {}
        self._source: Region | None = None
        self._num_written = 0
        self._error: str | None = None

    def segment(self) -> SegmentRef:
        return self.transfer.segment

    def log(self) -> list[str]:
        return self._lines

    def allocate(self, num_bytes: int) -> int:
        return self._keep(self.transfer.allocate(num_bytes, "peer memory"))

    def register(self, num_bytes: int) -> int:
        return self._keep(self.transfer.register(memoryview(bytearray(num_bytes)), "plain"))

    def _keep(self, region: Region) -> int:
        self._regions[region.region_id] = region
        return region.region_id

    def keep_writing(self, segment: SegmentRef, remote: int, num_bytes: int, grant: int) -> None:
        """Write 0xff bytes to another's memory again and again, until that fails."""
        if self._source is None:
            self._source = self.transfer.allocate(num_bytes, "source")
            self._source.buffer[:] = b"\xff" * num_bytes
        self._num_written, self._error = 0, None
        ops = [TransferOp(self._source.region_id, 0, remote, 0, num_bytes)]
        batch = TransferBatch(op=Op.WRITE, peer=segment, ops=ops, grant=grant)
        threading.Thread(target=self._write_on, args=(batch,), daemon=True).start()

    def _write_on(self, batch: TransferBatch) -> None:
        while self._error is None:
            self.transfer.submit(batch)
            [done] = self.transfer.wait()
            self._num_written += done.error is None
            self._error = done.error

    def written(self) -> tuple[int, str | None]:
        """Return how often that went well, and why it failed at last."""
        return self._num_written, self._error

    def unregister(self, region: int) -> None:
        self.transfer.unregister(self._regions[region])

    def digest(self, region: int) -> str:
        return digest_of(self._regions[region].buffer)

    def get(self, region: int, offset: int, num_bytes: int) -> bytes:
        return bytes(self._regions[region].buffer[offset : offset + num_bytes])


def _serve(config: TransferConfig, engine_id: str, pipe: Connection) -> None:
    """Answer until the pipe is closed."""
    server = _Server(config, engine_id)
    while True:
        try:
            verb, values = pipe.recv()
        except EOFError:
            break
        pipe.send(getattr(server, verb)(*values))
    server.transfer.close()
