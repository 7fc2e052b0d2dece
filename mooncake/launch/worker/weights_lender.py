"""Lets other workers of the cluster read the files of the weights that an engine serves, while it
serves: files of this machine, mapped and registered for reading at a transfer engine of their own.

Owns that engine, which is opened when somebody asks first, and a thread for as long as there is a
question. The bytes of the files lie in the page cache: lending takes no memory of the worker. By
TCP only, because a NIC would pin all files in memory.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncake.base import MonotonicClock, MooncakeError, SystemIds
from mooncake.base.messages import BorrowWeights, LentFile, WeightsLent
from mooncake.identity import Credential
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import file_digests, piece_sums
from mooncake.rpc.channel import Channel
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.router import RoutedTransfer

_log = logging.getLogger(__name__)

MAX_ASKERS = 64
"""Workers that wait for an answer. Others are refused, and ask another engine or read files."""


def over_tcp(config: TransferConfig) -> TransferConfig:
    """Return the settings of a transfer engine for weights."""
    return dataclasses.replace(config, protocols=["tcp"])


class WeightsLender:
    """Answers `BorrowWeights` for one worker until `close`. From any thread."""

    def __init__(
        self,
        revision: str,
        contents: Callable[[], Sequence[PlainBytes]],
        worker_id: str,
        channel: Channel,
        config: TransferConfig,
        credential: Credential,
        cache_dir: str | None,
    ) -> None:
        """`contents` returns the files of the weights `revision`; none if they are not plain files
        of this machine. `config` is that of the worker's own transfer engine. `cache_dir` keeps the
        digests of files.
        """
        self._revision = revision
        self._contents = contents
        self._worker_id = worker_id
        self._channel = channel
        self._open: Callable[[], RoutedTransfer] = lambda: open_transfer(
            over_tcp(config), SystemIds().hex(8), MonotonicClock(), credential=credential
        )
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._lock = threading.Lock()
        self._askers: dict[str, BorrowWeights] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._transfer: RoutedTransfer | None = None
        self._files: list[LentFile] = []

    def ask(self, question: BorrowWeights) -> None:
        """Answer a worker, at once or after the files were hashed."""
        with self._lock:
            if self._closed:
                return
            if len(self._askers) >= MAX_ASKERS:
                refusal = self._refusal(question, f"{MAX_ASKERS} others wait for its answer")
                self._channel.send(question.asker.address, refusal)
                return
            self._askers[question.asker.address] = question
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._answer_all, name="lend-weights", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End what is lent: workers that read it read something else from now on."""
        with self._lock:
            self._closed = True
            self._contents = tuple  # it may hold the model
            transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _answer_all(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._askers:
                    self._thread = None
                    return
                question = self._askers.pop(next(iter(self._askers)))
            try:
                answer = self._lent(question)
            except Exception as problem:  # whatever it is, the worker serves on
                reason = problem.message if isinstance(problem, MooncakeError) else repr(problem)
                _log.warning("weights cannot be lent to %s: %s", question.asker.address, reason)
                answer = self._refusal(question, reason)
            with self._lock:
                if not self._closed:  # then the channel is open
                    self._channel.send(question.asker.address, answer)

    def _lent(self, question: BorrowWeights) -> WeightsLent:
        """Return where the files are, registered for reading."""
        if self._revision != question.revision:
            return self._refusal(question, f"it serves revision {self._revision}")
        contents = [content for content in self._contents() if content.num_bytes]
        if not contents:
            return self._refusal(question, "it has no plain files of its weights")
        with self._lock:
            transfer = self._transfer
        if transfer is None:
            digests = file_digests(contents, self._cache_dir)
            sums = piece_sums(contents, self._cache_dir)
            transfer = self._open()
            try:
                self._files = [
                    LentFile(
                        content.path.name,
                        content.num_bytes,
                        transfer.register(
                            content.read(0, content.num_bytes), "weights", read_only=True
                        ).region_id,
                        digests[content.path.name],
                        sums[content.path.name],
                    )
                    for content in contents
                ]
            except BaseException:
                transfer.close()
                raise
            with self._lock:
                closed = self._closed
                self._transfer = None if closed else transfer
            if closed:
                transfer.close()
                return self._refusal(question, "it ends")
        _log.info("weights are lent to a worker at %s", question.asker.address.partition("#")[0])
        return WeightsLent(
            asker=question.asker,
            ticket=question.ticket,
            lender=self._worker_id,
            segment=transfer.segment,
            files=self._files,
        )

    def _refusal(self, question: BorrowWeights, reason: str) -> WeightsLent:
        return WeightsLent(
            asker=question.asker, ticket=question.ticket, lender=self._worker_id, error=reason
        )
