"""The lead's links to its followers: a socket pair and a process for each, and the thread that
watches them. `engine.ranks` decides what the lead says, and when all ranks end.

Over its socket pair, a follower hears what to compute and which KV to move. It reports once that it
has loaded, and how each move ended. Both ends see at once when the other's process is gone. A
process that is stopped gives no signs of life any more.
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
from mooncake.base.threads import VitalThread
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
    """A follower holds its part of the model, or `error` says why it cannot."""

    error: str = ""


class RankProcess(Protocol):
    """The process of a follower."""

    def kill(self) -> None:
        """End the process at once; do nothing if it has ended already."""

    def wait(self, timeout: float | None = None) -> object:
        """Return once the process has ended. Raises an error if it has not ended in time."""


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
        """sockets, processes: of the ranks from 1 on. timeout_s: the limit of an exchange.
        silent_s: how long a follower may give no sign of life. stage_ranks: the number of ranks in
        each stage; None: there is one stage.
        """
        self.group = group
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self._sockets = list(sockets)
        self._processes = list(processes)
        self.ranks = LeadRanks(self)
        """Tells all followers about steps, and knows why the instance has ended."""
        self._lock = threading.Lock()
        self._closed = False
        self._on_lost: Callable[[], None] = lambda: None
        self._on_answer: Callable[[OfRank | LayerDone], None] = lambda _: None
        self._sending = threading.RLock()
        """A lock, because three threads send steps, moves and signs."""
        self._opened: queue.SimpleQueue[tuple[int, Opened] | None] = queue.SimpleQueue()
        """The followers' answers to the last `use_pages`; None: one is lost."""
        self._stage_ranks = stage_ranks or group.size
        self._progress: list[Progress] = [(0, 0)] * (group.size // self._stage_ranks)
        """The progress of each stage in its computation, as this rank knows it. Its own stage, the
        last, comes first, then the others backwards, as ranks are numbered.
        """
        self._num_guesses = 0
        self._guesses_heard = [0] * len(self._sockets)
        """How many steps begun ahead each follower has heard of."""
        self._hearing = threading.Condition()
        for each in self._sockets:
            each.settimeout(timeout_s)
        self._watch, self._bell = socket.socketpair()
        self._watcher = VitalThread(self._watch_all, "rank-watch")
        self._ending = threading.Event()
        self._signing = VitalThread(self._give_signs, "lead-signs")

    @property
    def num_stages(self) -> int:
        """The number of this instance's stages."""
        return len(self._progress)

    def wait_until_loaded(self) -> None:
        """Return when all followers have loaded. From then on they are watched.

        Raises:
            CheckpointError: one cannot load.
            InternalError: one ended.
        """
        for rank, each in enumerate(self._sockets, 1):
            each.settimeout(None)  # loading may take long; a follower's end is seen
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
        """Make all followers compute over the memory behind `descriptor`, or over memories of their
        own. Return when they can; for memories of their own, return where peers reach them, rank by
        rank.

        Raises:
            InternalError: one cannot, or ended.
        """
        self._progress = [(0, 0)] * len(self._progress)
        found: dict[int, Opened] = {}
        with self._meeting():
            with self._sending:  # no other message comes between the two
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
        """Send a message to one follower. Any thread may call this. A follower that has gone counts
        as lost.
        """
        try:
            with self._sending:
                send(self._sockets[rank - 1], encode(word))
        except OSError as error:
            self.fail(f"rank {rank} of this model does not listen: {error}")

    def begin_step(self) -> None:
        """Record that this rank begins to compute the next step that it told."""
        self._progress[0] = (self._progress[0][0] + 1, 0)

    def reached(self, num_layers: int) -> None:
        """Record that `num_layers` layers of that step are in this rank's pages, and in those of
        earlier stages.
        """
        self._progress[0] = (self._progress[0][0], num_layers)

    def progress_of(self, rank: int) -> Progress:
        """Return how far a rank has computed at least: a stage has computed what later stages have
        received. Any thread may call this.
        """
        return max(self._progress[: rank // self._stage_ranks + 1])

    def measure(self, asked: Measure, own: Callable[[], Found]) -> Found:
        """Make all followers measure their memory. This rank measures with them by `own`; return
        its result.

        Raises:
            InternalError: one cannot, or ended.
        """
        with self._meeting():
            self.tell(asked)
            return own()

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Make every rank check that it holds pages of these sequences alone, and as many as this
        rank's records say. No step may be running.

        Raises:
            AssertionError: this rank's records say that others hold more.
            InternalError: another rank holds something else, or ended.
        """
        with self._meeting():
            self.ranks.check_integrity(sequences)

    def ahead(self, tokens: torch.Tensor) -> None:
        """Make all followers begin the next decode step, on `tokens` [slots] int64, which the step
        before it sampled. Does not wait for a device.

        Raises:
            GroupError: a rank was lost.
        """
        self._num_guesses += 1
        self.tell(Ahead())
        self.group.gather(tokens)

    def wait_until_guesses_are_heard(self) -> None:
        """Return when all followers have heard of every step begun ahead. Tell a peer only then
        where to write: each of its writes then waits for that rank's own guesses.

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
        """Set the callbacks. Any thread calls `on_lost` when a rank is lost. `on_answer` gets a
        follower's answer, or that layers of its stage are written.
        """
        self._on_lost, self._on_answer = on_lost, on_answer

    @property
    def lost(self) -> str | None:
        """Why this instance cannot go on, or None if it can."""
        return self.ranks.lost

    def fail(self, why: str) -> None:
        """End all ranks. `why` is the lead runner's reason. Only the first call counts."""
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
        """End all followers at once, and tell the runner."""
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
            except Exception:  # each kind of process has its own timeout error
                process.kill()
                process.wait(END_S)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Wait for all ranks after a message to them. Raises InternalError when one is lost."""
        try:
            yield
            self.group.meet()
        except (OSError, GroupError) as error:
            self.fail(f"the ranks of this model do not meet: {error}")
            raise InternalError(f"{self.lost}") from error

    def _give_signs(self) -> None:
        """Show the followers that this process is alive."""
        while not self._ending.wait(SIGN_S):
            try:
                self.tell(Alive())
            except OSError as error:  # one has gone, or reads nothing: the watching thread ends it
                _log.warning(
                    "the lead can no longer show its followers that it is alive: %s", error
                )
                return

    def _watch_all(self) -> None:
        """Take the followers' answers until the first of them goes, or falls silent."""
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
        """Take one answer of a follower. Returns False when the follower has gone."""
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
