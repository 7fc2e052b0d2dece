"""Reads the weights of a running engine instead of files: the other side of `weights_lender`.

The digests of the lender's files must make the revision that is wanted. A file is read in the
pieces by which it was hashed, into a few places in memory, some pieces ahead of who reads. A piece
is given away only if its checksum is the one that was made when the lender's file was hashed. Owns
a transfer engine and these places until `close`.
"""

from __future__ import annotations

import dataclasses
import logging
import select
import threading
import time
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

import numpy as np

from mooncake.base import MonotonicClock, MooncakeError, SystemIds, WorkerRef, format_bytes
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.messages import (
    AskCluster,
    BorrowWeights,
    ClusterTold,
    LentFile,
    Refused,
    WeightsLent,
)
from mooncake.base.rights import client_id
from mooncake.identity import Credential
from mooncake.launch.worker.weights_lender import over_tcp
from mooncake.model.checkpoint.files.checkpoint_files import LentFiles, LoanEnded
from mooncake.model.checkpoint.files.revision import (
    PIECE_BYTES,
    SUM_BYTES,
    sum_of,
    weights_revision,
)
from mooncake.model.checkpoint.files.statements import FILE_NAME
from mooncake.rpc.channel import PeerEnded
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.router import RoutedTransfer

_log = logging.getLogger(__name__)

NUM_PLACES = 12
"""Pieces in memory. Those who read go through a few parts of a file side by side: tensors of one
layer, the words and the factors of one weight.
"""
NUM_AHEAD = 2
"""Pieces of a file that are read ahead: one comes while the one before is checked."""
ASK_AGAIN_S = 0.5
ANSWER_S = 5.0
"""A gateway tells by then which engines there are."""
LEND_S = 120.0
"""An engine that was asked lends by then: it may have to hash its files first."""
PIECE_S = 60.0
"""A piece comes within this time, or its lender is taken for lost."""
_POLL_S = 0.5


class _State(Enum):
    COMING = auto()
    HERE = auto()
    """It is not checked yet."""
    CHECKING = auto()
    CHECKED = auto()


