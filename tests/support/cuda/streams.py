"""Streams as queues that nothing hurries: a task runs when the host waits for it, in an order that
a seed picks among those CUDA allows.

Owns all queues and the clocks that say which task is ordered behind which. Knows no tensors.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tests.support.cuda.accesses import Access, Accesses

if TYPE_CHECKING:
    from tests.support.cuda.graphs import Capture

LATE, SIDE_FIRST, FIFO, RANDOM = "late", "side first", "fifo", "random"
ORDERS = (LATE, SIDE_FIRST, FIFO, RANDOM)
POLL_S = 0.0005
"""Seconds between two looks at what other processes have done, at first. Each look that finds
nothing doubles them, to `Machine.most_poll_s`, so that processes that wait leave the cores to
others.
"""
Clock = dict[int, int]
Stack = tuple[tuple[CodeType, int], ...]
"""Functions and lines in them, the innermost first."""
Body = Callable[[], Any]
"""Does a task's work; returns a list of accesses, if some were not known when it was queued."""


class Meeting(Protocol):
    """What has a task wait for other processes."""

    def ready(self) -> bool:
        """Say, once all before the task has run, that this process has come; return whether the
        task can run.
        """


@dataclass
class Task:
    """One kernel, copy or mark of a stream."""

    name: str
    body: Body
    accesses: list[Access]
    waits: list[tuple[int, int]]
    """(stream, tick) of tasks of other streams that come first."""
    stack: Stack
    """Where the host queued it."""
    stream: int = 0
    tick: int = 0
    clock: Clock = field(default_factory=dict)
    number: int = 0
    """The task's place in the order in which the host queued all tasks."""
    meeting: Meeting | None = None

    @property
    def place(self) -> str:
        """The calls of its stack, one a line."""
        return "\n  ".join(f"{code.co_filename}:{line} {code.co_name}" for code, line in self.stack)


class Stream:
    """One queue of a device, with the part of `torch.cuda.Stream` that is used."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._join(the_machine(), device)

    @classmethod
    def of(cls, machine: Machine, device: int) -> Stream:
        made = cls.__new__(cls)
        made._join(machine, device)
        return made

    def _join(self, machine: Machine, device: Any) -> None:
        self.machine = machine
        self.device_index = machine.index_of(device)
        self.tasks: deque[Task] = deque()
        self.clock: Clock = {}
        self.tick = self.done = 0
        self.capture: Capture | None = None
        self.number = machine.add(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def wait_event(self, event: Event) -> None:
        """Have what comes next on this stream wait for what `event` stands behind."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Have what comes next wait for all that `other` was given so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block until all tasks so far have run."""
        self.machine.finish(self)

    def query(self) -> bool:
        self.machine.refuse_in_capture("Stream.query")
        return self.done == self.tick


