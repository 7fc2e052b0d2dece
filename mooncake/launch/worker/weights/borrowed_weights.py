"""Reads the weights of a running engine instead of files: the other side of `weights_lender`.

The digests of the lender's files must make the revision that is wanted. If a loan ends while it is
read, the same bytes are read on from another engine, and where none lends them from the files of
this machine. The reader notices nothing of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from mooncake.base import (
    CheckpointError,
    MonotonicClock,
    MooncakeError,
    SystemIds,
    TransferError,
    WorkerRef,
    format_bytes,
)
from mooncake.base.messages import BorrowWeights, LentFile, Refused, WeightsLent
from mooncake.crypto.keys import KeyRing
from mooncake.identity.credential import Credential
from mooncake.launch.host.seeds import ASK_AGAIN_S, Seeds
from mooncake.launch.worker.ranks.rank_moves import credential_of, on_this_machine
from mooncake.launch.worker.weights.piece_reader import LoanEnded, PieceReader
from mooncake.launch.worker.weights.weights_lender import ways
from mooncake.model.checkpoint.files.checkpoint_files import (
    CheckpointFiles,
    LentFiles,
    has_weights,
)
from mooncake.model.checkpoint.files.encryption import SUFFIX
from mooncake.model.checkpoint.files.file_bytes import FILE_NAME, FileBytes
from mooncake.model.checkpoint.files.revision import PIECE_BYTES, SUM_BYTES, weights_revision
from mooncake.model.options import ModelOptions
from mooncake.rpc.channel import PeerEnded
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.factory import TransferConfig, open_transfer

_log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""A gateway tells by then which engines there are."""
LEND_S = 120.0
"""An engine that was asked lends by then: it may have to hash its files first."""


MAX_KNOWN = 2
"""Weights whose lender a process remembers: those that it serves, and those that come next."""


class Loan(msgspec.Struct, frozen=True):
    """What an engine lends, and all that is needed to find another lender of the same weights. The
    lead of an engine gives it to its other ranks.
    """

    lent: WeightsLent
    revision: str
    gateways: list[str]
    """Addresses of gateways, which know the engines."""
    config: TransferConfig


class _Lender:
    """Files that an engine lends."""

    def __init__(self, lent: WeightsLent, config: TransferConfig, credential: Credential) -> None:
        assert lent.segment is not None
        self.name = lent.lender
        # Nobody connects to an engine that only reads, so it takes no port of a range.
        listen = dataclasses.replace(config.tcp.listen, ports=None)
        config = dataclasses.replace(config, tcp=dataclasses.replace(config.tcp, listen=listen))
        self._began_s = time.monotonic()
        for number, way in enumerate(options := ways(config), 1):
            try:
                self._open(way, lent, credential)
                break
            except MooncakeError as error:
                if number == len(options):
                    raise
                _log.warning("weights are read by TCP: %s", error.message)
        self._numbers = {file.name: number for number, file in enumerate(lent.files)}

    def _open(self, way: TransferConfig, lent: WeightsLent, credential: Credential) -> None:
        assert lent.segment is not None
        self._transfer = open_transfer(
            way, SystemIds().hex(8), MonotonicClock(), credential=credential
        )
        try:
            self._reader = PieceReader(self._transfer, lent.segment, lent.files, self.name)
        except BaseException:
            self._transfer.close()
            raise

    def read(self, name: str, begin: int, end: int) -> memoryview:
        return self._reader.read(self._numbers[name], begin, end)

    def close(self) -> None:
        """Free the memory, once nobody reads any more."""
        try:
            self._reader.close()
        except TransferError as error:  # a NIC has failed, and lets go when it is closed
            _log.warning("weights: %s", error.message)
        self._transfer.close()
        num_bytes, took_s = self._reader.num_bytes, time.monotonic() - self._began_s
        _log.info(
            "weights: %s were read from %s, which serves them, in %.1f s",
            format_bytes(num_bytes), self.name, took_s,
        )  # fmt: skip


class _Files:
    """The files of this machine."""

    def __init__(self, files: CheckpointFiles) -> None:
        # An encrypted file has the name of the plain one, with an ending.
        self._contents: Mapping[str, FileBytes] = {
            content.path.name.removesuffix(SUFFIX): content for content in files.contents
        }

    def read(self, name: str, begin: int, end: int) -> memoryview:
        return self._contents[name].read(begin, end)

    def close(self) -> None:
        """There is nothing to free: tensors may be views of the files."""


