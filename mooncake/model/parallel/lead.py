"""The lead's links to its followers: a socket pair and a process each, and the thread that watches
them. What the lead says, and when all end, `engine.ranks` decides.

A follower has that socket pair: it hears what to compute and what KV to move, says once that it has
loaded and how each move ended, and both see at once when the other's process is gone. One that is
there and stands still gives no sign of life any more.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
import torch

from mooncake.base import CheckpointError, InternalError
from mooncake.base.vital_thread import VitalThread
from mooncake.engine.plan import LayerDone
from mooncake.engine.ranks.kv_moves import (
    Alive,
    GuessHeard,
    OfRank,
    Opened,
    Progress,
    RankWord,
    Written,
    decode_answer,
)
from mooncake.engine.ranks.rank_group import SIGN_S, SILENT_S, LeadRanks
from mooncake.engine.ranks.step_log import Ahead, Measure, RankMessage, UsePages, encode
from mooncake.model.parallel.group import Group, GroupError
from mooncake.transfer.net.blocking import receive, send

_log = logging.getLogger(__name__)

END_S = 5.0
"""How long a follower may take to end before it is killed."""


Found = TypeVar("Found")


class Loaded(msgspec.Struct, frozen=True):
    """A follower holds its part of the model, or why it cannot."""

    error: str = ""


class RankProcess(Protocol):
    """The process of a follower."""

    def kill(self) -> None:
        """End it at once. No error where it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; raises when it has not ended in time."""


class Lead:
    """All followers of an instance, seen from its lead rank."""

    def __init__(
        self,
        group: Group,
        sockets: Sequence[socket.socket],
        processes: Sequence[RankProcess],
        timeout_s: float,
        silent_s: float = SILENT_S,
        stage_ranks: int | None = None,
    ) -> None:
        """`sockets` and `processes` of the ranks from 1 on; `timeout_s`: of an exchange;
        `silent_s`: for how long a follower may give no sign of life; `stage_ranks`: of each stage;
        None: there is one.
        """
        self.group = group
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self._sockets = list(sockets)
        self._processes = list(processes)
        self.ranks = LeadRanks(self)
        """What all are told of steps, and why they have ended."""
        self._lock = threading.Lock()
        self._closed = False
        self._on_lost: Callable[[], None] = lambda: None
        self._on_answer: Callable[[OfRank | LayerDone], None] = lambda _: None
        self._sending = threading.RLock()
        """Steps, moves and signs are told by three threads."""
        self._opened: queue.SimpleQueue[tuple[int, Opened] | None] = queue.SimpleQueue()
        """What followers answered to the last `use_pages`; None: one is lost."""
        self._stage_ranks = stage_ranks or group.size
        self._progress: list[Progress] = [(0, 0)] * (group.size // self._stage_ranks)
        """How far each stage is in what it computes, as this rank knows; its own, the last, first,
        then backwards, as ranks are numbered.
        """
        self._num_guesses = 0
        self._guesses_heard = [0] * len(self._sockets)
        """How many of the steps begun ahead each follower has heard of."""
        self._hearing = threading.Condition()
        for each in self._sockets:
            each.settimeout(timeout_s)
        self._watch, self._bell = socket.socketpair()
        self._watcher = VitalThread(self._watch_all, "rank-watch")
        self._ending = threading.Event()
        self._signing = VitalThread(self._give_signs, "lead-signs")

    @property
    def num_stages(self) -> int:
        """Of this instance."""
        return len(self._progress)

    def wait_until_loaded(self) -> None:
        """Return when all followers have loaded; from then on they are watched.

        Raises:
            CheckpointError: one cannot load.
            InternalError: one ended.
        """
        for rank, each in enumerate(self._sockets, 1):
            each.settimeout(None)  # as long as its files take; its end is seen
            try:
                answer = receive(each)
            except OSError as error:
                answer, why = None, f": {error}"
            else:
                why = ""
            if answer is None:
                self.close()
                raise InternalError(f"rank {rank} ended while it loaded its part{why}")
            error_text = msgspec.msgpack.decode(answer, type=Loaded).error
            if error_text:
                self.close()
                raise CheckpointError(f"rank {rank}: {error_text}")
            each.settimeout(self._timeout_s)
        self._watcher.start()
        self._signing.start()

    def use_pages(self, pages: UsePages, descriptor: int | None = None) -> list[Opened]:
        """Have all followers compute over the memory behind `descriptor`, or over memories of their
        own; return when they can, and where peers reach the latter, rank by rank.

        Raises:
            InternalError: one cannot, or ended.
        """
        self._progress = [(0, 0)] * len(self._progress)
        found: dict[int, Opened] = {}
        with self._meeting():
            with self._sending:  # nothing comes between the two
                self.ranks.use_pages(pages)
                if descriptor is not None:
                    for each in self._sockets:
                        socket.send_fds(each, [b"\0"], [descriptor])
            while pages.own and len(found) < len(self._sockets):
                answer = self._opened.get()
                if answer is None:
                    raise InternalError(f"{self.lost}")
                rank, opened = answer
                if opened.error:
                    self.fail(f"rank {rank}: {opened.error}")
                    raise InternalError(f"{self.lost}")
                found[rank] = opened
        return [found[rank] for rank in sorted(found)]

    def tell_rank(self, rank: int, word: RankWord) -> None:
        """Send a word to one follower. From any thread; a follower that has gone is found lost."""
        try:
            with self._sending:
                send(self._sockets[rank - 1], encode(word))
        except OSError as error:
            self.fail(f"rank {rank} of this model does not listen: {error}")

    def begin_step(self) -> None:
        """This rank begins to compute the next step that it told."""
        self._progress[0] = (self._progress[0][0] + 1, 0)

    def reached(self, num_layers: int) -> None:
        """So many layers of that step lie in this rank's pages, and in those of stages before."""
        self._progress[0] = (self._progress[0][0], num_layers)

    def progress_of(self, rank: int) -> Progress:
        """How far a rank is in what it computes, at least: a stage has what those behind it have
        got from it. From any thread.
        """
        return max(self._progress[: rank // self._stage_ranks + 1])

    def measure(self, asked: Measure, own: Callable[[], Found]) -> Found:
        """Have all followers measure their memory, and this rank, by `own`, with them; return what
        it returns.

        Raises:
            InternalError: one cannot, or ended.
        """
        with self._meeting():
            self.tell(asked)
            return own()

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Have every rank check that it holds pages of these sequences alone, as many as this one
        thinks. No step may be running.

        Raises:
            AssertionError: this rank thinks that others hold more.
            InternalError: another holds something else, or ended.
        """
        with self._meeting():
            self.ranks.check_integrity(sequences)

    def ahead(self, tokens: torch.Tensor) -> None:
        """Have all followers begin the decode step after the last, on `tokens` [slots] int64, which
        that step sampled. Waits for no device.

        Raises:
            GroupError: a rank was lost.
        """
        self._num_guesses += 1
        self.tell(Ahead())
        self.group.gather(tokens)

    def wait_until_guesses_are_heard(self) -> None:
        """Return when all followers have heard of every step begun ahead. A peer that is told only
        then where to write finds each of them waiting for its own.

        Raises:
            InternalError: a rank was lost.
        """
        with self._hearing:
            self._hearing.wait_for(
                lambda: (
                    self.lost is not None
                    or self._closed
                    or min(self._guesses_heard) >= self._num_guesses
                )
            )
        if self.lost is not None or self._closed:
            raise InternalError(self.lost or "the ranks of this model are closed")

    def watch(
        self, on_lost: Callable[[], None], on_answer: Callable[[OfRank | LayerDone], None]
    ) -> None:
        """Have `on_lost` called, in any thread, when a rank is lost, and `on_answer` with what a
        follower answers, or that layers of its stage are written.
        """
        self._on_lost, self._on_answer = on_lost, on_answer

    @property
    def lost(self) -> str | None:
        """Why this instance cannot go on; None: it can."""
        return self.ranks.lost

    def fail(self, why: str) -> None:
        """End all ranks: `why` is what the lead's runner says. Only the first call counts."""
        with self._lock:
            if not self._closed:
                self.ranks.fail(why)

    def tell(self, message: RankMessage) -> None:
        """Send to all followers, in order."""
        data = encode(message)
        with self._sending:
            for each in self._sockets:
                send(each, data)

    def end(self) -> None:
        """End all followers at once, and have the runner hear of it."""
        self.group.fail()
        for process in self._processes:
            process.kill()
        self._opened.put(None)
        with self._hearing:
            self._hearing.notify_all()
        self._on_lost()

    def close(self) -> None:
        """End all followers and wait for their processes. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._hearing:
            self._hearing.notify_all()
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")
        self._ending.set()
        for thread in (self._watcher, self._signing):
            if thread.is_alive():
                thread.join(END_S)
        for each in (*self._sockets, self._watch, self._bell):
            each.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except Exception:  # whatever a process calls its timeout
                process.kill()
                process.wait(END_S)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Wait for all ranks, once they have been told something; InternalError: one is lost."""
        try:
            yield
            self.group.meet()
        except (OSError, GroupError) as error:
            self.fail(f"the ranks of this model do not meet: {error}")
            raise InternalError(f"{self.lost}") from error

    def _give_signs(self) -> None:
        """Show the followers that this process goes on."""
        while not self._ending.wait(SIGN_S):
            try:
                self.tell(Alive())
            except OSError as error:  # one has gone, or takes nothing: who watches them ends it
                _log.warning("the followers get no more signs of their lead: %s", error)
                return

    def _watch_all(self) -> None:
        """Hear what followers answer, until the first of them goes, or falls silent."""
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        ranks = {each.fileno(): rank for rank, each in enumerate(self._sockets, 1)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        while self.lost is None:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * self._silent_s / 10)]
            if self._watch.fileno() in ready:
                return
            for descriptor in ready:
                if not self._hear(ranks[descriptor]):
                    with self._lock:
                        if not self._closed:
                            self.ranks.gone(ranks[descriptor])
                    return
            with self._lock:
                if not self._closed:
                    self.ranks.check_signs(time.monotonic(), self._silent_s)

    def _hear(self, rank: int) -> bool:
        """Take one answer of a follower; return False where it has gone."""
        try:
            data = receive(self._sockets[rank - 1])
        except OSError:
            return False
        if data is None:
            return False
        answer = decode_answer(data)
        if isinstance(answer, Alive):
            self.ranks.alive(rank, time.monotonic())
        elif isinstance(answer, GuessHeard):
            with self._hearing:
                self._guesses_heard[rank - 1] += 1
                self._hearing.notify_all()
        elif isinstance(answer, Opened):
            self._opened.put((rank, answer))
        elif isinstance(answer, Written):
            self._progress[rank // self._stage_ranks] = answer.progress
            self._on_answer(LayerDone(step_id=answer.step_id, layer=answer.progress[1] - 1))
        else:
            self._on_answer(OfRank(rank, answer))
        return True
