"""`torch.distributed.ProcessGroupNCCL` over memory that the processes of its ranks share.

An exchange is a task of a stream of the group's own: behind what the current stream was given, and
before what is given after `wait`. It ends when all ranks have come, however long that takes, as on
a GPU. A device goes on while its host does something else, so a thread runs what another rank waits
for, and nothing more.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tests.support.cuda.accesses import Access
from tests.support.cuda.memory import Block
from tests.support.cuda.streams import (
    POLL_S,
    Event,
    Machine,
    Stream,
    Task,
    is_installed,
    the_machine,
)
from tests.support.cuda.tensors import DeviceTensor

_HEAD_BYTES, _SLOT_BYTES = 512, 1 << 24
"""Bytes of one exchange: for its number and its name in words, and for what a rank gives to it."""
_TURNS = 2
"""A rank that comes to the exchange after next knows that all have read what it gave to this."""
_watching: set[int] = set()
"""Machines that have a thread which goes along with other ranks."""


class _Options:
    """`ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)


class Communicator:
    """Some ranks that have met, seen from one of them."""

    def __init__(
        self, store: Any, name: str, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        """Meet the others. RuntimeError: one did not come."""
        machine = the_machine()
        machine.refuse_in_capture(f"the first exchange of {name}, in which ranks meet,")
        self.name, self.rank, self.size, self.timeout_s = name, rank, size, timeout_s
        self.stream = Stream.of(machine, machine.index_of(device))
        self.aborted = False
        self.come = self.done = 0
        """The last exchanges that this rank has come to, and that have ended here."""
        self.order = Block(1, self.stream.device_index, None)
        """All exchanges write there: two that no wait orders race."""
        whole = size + size * _TURNS * (_HEAD_BYTES + _SLOT_BYTES)
        if rank == 0:
            descriptor = os.memfd_create("emulated-nccl")
            os.ftruncate(descriptor, whole)
            store.set(name, f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor = os.open(store.get(name).decode(), os.O_RDWR)
        self._memory = mmap.mmap(descriptor, whole)
        with torch.inference_mode(False):  # another thread writes there, too
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._memory[rank] = 1
        end_s = time.monotonic() + timeout_s
        while not all(self._memory[:size]):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{name}: not all of {size} ranks came in {timeout_s:g} s")
            time.sleep(POLL_S)
        os.close(descriptor)
        machine.num_communicators += 1
        if id(machine) not in _watching:
            _watching.add(id(machine))
            threading.Thread(target=_go_along, args=(machine,), name="nccl", daemon=True).start()

    def arrive(self, words: str, given: torch.Tensor | None) -> int:
        """Show what this rank gives to its next exchange, and what it takes that for."""
        self.come += 1
        at = self._slot(self.rank, self.come)
        if given is not None:
            flat = given.view(-1).view(torch.uint8)
            there = at + _HEAD_BYTES
            self._bytes[there : there + flat.numel()].copy_(flat)
        text = words.encode()
        self._memory[at + 8 : at + 16] = len(text).to_bytes(8, "little")
        self._memory[at + 16 : at + 16 + len(text)] = text
        self._memory[at : at + 8] = self.come.to_bytes(8, "little")
        return self.come

    def all_have_come(self, number: int) -> bool:
        return all(self._number(rank, number) == number for rank in range(self.size))

    def is_wanted(self) -> bool:
        """Whether another rank has come to an exchange that has not ended here."""
        turns = range(_TURNS)
        return any(
            self._number(rank, turn) > self.done for rank in range(self.size) for turn in turns
        )

    def words(self, number: int) -> list[str]:
        """Return what each rank takes an exchange for."""
        found = []
        for rank in range(self.size):
            at = self._slot(rank, number) + 8
            length = int.from_bytes(self._memory[at : at + 8], "little")
            found.append(self._memory[at + 8 : at + 8 + length].decode())
        return found

    def given(self, rank: int, number: int) -> torch.Tensor:
        """Return what a rank gave to an exchange, and what lies behind it."""
        at = self._slot(rank, number) + _HEAD_BYTES
        return self._bytes[at : at + _SLOT_BYTES]

    def _slot(self, rank: int, number: int) -> int:
        place = rank * _TURNS + number % _TURNS
        return self.size + place * (_HEAD_BYTES + _SLOT_BYTES)

    def _number(self, rank: int, number: int) -> int:
        at = self._slot(rank, number)
        return int.from_bytes(self._memory[at : at + 8], "little")


class _Exchange:
    """A `streams.Meeting`, for one task or all replays of one."""

    def __init__(
        self,
        communicator: Communicator,
        words: str,
        given: torch.Tensor | None,
        take: Callable[[list[torch.Tensor]], None],
        watched: bool,
    ) -> None:
        self.communicator, self.words, self.watched = communicator, words, watched
        self._given, self._take = given, take
        self._number = 0
        self._came_s = 0.0

    def ready(self) -> bool:
        if self.communicator.aborted:
            return True
        if not self._number:
            self._number = self.communicator.arrive(self.words, self._given)
            self._came_s = time.monotonic()
        return self.communicator.all_have_come(self._number)

    def run(self) -> None:
        here, number = self.communicator, self._number
        self._number = 0
        if here.aborted:
            return
        here.done = number
        words = here.words(number)
        if len(set(words)) > 1:
            raise RuntimeError(
                f"{here.name}: exchange {number} is not the same on all ranks: "
                + "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(words))
            )
        self._take([here.given(rank, number) for rank in range(here.size)])

    def is_late(self) -> bool:
        """Whether torch's watchdog would end this: a captured exchange is unknown to it."""
        waited_s = time.monotonic() - self._came_s
        return self.watched and self._number > 0 and waited_s > self.communicator.timeout_s


class Work:
    """What an exchange returns."""

    def __init__(self, stream: Stream, kept: Sequence[DeviceTensor]) -> None:
        self._end: Event = stream.record_event()
        self._device = stream.device
        self._kept = list(kept)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait; with a limit, the host too."""
        the_machine().current(self._device).wait_event(self._end)
        self._kept.clear()
        if timeout is not None:
            self._end.synchronize()
        return True


class ProcessGroupNCCL:
    """The part of torch's class that is used."""

    Options = _Options

    def __init__(self, store: Any, rank: int, size: int, options: _Options) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s = options._timeout.total_seconds()
        self._communicators: dict[str, Communicator] = {}
        self._aborted = False

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        if output.numel() != self._size * given.numel() or output.dtype != given.dtype:
            raise ValueError(f"allgather: {output.numel()} is not {self._size} x {given.numel()}")
        out, each = _inner(output), given.nbytes

        def take(parts: list[torch.Tensor]) -> None:
            flat = _bytes_of(out).view(self._size, each)
            for row, part in zip(flat, parts, strict=True):
                row.copy_(part[:each])

        return self._queue(self._all(given), _words("allgather", given), given, [output], take)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        if output_split_sizes or input_split_sizes:
            raise NotImplementedError("alltoall_base with sizes: nothing that is served uses it")
        if output.nbytes != input.nbytes or len(input) % self._size:
            raise ValueError(f"alltoall_base: {len(input)} rows are not for {self._size} ranks")
        out, each = _inner(output), output.nbytes // self._size
        first = each * self._rank

        def take(parts: list[torch.Tensor]) -> None:
            flat = _bytes_of(out).view(self._size, each)
            for row, part in zip(flat, parts, strict=True):
                row.copy_(part[first : first + each])

        return self._queue(self._all(input), _words("alltoall", input), input, [output], take)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        [given] = tensors
        words = _words(f"send from {self._rank} to {to}", given)
        return self._queue(self._pair(to, given), words, given, [], lambda _: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        [out] = tensors
        inner, place = _inner(out), int(source > self._rank)

        def take(parts: list[torch.Tensor]) -> None:
            _bytes_of(inner).copy_(parts[place][: inner.nbytes])

        words = _words(f"send from {source} to {self._rank}", out)
        return self._queue(self._pair(source, out), words, None, [out], take)

    def abort(self) -> None:
        """End all exchanges, whatever they wait for; their results are not written."""
        self._aborted = True
        for each in list(self._communicators.values()):
            each.aborted = True

    def _all(self, tensor: torch.Tensor) -> Communicator:
        return self._met("all", self._rank, self._size, tensor)

    def _pair(self, other: int, tensor: torch.Tensor) -> Communicator:
        low, high = sorted((self._rank, other))
        return self._met(f"{low}:{high}", int(self._rank == high), 2, tensor)

    def _met(self, name: str, rank: int, size: int, tensor: torch.Tensor) -> Communicator:
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        if name not in self._communicators:
            self._communicators[name] = Communicator(
                self._store, name, rank, size, tensor.device, self._timeout_s
            )
        return self._communicators[name]

    def _queue(
        self,
        communicator: Communicator,
        words: str,
        given: torch.Tensor | None,
        outs: Sequence[torch.Tensor],
        take: Callable[[list[torch.Tensor]], None],
    ) -> Work:
        machine, stream = the_machine(), communicator.stream
        reads = [] if given is None else [given]
        tensors = [each for each in (*reads, *outs) if isinstance(each, DeviceTensor)]
        if len(tensors) < len(reads) + len(outs) or any(e.device != stream.device for e in tensors):
            raise ValueError(f"{words}: a tensor is not on {stream.device}")
        if not all(each.is_contiguous() for each in tensors):
            raise ValueError("Tensors must be contiguous")
        if any(each.nbytes > _SLOT_BYTES for each in reads):
            raise NotImplementedError(f"{words}: an exchange here takes {_SLOT_BYTES} bytes")
        stream.wait_stream(machine.current(stream.device))
        captured = stream.capture is not None
        exchange = _Exchange(
            communicator, words, None if given is None else _inner(given), take, not captured
        )
        accesses = [each.access(False) for each in tensors[: len(reads)]]
        accesses += [each.access(True) for each in tensors[len(reads) :]]
        accesses.append(Access(communicator.order, [(0, 1)], True))
        machine.queue(stream, words, exchange.run, accesses, meeting=exchange)
        return Work(stream, tensors)


def _go_along(machine: Machine) -> None:
    """Run what other ranks wait for while the machine is installed, and end what is late."""
    pause_s = POLL_S
    while is_installed(machine):
        pause_s = min(2 * pause_s, machine.most_poll_s)
        with machine.lock:
            machine.meetings[:] = [e for e in machine.meetings if not machine.has_run(e)]
            first: dict[Communicator, Task] = {}
            for task in machine.meetings:
                assert isinstance(task.meeting, _Exchange)
                first.setdefault(task.meeting.communicator, task)
        for communicator, task in first.items():
            assert isinstance(task.meeting, _Exchange)
            if communicator.is_wanted() and machine.advance(task):
                pause_s = POLL_S
            if task.meeting.is_late() and machine.failed is None:
                machine.failed = RuntimeError(
                    f"{communicator.name}: watchdog caught a timeout of {communicator.timeout_s:g} "
                    f"s: {task.name}"
                )
        time.sleep(pause_s)
    _watching.discard(id(machine))


def _words(op: str, tensor: torch.Tensor) -> str:
    return f"{op} of {tensor.nbytes} bytes of {tensor.dtype}"


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DeviceTensor), f"{tensor.device} is not the emulated GPU's"
    return tensor.inner


def _bytes_of(inner: torch.Tensor) -> torch.Tensor:
    return inner.view(-1).view(torch.uint8)