class BorrowedWeights:
    """The files of a running engine's weights, to be read until `close`. Threads may share it."""

    def __init__(
        self,
        loan: Loan,
        path: Path,
        credential: Credential,
        keys: KeyRing | None,
        cache_dir: Path | None,
    ) -> None:
        """Connect to the lender. `path` is the directory of the other files of the checkpoint. It
        may have the weights, too, encrypted if there are `keys`. `cache_dir` has digests of files.
        """
        self.loan = loan
        self._path = path
        self._credential = credential
        self._keys = keys
        self._cache_dir = cache_dir
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        """The transfer engines of lenders that are not asked again."""
        self._error: CheckpointError | None = None
        """Why nothing can be read any more."""
        self._lent = loan.lent
        self._source: _Lender | _Files | None = _Lender(loan.lent, loan.config, credential)
        """None if nothing can be read any more."""
        self.files = LentFiles(
            {
                file.name: _BorrowedBytes(self, path / file.name, file.num_bytes)
                for file in loan.lent.files
            },
            _digests(loan.lent.files),
            self.close,
        )

    def read(self, name: str, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of a file.

        Raises:
            CheckpointError: neither an engine nor this machine has them any more.
        """
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                source = self._source
            assert source is not None, "an error says why there is none"
            try:
                return source.read(name, begin, end)
            except LoanEnded as error:
                with self._lock:
                    if self._source is source and self._error is None:
                        self._go_on(source, error)

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            if self._source is not None:
                self._source.close()
                self._source = None
            self._error = CheckpointError(f"what {self._lent.lender} lent was given back")

    def _go_on(self, source: _Lender | _Files, error: LoanEnded) -> None:
        """Take another source of the same bytes in place of one that has ended."""
        assert self._lent.segment is not None
        self._ended.add(self._lent.segment.engine_id)
        source.close()
        self._source = None
        loan = self.loan
        found = borrow(
            loan.gateways, self._path, loan.revision, loan.config, self._credential,
            without=self._ended,
        )  # fmt: skip
        try:
            if isinstance(found, WeightsLent):
                self._source = _Lender(found, loan.config, self._credential)
                self._lent = found
                _log.warning("%s; the weights are read from %s", error.message, found.lender)
                return
            files = self._own_files(f"{error.message}; no other engine lends them ({found})")
            self._source = _Files(files)
        except (MooncakeError, OSError) as problem:
            self._error = CheckpointError(str(problem))
            return
        _log.warning("%s; the weights are read from %s", error.message, self._path)

    def _own_files(self, why: str) -> CheckpointFiles:
        """Return the files of this machine if they are those that were lent."""
        if not has_weights(self._path):
            raise CheckpointError(
                f"{why}; {self._path} has no weights either: start this worker again to read them "
                "from another engine, or copy them there"
            )
        files = CheckpointFiles.open(self._path, self._keys)
        revision = files.revision(self._cache_dir)
        if revision != self.loan.revision:
            raise CheckpointError(
                f"{why}; {self._path} holds other weights (revision {revision}) than those that "
                f"were lent ({self.loan.revision}): copy those there"
            )
        return files


def borrowed_by_rank(
    loan: bytes, host: str | None, model: str, keys: KeyRing | None, options: ModelOptions
) -> LentFiles:
    """Return the weights that the lead of an engine lets another of its ranks read. `host` is the
    address of this machine, if the lead is on another one.
    """
    found = msgspec.msgpack.decode(loan, type=Loan)
    credential, _ = credential_of(found.config)
    if host is not None:
        found = msgspec.structs.replace(found, config=on_this_machine(found.config, host))
    cache_dir = None if options.cache_dir is None else Path(options.cache_dir)
    return BorrowedWeights(found, Path(model), credential, keys, cache_dir).files


class Borrower:
    """Finds weights that engines lend, for one process. It remembers who lends them, so that a
    worker that comes back asks no gateway, which may know no engine then.
    """

    def __init__(
        self,
        gateways: Sequence[str],
        start: Path,
        config: TransferConfig,
        credential: Credential,
        keys: Callable[[], KeyRing | None],
        cache_dir: str | None,
    ) -> None:
        """`start` is the directory with which the process was started. `config` is that of its
        transfer engine. `keys` finds the keys of encrypted weights; `cache_dir` has digests.
        """
        self._gateways = list(gateways)
        self._start = start
        self._config = config
        self._credential = credential
        self._keys = keys
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._known: dict[str, WeightsLent] = {}
        """The last loans, by the revision of their weights."""

    def directory(self, path: Path) -> Path:
        """Return where the files beside the weights in `path` are: there, or where they were at the
        start.
        """
        return path if (path / "config.json").exists() else self._start

    def borrow(
        self, path: Path, revision: str, engines: Sequence[WorkerRef] = ()
    ) -> BorrowedWeights | str:
        """Return the weights `revision` of an engine, or why none lends them. `path` is the
        directory of the checkpoint. `engines`: those to ask; empty: who lent them before, or else
        all engines.
        """
        path = self.directory(path)
        lent: WeightsLent | str | None = None if engines else self._known.get(revision)
        if lent is None:
            lent = borrow(
                self._gateways, path, revision, self._config, self._credential, engines=engines
            )
        if isinstance(lent, str):
            return lent
        self._known.pop(revision, None)
        self._known[revision] = lent
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        loan = Loan(lent, revision, self._gateways, self._config)
        try:
            return BorrowedWeights(loan, path, self._credential, self._keys(), self._cache_dir)
        except MooncakeError as error:
            return error.message


class _BorrowedBytes:
    """The bytes of one borrowed file: a `FileBytes`."""

    def __init__(self, weights: BorrowedWeights, path: Path, num_bytes: int) -> None:
        self._weights = weights
        self.path = path
        self.num_bytes = num_bytes

    def read(self, begin: int, end: int) -> memoryview:
        return self._weights.read(self.path.name, begin, end)


def _digests(files: Sequence[LentFile]) -> dict[str, str]:
    return {file.name: file.digest for file in files}


def check_lent(lent: WeightsLent, config_json: bytes, revision: str) -> str:
    """Return why what an engine lends is not usable as the weights `revision` of a model with this
    `config.json`; empty: it is.
    """
    if lent.error or lent.segment is None:
        return lent.error or "it says not where"
    names = {file.name for file in lent.files}
    for file in lent.files:
        num_pieces = -(-file.num_bytes // PIECE_BYTES)
        if not FILE_NAME.fullmatch(file.name) or len(file.sums) != num_pieces * SUM_BYTES:
            return f"{file.name!r:.200} is not a file of weights with digests"
    if not lent.files or len(names) != len(lent.files):
        return "it names no files, or one twice"
    if weights_revision(config_json, _digests(lent.files)) != revision:
        return (
            f"its files and the config.json here are not those of the cluster's revision {revision}"
        )
    return ""


def borrow(
    gateways: Sequence[str],
    path: Path,
    revision: str,
    config: TransferConfig,
    credential: Credential,
    *,
    engines: Sequence[WorkerRef] = (),
    without: Collection[str] = (),
) -> WeightsLent | str:
    """Return the weights `revision` as an engine lends them, or why no engine does. The first one
    that answers lends, of `engines`, or of all that `gateways` know.

    path: the directory of the other files of the checkpoint. without: the transfer engines of
    lenders that are not wanted.
    """
    try:
        config_json = (path / "config.json").read_bytes()
    except OSError as error:
        return f"{path / 'config.json'} cannot be read ({error.strerror or error})"
    listen = config.tcp.listen
    place = listen.bind_host, listen.ports, listen.advertise_host
    try:
        with contextlib.closing(Seeds(gateways, credential, *place)) as seeds:
            asked = engines or _engines(seeds)
            if not asked:
                return "no engine runs yet"
            return _loan(seeds.channel, seeds.own, asked, config_json, revision, without)
    except MooncakeError as error:
        return error.message


def _engines(seeds: Seeds) -> list[WorkerRef]:
    """Return the engines that the first gateway which answers knows."""
    end_s = time.monotonic() + ANSWER_S
    while time.monotonic() < end_s:
        for told in seeds.ask():
            return told.engines
    return []


def _loan(
    channel: ZmqChannel,
    own: WorkerRef,
    engines: Sequence[WorkerRef],
    config_json: bytes,
    revision: str,
    without: Collection[str] = (),
) -> WeightsLent | str:
    """Return the first usable answer of an engine, or the reason of the last that lends nothing."""
    waiting = {ticket: engine.address for ticket, engine in enumerate(engines)}
    for ticket, address in waiting.items():
        channel.send(address, BorrowWeights(asker=own, ticket=ticket, revision=revision))
    reason, end_s = "no engine answers", time.monotonic() + LEND_S
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        select.select([channel], [], [], min(left_s, ASK_AGAIN_S))
        for message in channel.receive():
            if isinstance(message, PeerEnded):
                waiting = {each: at for each, at in waiting.items() if at != message.address}
            elif isinstance(message, Refused | WeightsLent) and message.asker == own:
                if isinstance(message, Refused):  # others may be of another release
                    reason = f"an engine refuses: {message.reason}"
                elif problem := check_lent(message, config_json, revision):
                    reason = f"{message.lender}: {problem}"
                elif message.segment is None or message.segment.engine_id in without:
                    reason = f"{message.lender}: its loan has ended once"
                else:
                    return message
                waiting.pop(message.ticket, None)
    return reason
