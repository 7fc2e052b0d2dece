"""Reads files that another process lends, in checked pieces.

A file is read in the pieces by which it was hashed, into a few places in memory, some pieces ahead
of the reader. A piece is given away only if its checksum is the one that was made when the lender's
file was hashed. Owns these places until `close`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from mooncake.base import CheckpointError
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.messages import LentFile
from mooncake.model.checkpoint.files.revision import PIECE_BYTES, SUM_BYTES, sum_of
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.router import RoutedTransfer

NUM_PLACES = 12
"""Pieces in memory. Those who read go through a few parts of a file side by side: tensors of one
layer, the words and the factors of one weight.
"""
NUM_AHEAD = 2
"""Pieces of a file that are read ahead: one comes while the one before is checked."""
LOST_S = 60.0
"""A lender that was asked and sends nothing for so long is taken for lost. One that is slow is
not: many may read from it at once.
"""
_POLL_S = 0.5


class LoanEnded(CheckpointError):
    """Weights that were lent cannot be read any more."""


class _State(Enum):
    COMING = auto()
    HERE = auto()
    """The piece has arrived and is not checked yet."""
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
        self._num_arrived = 0.0
        """The bytes that had arrived at the last look, also of pieces that are not whole."""
        self._silent_s = 0.0
        """How long threads have waited since then; other time does not count."""
        self._error: LoanEnded | None = None
        self._num_reading = 0
        """Threads in `read`."""
        self._count = 0

    def read(self, file: int, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of a file. A place is kept for as long as somebody holds bytes
        of it; when many are kept so, copies are returned.

        Raises:
            LoanEnded: they do not come, or are not what the revision stands for.
        """
        with self._changed:
            self._num_reading += 1
        try:
            return self._read(file, begin, end)
        finally:
            with self._changed:
                self._num_reading -= 1
                self._changed.notify_all()

    def _read(self, file: int, begin: int, end: int) -> memoryview:
        if end > self._files[file].num_bytes:
            raise LoanEnded(f"{self._lender} lends fewer bytes of {self._files[file].name}")
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
        """Stop holding a place. Any thread may call this."""
        with self._changed:
            place.num_readers -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory, once threads that read have noticed."""
        with self._changed:
            self._error = LoanEnded(f"what {self._lender} lent was given back")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_reading == 0)
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
                    if place.state is _State.HERE and self._error is None:
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
        """Return the place of a piece, which is asked for if it is not here, or None if there is no
        such piece, or no place for it now.
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
            batch = TransferBatch(op=Op.READ, peer=self._segment, ops=[operation])
            if not self._coming:
                self._silent_s = 0.0
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
        self._look_silent(_POLL_S if not ended else 0.0)
        self._changed.notify_all()
        if self._error is not None:
            raise self._error

    def _look_silent(self, waited_s: float) -> None:
        """Take the lender for lost if nothing has arrived for too long."""
        counters = self._transfer.counters()
        arrived = sum(count for name, count in counters.items() if name.endswith("_bytes"))
        is_silent = waited_s > 0 and arrived == self._num_arrived
        self._num_arrived = arrived
        self._silent_s = self._silent_s + waited_s if is_silent else 0.0
        if self._silent_s >= LOST_S and self._error is None:
            self._error = LoanEnded(
                f"{self._lender} lends no more: it has sent nothing for {LOST_S:.0f} s"
            )
