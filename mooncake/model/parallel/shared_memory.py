"""A group whose ranks are processes of one machine that map one memory.

Nothing listens. The memory has no name, and a rank has its descriptor from the process that started
it. A rank writes its part, announces it in a counter, and reads the parts of the others once their
counters announce them. Each rank has two places for parts and uses them in turn: a rank that has
come to one exchange has read all parts of the one before. A tensor for a single other rank lies in
that rank's inbox until it is read.

Memory that is never touched takes no space, so unused places for parts and inboxes cost nothing.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

from mooncake.base.models.parallel import divisors
from mooncake.model.parallel.group import Group, GroupError, Solo, Traffic, ordered_sum

LINE_BYTES = 64
"""Each counter has a cache line of its own, so that two ranks never share one."""
PLACE_BYTES = 8 * 2**20
"""The size of one part. Larger tensors go in pieces of rows."""
INBOX_PLACES = 8
"""The places of one inbox. A sender with more waits until some are read."""
_YIELDS = 2000
"""How often a waiting rank yields its core before it sleeps: about a millisecond."""
_SLEEP_S = 50e-6


def shared_bytes(size: int) -> int:
    """Return the bytes of memory that a group of `size` ranks maps, including those of its
    parts.
    """
    return _first_of_parts(size, 1)


def _first_of_parts(size: int, part: int) -> int:
    """Return where the memory of parts of `part` ranks begins in the memory of `size` ranks. Larger
    parts come first, all after the group's own memory.
    """
    lines = (size + 1 + 3 * size) * LINE_BYTES
    own = lines + (2 + INBOX_PLACES) * size * PLACE_BYTES
    larger = [each for each in divisors(size) if max(1, part) < each < size]
    return own + sum(size // each * shared_bytes(each) for each in larger)


class SharedGroup:
    """One rank of a group over `memory`, of `shared_bytes` bytes, zero at first.

    Tensors are on the CPU. One thread of each rank may use it; any may call `fail`.
    """

    def __init__(
        self, rank: int, size: int, memory: mmap.mmap, timeout_s: float, first: int = 0
    ) -> None:
        """timeout_s: how long the others may take to come to an exchange. first: the byte of
        `memory` where this group's begins.
        """
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.timeout_s = timeout_s
        self._num_exchanges = 0
        self._fence = threading.Lock()
        self._memory = memory
        self._first = first
        begin = first + (size + 1 + 3 * size) * LINE_BYTES
        words = memoryview(memory)[first:begin].cast("q")
        self._counters = words
        self._step = LINE_BYTES // words.itemsize
        self._failed = words[size * self._step :]
        self._written, self._read, self._signs = (
            words[(size + 1 + kind * size) * self._step :] for kind in range(3)
        )
        """For each inbox, the pieces that were written to it and the pieces that its rank has read.
        For each rank, its signs of progress.
        """
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        behind = begin + 2 * size * PLACE_BYTES
        self._places = whole[begin:behind].view(2, size, PLACE_BYTES)
        inboxes = whole[behind : behind + INBOX_PLACES * size * PLACE_BYTES]
        self._inboxes = inboxes.view(size, INBOX_PLACES, PLACE_BYTES)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`. Raises GroupError when another rank failed, or did not
        come.
        """
        pieces = [self._exchange(piece, ordered_sum) for piece in self._pieces(x)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(x.shape)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` side by side. Raises GroupError when another rank failed, or did
        not come.
        """
        pieces = [self._exchange(piece, _side_by_side) for piece in self._pieces(x)]
        made = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return made.view(*x.shape[:-1], self.size * x.shape[-1])

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts for this one. Raises GroupError when another rank failed, or did
        not come.
        """
        others = x.reshape(self.size, -1, x.shape[-1]).transpose(0, 1)
        mine = self.rank
        pieces = [
            self._exchange(piece, lambda parts: torch.stack([part[:, mine] for part in parts]))
            for piece in self._pieces(others)
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).view(x.shape)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Put `x` into the inbox of rank `to`. Raises GroupError when another rank failed."""
        line = to * self._step
        for piece in self._pieces(x):
            number = self._written[line]
            self._wait_for_sign(self._read, line, number - INBOX_PLACES + 1, to)
            self._inbox(to, number, piece).copy_(piece)
            with self._fence:
                self._written[line] = number + 1

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Write the next tensor into `out`. Raises GroupError when another rank failed."""
        line = self.rank * self._step
        for piece in self._pieces(out, sent=False):
            number = self._read[line]
            self._wait_for_sign(self._written, line, number + 1, source)
            with self._fence:
                piece.copy_(self._inbox(self.rank, number, piece))
            with self._fence:
                self._read[line] = number + 1

    def go_on(self) -> None:
        """Give a sign of progress."""
        self._signs[self.rank * self._step] += 1

    def _wait_for_sign(self, counters: memoryview[int], at: int, number: int, other: int) -> None:
        """Wait until the counter at `at` has come to `number`, as long as rank `other` gives signs.
        Raises GroupError when it gives none any more, or another rank failed.
        """
        signs, place, seen = self._signs, other * self._step, -1
        while not self._wait_until(counters, at, number, self.timeout_s):
            if signs[place] == seen:
                raise self._silent(other)
            seen = signs[place]

    def _silent(self, rank: int) -> GroupError:
        return GroupError(f"rank {rank} of this model did not answer for {self.timeout_s:.0f} s")

    def _inbox(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        num_bytes = like.numel() * like.element_size()
        place = self._inboxes[rank, number % INBOX_PLACES]
        return place[:num_bytes].view(like.dtype).view(like.shape)

    def meet(self) -> None:
        """Wait for all ranks. Raises GroupError when another rank failed, or did not come."""
        self._come()

    def part(self, size: int) -> Group:
        """Return this rank's group of `size` ranks. Its memory comes after this group's."""
        if size == self.size:
            return self
        if size == 1:
            return Solo()
        number = self.rank // size
        first = self._first + _first_of_parts(self.size, size) + number * shared_bytes(size)
        made = SharedGroup(self.rank % size, size, self._memory, self.timeout_s, first)
        made._failed = self._failed
        return made

    def fail(self) -> None:
        """Make every rank that waits, or comes later, raise an error. Any thread or process may
        call this.
        """
        self._failed[0] = 1

    def _pieces(self, x: torch.Tensor, *, sent: bool = True) -> Iterator[torch.Tensor]:
        """Yield `x` in pieces of rows that fit a place."""
        if sent:
            self.traffic.count(x)
        rows = x if x.dim() > 2 else x.reshape(-1, x.shape[-1])
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        if row_bytes > PLACE_BYTES:
            raise ValueError(f"a row of {row_bytes} bytes does not fit {PLACE_BYTES}")
        at_once = max(1, PLACE_BYTES // max(1, row_bytes))
        for first in range(0, max(1, rows.shape[0]), at_once):
            yield rows[first : first + at_once]

    def _exchange(
        self, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        places = self._places[(self._num_exchanges + 1) % 2]
        num_bytes = x.numel() * x.element_size()
        parts = places[:, :num_bytes].view(x.dtype).view(self.size, *x.shape)
        parts[self.rank].copy_(x)
        self._come()
        return make(parts)

    def _come(self) -> None:
        """Announce that this rank's part is written, and wait until all have announced theirs."""
        number = self._num_exchanges = self._num_exchanges + 1
        counters, step = self._counters, self._step
        # A lock of this process orders its writes before this point against those after it.
        with self._fence:
            counters[self.rank * step] = number
        for other in range(self.size):
            if not self._wait_until(counters, other * step, number, self.timeout_s):
                raise self._silent(other)
        with self._fence:
            return

    def _wait_until(
        self, counters: memoryview[int], at: int, number: int, timeout_s: float
    ) -> bool:
        """Wait until the counter at `at` has come to `number`. Returns False when it has not in
        time. Raises GroupError when another rank failed.
        """
        deadline_s = 0.0
        num_waits = 0
        while counters[at] < number:
            if self._failed[0]:
                raise GroupError("another rank of this model failed")
            num_waits += 1
            if num_waits < _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            deadline_s = deadline_s or now + timeout_s
            if now > deadline_s:
                return False
            self.go_on()  # other processes can now run
            time.sleep(_SLEEP_S)
        return True


def _side_by_side(parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts.unbind(0), dim=-1)
