"""Has the workers of a cluster run: it reports each death at once, starts again what died, and ends
all. Where they run and what looks after each, its caller decides.

Owns the rules by which workers start again. Imports no ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from mooncake.base import MooncakeError
from mooncake.launch.cluster.supervision.attendant import State
from mooncake.launch.cluster.supervision.followed_load import LoadFollower
from mooncake.launch.host import machine_facts
from mooncake.launch.host.processes.descendants import has_ended
from mooncake.launch.host.processes.fork_server import ForkServer
from mooncake.launch.worker.settings import WorkerSettings

POLL_S = 0.2
START_POLL_S = 0.05
"""The wait in each step while workers start."""
STOP_S = 10.0
"""A worker that has not stopped by itself after this long is killed."""
MAX_EARLY_DEATHS = 3
"""After this many deaths in a row before a worker was ready, restarts are considered useless."""
LONGEST_WAIT_S = 30.0
"""The longest wait before a worker that cannot start is tried again."""
MOST_STEPS = 5
"""The wait grows this many times; it is the longest one then."""
UNASKED = (MooncakeError, RuntimeError, OSError)
"""What a keeper raises that cannot do now what it is asked: Ray does not answer, or this process
can start no thread.
"""

_log = logging.getLogger(__name__)


class How(enum.Enum):
    """How a worker's run has ended."""

    STOPPED = enum.auto()
    """It has left, or cannot start."""
    DIED = enum.auto()
    """Its process has died."""
    KEEPER_DIED = enum.auto()
    """What looked after it has died. Its process may run on."""
    KEEPER_AWAY = enum.auto()
    """What is to look after it has not started yet."""


class End(NamedTuple):
    """The end of a worker's run."""

    how: How
    why: str = ""
    """Why it cannot start, or how it died."""


class Keeper(Protocol):
    """What looks after the process of one worker. No call blocks."""

    def run(self) -> None:
        """Start the worker's process, or adopt it if it runs. Called again after an end.

        Raises:
            MooncakeError: that cannot be asked now.
        """

    def end(self) -> End | None:
        """Return how the run has ended, or None if it has not."""

    def state(self) -> State | None:
        """Return how the process is, or None if that is not known yet."""

    def stop(self, drain_s: float, waits: bool) -> None:
        """Have the worker leave; see `Attendant.stop`.

        Raises:
            MooncakeError: it cannot be told now.
        """

    def close(self) -> None:
        """Let go of the worker, and give back what it was given. Its process may run on."""


Make = Callable[[WorkerSettings, bool], Keeper]
"""Returns the keeper of a worker. If the second argument is true, the worker may wait until there
is room for it; otherwise it is refused.
"""


@dataclasses.dataclass(eq=False)
class Entry:
    """What the supervisor knows about one worker."""

    settings: WorkerSettings
    keeper: Keeper
    state: State | None = None
    pidfd: int | None = None
    lost: bool = False
    """True if its death was reported and it has not been heard of since."""
    dead_pid: int = 0
    """The process that died last."""
    early_deaths: int = 0
    retry_at_s: float | None = None
    leave_by_s: float | None = None
    """When a worker that was told to leave ends at the latest; None: it was not told."""

    @property
    def leaves(self) -> bool:
        """True if it was told to leave, and does not start again."""
        return self.leave_by_s is not None

    @property
    def serves(self) -> bool:
        """True if it is ready, and has not ended since."""
        return self.state is not None and self.state.ready and not self.lost


