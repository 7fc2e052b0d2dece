"""Lets other workers of the cluster read the files of an engine's weights, while it serves or
sleeps: files of this machine, mapped and registered for reading at a transfer engine of their own.

There is one lender for a process. It lends the weights that the engine serves, and those that an
engine that sleeps has checked to serve them next. Loans go on through the lives of its workers, for
as long as these weights are meant. Owns the transfer engine of each revision, which is opened when
somebody asks first, and a thread for as long as there is a question. The bytes of the files lie in
the page cache. TCP sends them from there. NICs get windows only, into which pieces are copied: they
would pin all files in memory, and could write to them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mooncake.base import MonotonicClock, MooncakeError, SystemIds
from mooncake.base.messages import BorrowWeights, LentFile, WeightsLent
from mooncake.identity.credential import Credential
from mooncake.model.checkpoint.files.checkpoint_files import plain_weights
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import (
    PIECE_BYTES,
    file_digests,
    piece_sums,
    pieces_of,
    weights_revision,
)
from mooncake.rpc.channel import Channel
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.file_memory import FileMemory
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.staging.slots import StagingLimits

_log = logging.getLogger(__name__)

RDMA = "rdma"
MAX_LOOPS = 8
"""Threads that send what is lent, each to some of the ranks that read; no more than cores."""
MAX_WINDOWS = 24
"""Pieces in windows for NICs: three for each of eight ranks, as many as they ask for."""
MAX_COPIES = 32
"""Threads that copy pieces to windows; no more than cores."""
MAX_CHECKED = 2
"""Weights that are lent beside those that are served: the last that were checked."""
MAX_ASKERS = 64
"""Workers that wait for an answer. Others are refused, and ask another engine or read files."""


def ways(config: TransferConfig) -> Sequence[TransferConfig]:
    """Return the settings of transfer engines for weights, for a worker with this one; the first
    that can be opened serves. A NIC may refuse to pin the memory that it needs.
    """
    limits = StagingLimits(
        slot_bytes=PIECE_BYTES, num_slots=0, num_windows=MAX_WINDOWS, compares=False
    )
    by_tcp = dataclasses.replace(config, protocols=["tcp"], staging=limits)
    if RDMA not in config.protocols:
        return [by_tcp]
    return [dataclasses.replace(by_tcp, protocols=[RDMA, "tcp"]), by_tcp]


@dataclasses.dataclass
class _Offer:
    """Weights that may be lent, and what is registered for that; None: nobody has asked yet."""

    path: Path
    transfer: RoutedTransfer | None = None
    files: list[LentFile] = dataclasses.field(default_factory=list)


class WeightsLender:
    """Answers `BorrowWeights` for the workers of one process until `close`. Any thread may
    use it.
    """

    def __init__(
        self, worker_id: str, config: TransferConfig, credential: Credential, cache_dir: str | None
    ) -> None:
        """`config` is that of the worker's own transfer engine. `cache_dir` keeps the digests of
        files.
        """
        self._worker_id = worker_id
        self._num_cores = os.cpu_count() or 1
        config = dataclasses.replace(config, num_io_threads=min(MAX_LOOPS, self._num_cores))
        self._ways = ways(config)
        self._credential = credential
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        """None between two workers."""
        self._askers: dict[str, BorrowWeights] = {}
        self._thread: threading.Thread | None = None
        self._offers: dict[str, _Offer] = {}
        """The offers by their revision: of the weights that are served, then of those that were
        checked, the last at the end.
        """

    def serve(self, channel: Channel, revision: str, path: Path) -> None:
        """Lend the weights `revision` in the directory `path` from now on, and no others. `channel`
        is that of the process' next worker.
        """
        with self._lock:
            kept = self._offers.get(revision)
            if kept is None or kept.transfer is None:
                kept = _Offer(path)
            ended = [each for each in self._offers.values() if each is not kept]
            self._offers = {revision: kept}
            self._channel = channel
        _end(ended)

    def offer(self, revision: str, path: Path) -> None:
        """Lend these weights, too: from this directory, unless they are lent already. If there are
        too many such offers, the oldest are withdrawn.
        """
        with self._lock:
            served = next(iter(self._offers), "")
            known = self._offers.get(revision)
            if known is None or known.transfer is None:
                known = _Offer(path)
            if revision == served:
                self._offers[revision] = known
                return
            self._offers.pop(revision, None)
            self._offers[revision] = known  # the last
            checked = [each for each in self._offers if each != served]
            ended = [self._offers.pop(each) for each in checked[:-MAX_CHECKED]]
        _end(ended)

    def leave(self) -> None:
        """Stop answering, because the worker ends. Weights that are lent stay lent."""
        with self._lock:
            self._channel = None
            self._askers.clear()

    def close(self) -> None:
        """End what is lent: workers that read it read something else from now on."""
        self.leave()
        with self._lock:
            ended, self._offers = list(self._offers.values()), {}
        _end(ended)

    def ask(self, question: BorrowWeights) -> None:
        """Answer a worker, at once or after the files were hashed."""
        with self._lock:
            if self._channel is None:
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

    def _answer_all(self) -> None:
        while True:
            with self._lock:
                if not self._askers:
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
                if self._channel is not None:
                    self._channel.send(question.asker.address, answer)

    def _lent(self, question: BorrowWeights) -> WeightsLent:
        """Return where the files are, registered for reading."""
        with self._lock:
            offer = self._offers.get(question.revision)
            served = next(iter(self._offers), "")
        if offer is None:
            return self._refusal(question, f"it serves revision {served}")
        if offer.transfer is None:
            contents = [content for content in plain_weights(offer.path) if content.num_bytes]
            if not contents:
                return self._refusal(question, "it has no plain files of its weights")
            # The sums first: who hashes for them finds digests, too, and those must be right below.
            sums = piece_sums(contents, self._cache_dir)
            digests = file_digests(contents, self._cache_dir)
            config = (offer.path / "config.json").read_bytes()
            if weights_revision(config, digests) != question.revision:
                return self._refusal(question, f"{offer.path} has other weights by now")
            transfer, files = self._registered(contents, digests, sums)
            with self._lock:
                is_meant = self._offers.get(question.revision) is offer
                if is_meant:
                    offer.transfer, offer.files = transfer, files
            if not is_meant:
                transfer.close()
                return self._refusal(question, "it ends")
        _log.info("weights are lent to a worker at %s", question.asker.address.partition("#")[0])
        assert offer.transfer is not None
        return WeightsLent(
            asker=question.asker,
            ticket=question.ticket,
            lender=self._worker_id,
            segment=offer.transfer.segment,
            files=offer.files,
        )

    def _registered(
        self, contents: list[PlainBytes], digests: dict[str, str], sums: dict[str, bytes]
    ) -> tuple[RoutedTransfer, list[LentFile]]:
        """Return a transfer engine by which these files can be read, and where they are there."""
        for way in self._ways:
            try:
                transfer, regions = self._open(way, contents)
                break
            except MooncakeError as error:
                if way is self._ways[-1]:
                    raise
                _log.warning("weights are lent by TCP only: %s", error.message)
        return transfer, [
            LentFile(
                name := content.path.name, content.num_bytes, region, digests[name], sums[name]
            )
            for content, region in zip(contents, regions, strict=True)
        ]

    def _open(
        self, way: TransferConfig, contents: list[PlainBytes]
    ) -> tuple[RoutedTransfer, list[int]]:
        """Return a transfer engine, and the regions of these files there."""
        sizes = [content.num_bytes for content in contents]
        limits = dataclasses.replace(
            way.staging, slot_bytes=min(PIECE_BYTES, max(sizes)),
            num_windows=min(MAX_WINDOWS, sum(len(pieces_of(size)) for size in sizes)),
        )  # fmt: skip
        transfer = open_transfer(
            dataclasses.replace(way, staging=limits), SystemIds().hex(8), MonotonicClock(),
            credential=self._credential,
        )  # fmt: skip
        try:
            views = [content.read(0, content.num_bytes) for content in contents]
            if RDMA not in way.protocols:
                return transfer, [
                    transfer.register(view, "weights", read_only=True).region_id for view in views
                ]
            copies = ThreadPoolExecutor(min(MAX_COPIES, self._num_cores), "lend-weights-copy")
            transfer.add_closer(copies.shutdown)
            memories = [FileMemory(view, copies) for view in views]
            return transfer, [
                transfer.register_device(memory, "weights", read_only=True).region_id
                for memory in memories
            ]
        except BaseException:
            transfer.close()
            raise

    def _refusal(self, question: BorrowWeights, reason: str) -> WeightsLent:
        return WeightsLent(
            asker=question.asker, ticket=question.ticket, lender=self._worker_id, error=reason
        )


def _end(offers: Iterable[_Offer]) -> None:
    for offer in offers:
        if offer.transfer is not None:
            offer.transfer.close()