class _Place:
    """Memory for one piece."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.key: tuple[int, int] | None = None
        """The number of the file, and of the piece in it."""
        self.state = _State.CHECKED
        self.num_readers = 0
        self.used = 0


class PieceReader:
    """Reads files of a lender in checked pieces. Any number of threads may read at once."""

    def __init__(
        self,
        transfer: RoutedTransfer,
        segment: SegmentRef,
        files: Sequence[LentFile],
        lender: str,
        num_places: int = NUM_PLACES,
    ) -> None:
        """`lender` is how messages name it."""
        self.num_bytes = 0
        """The bytes that have come."""
        self._transfer = transfer
        self._segment = segment
        self._files = files
        self._lender = lender
        self._clock = MonotonicClock()
        counts = [-(-file.num_bytes // PIECE_BYTES) for file in files]
        self._piece_bytes = min(PIECE_BYTES, max(file.num_bytes for file in files))
        num_places = min(num_places, sum(counts))
        self._region = transfer.allocate(num_places * self._piece_bytes, "borrowed weights")
        self._memory = np.frombuffer(self._region.buffer, dtype=np.uint8)
        self._places = [_Place(number * self._piece_bytes) for number in range(num_places)]
        self._here: dict[tuple[int, int], _Place] = {}
        self._coming: dict[int, _Place] = {}
        """Batch -> the place that it fills."""
        self._changed = threading.Condition()
        self._polling = False
        self._error: LoanEnded | None = None
        self._count = 0

    def read(self, file: int, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of a file. A place is kept for as long as somebody holds bytes
        of it; when many are kept so, copies are returned.

        Raises:
            LoanEnded: they do not come, or are not what the revision stands for.
        """
        first, within = divmod(begin, PIECE_BYTES)
        if begin < end <= (first + 1) * PIECE_BYTES:
            return self._view(self._hold((file, first)), within, end - begin)
        out = np.empty(end - begin, dtype=np.uint8)
        at = begin
        while at < end:
            piece, within = divmod(at, PIECE_BYTES)
            stop = min(end, (piece + 1) * PIECE_BYTES)
            place = self._hold((file, piece))
            source = place.offset + within
            out[at - begin : stop - begin] = self._memory[source : source + stop - at]
            self._release(place)
            at = stop
        return out.data

    def _view(self, place: _Place, within: int, length: int) -> memoryview:
        """Return bytes of a place that is held."""
        begin = place.offset + within
        view = self._memory[begin : begin + length]
        with self._changed:
            num_kept = sum(each.num_readers > 0 for each in self._places)
        if num_kept > len(self._places) // 2:
            view = view.copy()
            self._release(place)
        else:
            weakref.finalize(view, self._release, place).atexit = False
        return view.data

    def _release(self, place: _Place) -> None:
        """Stop holding a place. From any thread."""
        with self._changed:
            place.num_readers -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory. Nobody may read any more."""
        with self._changed:
            self._error = LoanEnded(f"what {self._lender} lent was given back")
            self._memory = np.empty(0, dtype=np.uint8)
        self._transfer.unregister(self._region)
        del self._region

    def _hold(self, key: tuple[int, int]) -> _Place:
        """Return the place of a checked piece; it keeps the piece until it has no readers."""
        with self._changed:
            while (place := self._asked(key)) is None:
                self._wait()
            place.num_readers += 1
            try:
                for ahead in range(1, NUM_AHEAD + 1):
                    self._asked((key[0], key[1] + ahead))
                while place.state is not _State.CHECKED:
                    if place.state is _State.HERE:
                        self._check(place, key)
                    else:
                        self._wait()
                if self._error is not None:
                    raise self._error
            except BaseException:
                place.num_readers -= 1
                raise
            return place

    def _asked(self, key: tuple[int, int]) -> _Place | None:
        """Return the place of a piece, which is asked for if it is not here; None: there is no such
        piece, or no place for it now.
        """
        if self._error is not None:
            raise self._error
        self._count += 1
        place = self._here.get(key)
        if place is None:
            number, piece = key
            begin = piece * PIECE_BYTES
            length = min(PIECE_BYTES, self._files[number].num_bytes - begin)
            free = [
                each for each in self._places
                if each.num_readers == 0 and each.state in (_State.HERE, _State.CHECKED)
            ]  # fmt: skip
            if length <= 0 or not free:
                return None
            place = min(free, key=lambda each: each.used)
            if place.key is not None:
                del self._here[place.key]
            place.key, place.state = key, _State.COMING
            self._here[key] = place
            region = self._files[number].region
            operation = TransferOp(self._region.region_id, place.offset, region, begin, length)
            batch = TransferBatch(
                op=Op.READ, peer=self._segment, ops=[operation],
                deadline_s=self._clock.now() + PIECE_S,
            )  # fmt: skip
            self._coming[self._transfer.submit(batch)] = place
        place.used = self._count
        return place

    def _check(self, place: _Place, key: tuple[int, int]) -> None:
        """Compare a piece with its checksum, without the lock."""
        number, piece = key
        file = self._files[number]
        length = min(PIECE_BYTES, file.num_bytes - piece * PIECE_BYTES)
        place.state = _State.CHECKING
        self._changed.release()
        try:
            found = sum_of(self._region.buffer[place.offset : place.offset + length])
        finally:
            self._changed.acquire()
        if found != file.sums[piece * SUM_BYTES : (piece + 1) * SUM_BYTES]:
            self._error = LoanEnded(
                f"{file.name}, bytes from {piece * PIECE_BYTES} on, came from {self._lender} with "
                "another checksum than the file had when it was hashed"
            )
        place.state = _State.CHECKED
        self._changed.notify_all()

    def _wait(self) -> None:
        """Wait until something has changed: pieces have come, or a place is free."""
        if self._error is not None:
            raise self._error
        if self._polling or not self._coming:
            self._changed.wait(_POLL_S)
            return
        self._polling = True
        self._changed.release()
        try:
            ended = self._transfer.wait(_POLL_S)
        finally:
            self._changed.acquire()
            self._polling = False
        for done in ended:
            self._coming.pop(done.batch_id).state = _State.HERE
            self.num_bytes += done.num_bytes
            if done.error is not None and self._error is None:
                self._error = LoanEnded(f"{self._lender} lends no more: {done.error}")
        self._changed.notify_all()
        if self._error is not None:
            raise self._error


class _PeerBytes:
    """The bytes of one lent file: a `FileBytes`."""

    def __init__(self, reader: PieceReader, number: int, path: Path, num_bytes: int) -> None:
        self._reader = reader
        self._number = number
        self.path = path
        self.num_bytes = num_bytes

    def read(self, begin: int, end: int) -> memoryview:
        return self._reader.read(self._number, begin, end)


class BorrowedWeights:
    """The files of a running engine's weights, to be read until `close`."""

    def __init__(
        self, lent: WeightsLent, path: Path, config: TransferConfig, credential: Credential
    ) -> None:
        """Connect to the lender. `path` is the directory of the other files of the checkpoint."""
        assert lent.segment is not None
        self.lender = lent.lender
        self._began_s = time.monotonic()
        self._transfer = open_transfer(
            over_tcp(config), SystemIds().hex(8), MonotonicClock(), credential=credential
        )
        try:
            self._reader = PieceReader(self._transfer, lent.segment, lent.files, self.lender)
        except BaseException:
            self._transfer.close()
            raise
        self.files = LentFiles(
            {
                file.name: _PeerBytes(self._reader, number, path / file.name, file.num_bytes)
                for number, file in enumerate(lent.files)
            },
            _digests(lent.files),
            self._close,
        )

    def _close(self) -> None:
        """Free the memory."""
        self._reader.close()
        self._transfer.close()
        num_bytes, took_s = self._reader.num_bytes, time.monotonic() - self._began_s
        _log.info(
            "weights: %s were read from %s, which serves them, in %.1f s",
            format_bytes(num_bytes), self.lender, took_s,
        )  # fmt: skip


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
            return f"{file.name!r:.200} is no file of weights with digests"
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
) -> BorrowedWeights | str:
    """Return the weights `revision` of an engine that `gateways` know, or why no engine lends
    them. The first engine that answers lends. `path` has the other files of the checkpoint.
    """
    try:
        config_json = (path / "config.json").read_bytes()
    except OSError as error:
        return f"{path / 'config.json'} cannot be read ({error.strerror or error})"
    own_host = config.tcp.listen.bind_host
    channel = ZmqChannel(
        own_host, credential=credential, advertise_host=config.tcp.listen.advertise_host,
        ports=config.tcp.listen.ports, tells_ends=True,
    )  # fmt: skip
    try:
        # With such an id a gateway knows that only this process is told of a refusal.
        own_id = f"{client_id(credential.certificate.channel_key.hex())}weights"
        own = WorkerRef(own_id, SystemIds().hex(8), channel.address)
        engines = _engines(channel, own, gateways)
        if not engines:
            return "no engine runs yet"
        lent = _loan(channel, own, engines, config_json, revision)
    finally:
        channel.close()
    if isinstance(lent, str):
        return lent
    # Nobody connects to an engine that only reads, so it takes no port of a range.
    listen = dataclasses.replace(config.tcp.listen, ports=None)
    config = dataclasses.replace(config, tcp=dataclasses.replace(config.tcp, listen=listen))
    try:
        return BorrowedWeights(lent, path, config, credential)
    except MooncakeError as error:
        return error.message


def _engines(channel: ZmqChannel, own: WorkerRef, gateways: Sequence[str]) -> list[WorkerRef]:
    """Return the engines that the first gateway which answers knows."""
    end_s, again_s = time.monotonic() + ANSWER_S, 0.0
    while (now_s := time.monotonic()) < end_s:
        if now_s >= again_s:
            again_s = now_s + ASK_AGAIN_S
            for address in gateways:
                channel.send(address, AskCluster(asker=own, ticket=0))
        select.select([channel], [], [], ASK_AGAIN_S)
        for message in channel.receive():
            if isinstance(message, ClusterTold) and message.asker == own:
                return message.engines
    return []


def _loan(
    channel: ZmqChannel,
    own: WorkerRef,
    engines: Sequence[WorkerRef],
    config_json: bytes,
    revision: str,
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
                else:
                    return message
                waiting.pop(message.ticket, None)
    return reason