class Event:
    """A point in a stream's order. One that was never recorded has been reached."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.at: Task | None = None
        self.capture: Capture | None = None

    def record(self, stream: Stream | None = None) -> None:
        machine = the_machine()
        stream = stream or machine.current()
        self.at = machine.queue(stream, "event", list)
        self.capture = stream.capture

    def wait(self, stream: Stream | None = None) -> None:
        machine = the_machine()
        stream = stream or machine.current()
        if self.at is None:
            return
        if self.capture is not None and not self.capture.ended:
            self.capture.join(stream)
        elif stream.capture is not None:
            raise Forbidden("a captured stream waits for an event from outside its capture")
        machine.queue(stream, "wait", list, waits=[self.at])

    def synchronize(self) -> None:
        machine = the_machine()
        machine.refuse_in_capture("Event.synchronize")
        if self.at is not None:
            machine.reach(self.at)

    def query(self) -> bool:
        machine = the_machine()
        machine.refuse_in_capture("Event.query")
        return self.at is None or machine.has_run(self.at)


class Forbidden(RuntimeError):
    """Something that CUDA does not allow while a stream is captured."""


class Machine:
    """All devices of this process and the host's view of them."""

    def __init__(self, num_devices: int = 1, order: str = LATE, seed: int = 0) -> None:
        assert order in ORDERS, f"{order!r} is none of {', '.join(ORDERS)}"
        self.num_devices = num_devices
        self.most_poll_s = 8 * POLL_S * max(2, num_devices)  # as many ranks look at each other
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.races: list[str] = []
        self.tell_race: Callable[[str], object] = self.races.append
        self.failed: BaseException | None = None
        self.launched: list[str] = []
        """Names of all tasks but marks, in the order in which they were queued or replayed."""
        self.meetings: list[Task] = []
        """Tasks that wait for other processes, some of which have run."""
        self.num_communicators = 0
        """How many groups of ranks have met that this process is in."""
        self._order = order
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self._host: Clock = {}
        """What the host has waited for: whatever it queues comes behind it."""
        self._accesses = Accesses()
        self._own = threading.local()
        self._numbers = itertools.count()
        self._defaults = [Stream.of(self, device) for device in range(num_devices)]

    def add(self, stream: Stream) -> int:
        with self.lock:
            self._streams.append(stream)
            return len(self._streams) - 1

    # ------------------------------------------------------------ what is current in a thread

    @property
    def device(self) -> int:
        return getattr(self._own, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        self._own.device = index

    def index_of(self, device: Any) -> int:
        """Return the index of a device as torch.cuda's functions take it."""
        if device is None:
            return self.device
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else int(device)
        index = self.device if index is None else index
        if not 0 <= index < self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        return index

    def current(self, device: Any = None) -> Stream:
        chosen: dict[int, Stream] = self._chosen()
        index = self.index_of(device)
        return chosen.get(index, self._defaults[index])

    def default(self, device: Any = None) -> Stream:
        return self._defaults[self.index_of(device)]

    def choose(self, stream: Stream) -> None:
        self._chosen()[stream.device_index] = stream

    def _chosen(self) -> dict[int, Stream]:
        if not hasattr(self._own, "streams"):
            self._own.streams = {}
        found: dict[int, Stream] = self._own.streams
        return found

    @property
    def capture(self) -> Capture | None:
        """What this thread captures."""
        return getattr(self._own, "capture", None)

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._own.capture = capture

    def refuse_in_capture(self, what: str) -> None:
        """Raise where this thread captures."""
        if self.capture is not None:
            raise Forbidden(f"{what} is not permitted while a stream is captured")

    # ------------------------------------------------------------ queueing

    def queue(
        self,
        stream: Stream,
        name: str,
        body: Body,
        accesses: Iterable[Access] = (),
        waits: Iterable[Task] = (),
        stack: Stack | None = None,
        meeting: Meeting | None = None,
    ) -> Task:
        """Put a task at the end of a stream, or into the graph that is being captured."""
        made = Task(name, body, list(accesses), [], stack or where(), meeting=meeting)
        if stream.capture is not None:
            stream.capture.add(stream.number, made, [(each.stream, each.tick) for each in waits])
            return made
        with self.lock:
            self._put(stream, made, waits)
        return made

    def _put(self, stream: Stream, task: Task, waits: Iterable[Task]) -> None:
        for before in waits:
            task.waits.append((before.stream, before.tick))
            _merge(stream.clock, before.clock)
        _merge(stream.clock, self._host)
        stream.tick += 1
        stream.clock[stream.number] = stream.tick
        task.stream, task.tick, task.clock = stream.number, stream.tick, dict(stream.clock)
        task.number = next(self._numbers)
        stream.tasks.append(task)
        if task.meeting is not None:
            self.meetings.append(task)
        if task.name not in ("event", "wait"):
            self.launched.append(task.name)

    # ------------------------------------------------------------ waiting

    def has_run(self, task: Task) -> bool:
        return self._streams[task.stream].done >= task.tick

    def reach(self, task: Task) -> None:
        """Run tasks until `task` has run; what the host queues from now on comes behind it."""
        with self.lock:
            self._run(task.stream, task.tick)
            _merge(self._host, task.clock)
            self._raise()

    def finish(self, stream: Stream) -> None:
        """Run all tasks of `stream`."""
        self.refuse_in_capture("a wait of the host")
        with self.lock:
            self._run(stream.number, stream.tick)
            _merge(self._host, stream.clock)
            self._raise()

    def finish_all(self, device: Any = None) -> None:
        """Run all tasks of a device."""
        index = self.index_of(device)
        for stream in list(self._streams):
            if stream.device_index == index:
                self.finish(stream)

    def _raise(self) -> None:
        if self.failed is not None:
            raise RuntimeError(f"CUDA error: {self.failed}") from self.failed

    def advance(self, task: Task) -> bool:
        """Run what has to come before `task`, and it, as far as no other process is waited for;
        return whether anything ran.
        """
        ran = False
        with self.lock:
            stream = self._streams[task.stream]
            while stream.done < task.tick and self._do_late(stream, task.tick):
                ran = True
        return ran

    def _run(self, number: int, tick: int) -> None:
        aim, pause_s = self._streams[number], POLL_S
        while aim.done < tick:
            if self._do_one(aim, tick):
                pause_s = POLL_S
                continue
            self._changed.wait(pause_s)  # without the lock: others queue and run tasks meanwhile
            pause_s = min(2 * pause_s, self.most_poll_s)

    def _do_one(self, aim: Stream, tick: int) -> bool:
        """Run the task that this machine's order has next; return whether one could run."""
        if self._order == LATE:
            return self._do_late(aim, tick)
        heads = [each.tasks[0] for each in self._streams if each.tasks]
        if self._order == SIDE_FIRST:
            heads = [each for each in heads if self._streams[each.stream] not in self._defaults]
        if self._order == FIFO:
            heads.sort(key=lambda task: task.number)
        if self._order == RANDOM:
            self._random.shuffle(heads)
        if (head := next(filter(self._is_ready, heads), None)) is not None:
            self._do(head)
            return True
        return self._order == SIDE_FIRST and self._do_late(aim, tick)

    def _do_late(self, aim: Stream, tick: int) -> bool:
        """Run one of those that have to come before a task, or it, and nothing else."""
        head = aim.tasks[0]
        before = [at for at in head.waits if self._streams[at[0]].done < at[1]]
        if before:
            return any(self._do_late(self._streams[number], at) for number, at in before)
        if not self._is_ready(head):
            return False
        self._do(head)
        return True

    def _is_ready(self, task: Task) -> bool:
        if any(self._streams[number].done < tick for number, tick in task.waits):
            return False
        return task.meeting is None or self.failed is not None or task.meeting.ready()

    def _do(self, task: Task) -> None:
        stream = self._streams[task.stream]
        if self.failed is None:
            try:
                with torch.inference_mode():
                    found = task.body()
            except Exception as error:  # as CUDA's do, errors of the device stay
                error.add_note(f"queued at:\n  {task.place}")
                self.failed = error
            else:
                more = found if isinstance(found, list) else []
                for race in self._accesses.add(task, [*task.accesses, *more]):
                    self.tell_race(race)
        stream.tasks.popleft()
        stream.done = task.tick
        self._changed.notify_all()

    def forget_old_accesses(self) -> None:
        """Drop accesses that all that is to come is ordered behind."""
        with self.lock:
            clocks = [self._host, *(task.clock for each in self._streams for task in each.tasks)]
            self._accesses.prune(clocks)


_machine: list[Machine] = []


def the_machine() -> Machine:
    """Return the machine that is installed. RuntimeError: there is none."""
    if not _machine:
        raise RuntimeError("no emulated GPU is installed: torch has no CUDA here")
    return _machine[-1]


def is_installed(machine: Machine) -> bool:
    return _machine[-1:] == [machine]


def use(machine: Machine | None) -> None:
    """Install a machine, or none."""
    _machine[:] = [] if machine is None else [machine]


def _merge(clock: Clock, other: Clock) -> None:
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


_HERE = __file__.rsplit("/", 1)[0]


def where(most: int = 8) -> Stack:
    """Return the innermost calls that are neither torch's nor this package's."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < most:
        if _is_told(frame.f_code):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@functools.cache
def _is_told(code: CodeType) -> bool:
    name = code.co_filename
    return not name.startswith(_HERE) and "/torch/" not in name and "/triton/" not in name