class Supervisor:
    """Starts workers, reports each death at once, restarts workers and ends them all.

    Everything runs in one thread, except `give_up` and `hurry`. `lost` is called with a worker's
    id.
    """

    def __init__(
        self,
        lost: Callable[[str], None],
        drain_s: float = 0.0,
        *,
        waits: bool = False,
        forks: ForkServer | None = None,
        orphan_s: float = 0.0,
        daemons: Sequence[int] = (),
    ) -> None:
        """`drain_s`: how long engines may finish their requests at the end; those that `wait` serve
        until others have taken their place. `forks` starts the processes of this machine.
        `orphan_s`: how long workers serve on while nothing looks after them. `daemons`: descriptors
        of processes without which no keeper goes on; they are closed by `forget`.
        """
        self._orphan_s = orphan_s
        self._forks = forks
        self._lost = lost
        self._drain_s = drain_s
        self._waits = waits
        self._keeper: Make
        self._trouble = ""
        """Why workers could not be started or ended when that was tried last."""
        self.entries: list[Entry] = []
        self._daemons = list(daemons)
        self.keepers_are_gone = False
        """A daemon has ended, and with it all keepers. Workers serve on if they are to wait."""
        self._poll = select.poll()
        for descriptor in daemons:
            self._poll.register(descriptor, select.POLLIN)
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._have_started = False
        """All workers were ready once. From then on a worker that refuses to start does not end the
        others.
        """

    def start(
        self,
        settings: list[WorkerSettings],
        show: Callable[[str, str, int, int], None],
        keeper: Make,
    ) -> dict[str, int]:
        """Start the workers and return their pids when all are ready.

        Raises:
            MooncakeError: a worker cannot start, or `give_up` was called.
        """
        self._keeper = keeper
        for each in settings:
            self.entries.append(self._launch(each))
        while not all(entry.state is not None and entry.state.ready for entry in self.entries):
            if self._stopping.is_set():
                raise MooncakeError("stopped while the workers were starting")
            self._step()
            for entry in self.entries:
                if entry.early_deaths >= MAX_EARLY_DEATHS:
                    raise MooncakeError(
                        f"{entry.settings.worker_id} died {entry.early_deaths} times while it was "
                        "starting (out of memory?); its log above has more"
                    )
                if entry.state is not None:
                    state = entry.state
                    what = "ready" if state.ready else state.what
                    show(entry.settings.worker_id, what, state.done, state.whole)
        self._have_started = True
        return {e.settings.worker_id: e.state.pid for e in self.entries if e.state is not None}

    def resume(self, settings: list[WorkerSettings], keeper: Make) -> None:
        """Supervise workers that may run already; the others are started. Nobody waits for them."""
        self._have_started = True
        self._keeper = keeper
        for each in settings:
            self.entries.append(self._launch(each))

    def give_up(self) -> None:
        """Have `start` or `watch` return soon; from any thread."""
        self._stopping.set()

    def hurry(self) -> None:
        """Have `stop` wait for no worker; from any thread."""
        self._hurry.set()

    def watch(
        self, follower: LoadFollower | None = None, go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Watch the workers until `give_up`, until the daemons are gone, or until `go_on` returns
        false. A `follower` says which workers start and leave meanwhile.
        """
        while not self._stopping.is_set() and not self.keepers_are_gone and go_on():
            self._step()
            if follower is not None and not self._stopping.is_set() and not self.keepers_are_gone:
                self._follow(follower)

    def _follow(self, follower: LoadFollower) -> None:
        """Start and end what is to start and to end. What fails now is tried again, and holds back
        nothing else.
        """
        own = {entry.settings.worker_id: entry for entry in self.entries}
        held = {name: entry.serves for name, entry in own.items() if not entry.leaves}
        start, leave = follower.changes(held, own.keys() - held.keys())
        changes = [
            *(partial(self._have_start, each) for each in start),
            *(partial(self._have_leave, own[name], follower.drain_s) for name in leave),
        ]
        troubles = dict[str, None]()
        for change in changes:
            try:
                change()
            except UNASKED as error:
                troubles[str(error)] = None
        trouble = "; ".join(troubles)
        if trouble and trouble != self._trouble:
            _log.warning("workers cannot start or leave as wanted; trying again: %s", trouble)
        self._trouble = trouble

    def _have_start(self, settings: WorkerSettings) -> None:
        self.entries.append(self._launch(settings))
        _log.info("%s starts, because more workers are wanted", settings.worker_id)

    def _have_leave(self, entry: Entry, drain_s: float) -> None:
        if entry.serves:
            entry.keeper.stop(drain_s, True)
            entry.leave_by_s = time.monotonic() + drain_s
        else:
            self._drop(entry)
        _log.info("%s leaves, because fewer workers are wanted", entry.settings.worker_id)

    def _drop(self, entry: Entry) -> None:
        """Forget a worker that was told to leave."""
        self._tell_lost(entry)
        self._end([entry])

    def are_ready(self) -> bool:
        """Return whether all workers serve."""
        return all(entry.serves for entry in self.entries)

    def let_go(self) -> None:
        """Leave the workers, so that another supervisor adopts them."""
        for entry in self.entries:
            entry.keeper.close()
        self.forget()

    def forget(self) -> None:
        """Know nothing of any worker any more."""
        for entry in self.entries:
            self._forget_process(entry)
        self.entries = []
        for descriptor in self._daemons:
            os.close(descriptor)
        self._daemons = []

    def stop(self) -> None:
        """End all workers. Workers that have not begun to serve end at once."""
        self._stopping.set()
        leaving = [entry for entry in self.entries if entry.serves]
        for entry in leaving:
            with contextlib.suppress(MooncakeError):  # it is ended below
                entry.keeper.stop(self._drain_s, self._waits)
        end_s = time.monotonic() + self._drain_s + STOP_S
        while leaving and time.monotonic() < end_s and not self._hurry.is_set():
            leaving = [entry for entry in leaving if entry.keeper.end() is None]
            self._hurry.wait(START_POLL_S if leaving else 0.0)
        self._end(list(self.entries))
        self.forget()

    def _end(self, entries: Sequence[Entry]) -> None:
        """End what is left of workers that do not come back: without a supervisor they would wait
        for another one.
        """
        for entry in entries:
            with contextlib.suppress(MooncakeError):  # its process is killed below
                entry.keeper.stop(0.0, False)
        for entry in entries:
            entry.keeper.close()
            self._kill_process(entry)
            self._forget_process(entry)
            self.entries.remove(entry)

    def _launch(self, settings: WorkerSettings) -> Entry:
        keeper = self._keeper(settings, self._have_started)
        try:
            keeper.run()
        except BaseException:
            keeper.close()
            raise
        return Entry(settings, keeper)

    def _step(self) -> None:
        """Wait a moment and handle what has happened."""
        wait_s = POLL_S if self._have_started else START_POLL_S
        died = {descriptor for descriptor, _ in self._poll.poll(wait_s * 1000)}
        self.keepers_are_gone = self.keepers_are_gone or not died.isdisjoint(self._daemons)
        if self._stopping.is_set() or self.keepers_are_gone:
            return
        if self._forks is not None and self._forks.ended():
            _log.warning("the fork server has ended: workers that start again take seconds longer")
            self._forks = None
        for entry in self.entries:
            if entry.pidfd in died:
                self._tell_lost(entry)
        for entry in list(self.entries):
            if entry.retry_at_s is None and (end := entry.keeper.end()) is not None:
                self._on_end(entry, end)
        now_s = time.monotonic()
        for entry in list(self.entries):
            if entry.leave_by_s is not None and now_s > entry.leave_by_s + STOP_S:
                _log.warning(
                    "%s has not left in time, so its process is ended", entry.settings.worker_id
                )
                self._drop(entry)
                continue
            if entry.retry_at_s is not None and now_s >= entry.retry_at_s:
                self._run_again(entry, now_s)
            self._ask_state(entry)

    def _run_again(self, entry: Entry, now_s: float) -> None:
        """Have a worker run again. If its keeper cannot be asked now, this is tried again, ever
        more seldom; only a start fails.
        """
        try:
            entry.keeper.run()
        except UNASKED as error:
            if not self._have_started:
                raise
            entry.early_deaths += 1
            wait_s = self._try_later(entry)
            _log.warning(
                "%s cannot start again now, and is tried in %.1f s: %s",
                entry.settings.worker_id, wait_s, error,
            )  # fmt: skip
            return
        entry.retry_at_s = None
        if entry.leave_by_s is not None:  # the keeper before may have died untold
            with contextlib.suppress(MooncakeError):  # it is ended when its time is over
                entry.keeper.stop(max(0.0, entry.leave_by_s - now_s), True)

    def _try_later(self, entry: Entry) -> float:
        """Have a worker run again after a wait that grows with its early deaths; return the
        wait.
        """
        wait_s: float = min(LONGEST_WAIT_S, 0.1 * 4 ** min(entry.early_deaths, MOST_STEPS))
        entry.retry_at_s = time.monotonic() + wait_s
        return wait_s

    def _on_end(self, entry: Entry, end: End) -> None:
        """Handle the end of a worker's run."""
        worker_id = entry.settings.worker_id
        if entry.leaves:
            self._drop(entry)
            return
        if end.how is not How.STOPPED:
            _log.debug("%s: %s", worker_id, end.why)
            away = entry.lost and entry.state is None and end.how is How.KEEPER_AWAY
            if away or (end.how is not How.DIED and self._may_run(entry)):
                # What looks after it has yet to start again, and then adopts the process.
                entry.retry_at_s = time.monotonic() + POLL_S
                return
            entry.early_deaths = 0 if entry.state and entry.state.ready else entry.early_deaths + 1
            self._tell_lost(entry)
        else:
            self._tell_lost(entry)
            why = end.why or "it stopped by itself"
            if not self._have_started and (entry.state is None or not entry.state.ready):
                raise MooncakeError(f"{worker_id}: {why}")
            entry.early_deaths += 1
            _log.error("%s cannot start again, and is tried later: %s", worker_id, why)
        entry.state = None
        self._try_later(entry)

    def _tell_lost(self, entry: Entry) -> None:
        self._forget_process(entry)
        if entry.state is not None:
            entry.dead_pid = entry.state.pid
        if not entry.lost:
            entry.lost = True
            self._lost(entry.settings.worker_id)

    def _ask_state(self, entry: Entry) -> None:
        """Ask for the worker's state until it is ready."""
        if entry.retry_at_s is not None or (entry.state and entry.state.ready):
            return
        state = entry.keeper.state()
        if state is None or (entry.lost and state.pid == entry.dead_pid):
            return
        entry.state, entry.lost = state, False
        if entry.pidfd is None:
            self._watch_process(entry, state)

    def _may_run(self, entry: Entry) -> bool:
        """Return whether a worker that was ready may outlive its keeper: its process runs here, or
        is on another machine, where gateways notice its end by themselves.
        """
        if entry.state is None or not entry.state.ready or not self._orphan_s:
            return False
        return entry.pidfd is not None or entry.state.boot_id != machine_facts.boot_id()

    def _kill_process(self, entry: Entry) -> None:
        """End a process of this machine that has not ended, and wait for that."""
        if entry.pidfd is not None:
            if not has_ended(entry.pidfd, POLL_S):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(entry.pidfd, signal.SIGKILL)
            has_ended(entry.pidfd, STOP_S)

    def _watch_process(self, entry: Entry, state: State) -> None:
        """Have the kernel tell when a process of this machine ends."""
        if state.boot_id != machine_facts.boot_id() or not state.pid:
            return
        try:
            descriptor = os.pidfd_open(state.pid)
        except OSError:  # it is gone already: its keeper will tell
            return
        entry.pidfd = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def _forget_process(self, entry: Entry) -> None:
        if entry.pidfd is not None:
            self._poll.unregister(entry.pidfd)
            os.close(entry.pidfd)
            entry.pidfd = None
