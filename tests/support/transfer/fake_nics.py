"""NICs of memory copies: what RDMA hardware promises, and failures on demand, without hardware.

All NICs of one `FakeFabric` reach each other. Copies are done when they are posted, under one lock,
unless the fabric holds them back: then they are under way, as if in the wires.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base.errors import TransferError
from mooncake.transfer.rdma.nic import Completion, Outcome, WorkRequest
from mooncake.transfer.rdma.wire import NicAddress, PairAddress


@dataclass(frozen=True)
class Copied:
    """A request that reached memory, and the number of the owner's queue pair it came by."""

    request: WorkRequest
    nic: str
    served_by: int


class FakeFabric:
    """The network, and all that is registered."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pairs: dict[int, FakePair] = {}
        self.keys: dict[int, tuple[int, int]] = {}
        self.behind: dict[int, int] = {}
        """Key -> where its memory lies, if that is not the address at which it was registered."""
        self.copied: list[Copied] = []
        self.order: list[Copied | int] = []
        """What was copied, and the numbers of the pairs that were closed, in order of time."""
        self.fails: Callable[[FakeNic, WorkRequest], Outcome | None] = lambda nic, request: None
        """Says how a request fails; None = it does not."""
        self.alters: Callable[[WorkRequest], bool] = lambda request: False
        """Whether a byte of a request arrives as another, and nobody is told."""
        self._held: list[tuple[FakePair, WorkRequest]] | None = None
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    def hold(self) -> None:
        """Let what is posted stay under way from now on."""
        with self.lock:
            self._held = self._held or []

    @property
    def num_held(self) -> int:
        with self.lock:
            return len(self._held or ())

    def held_at(self) -> set[tuple[str, int]]:
        """Return our NIC and the number of the owner's pair of each request under way."""
        with self.lock:
            return {(pair.nic.address.name, pair.peer) for pair, _ in self._held or ()}

    def release(self) -> None:
        """Let what is under way arrive; what came by a closed pair touches nothing."""
        with self.lock:
            held, self._held = self._held or [], None
            for pair, request in held:
                pair.arrive(request)

    def take(self, pair: FakePair, request: WorkRequest) -> None:
        with self.lock:
            if self._held is not None:
                self._held.append((pair, request))
            else:
                pair.arrive(request)


class FakeRegistration:
    def __init__(self, fabric: FakeFabric, address: int, num_bytes: int) -> None:
        self._fabric = fabric
        self.mapped: mmap.mmap | None = None
        """What it keeps alive."""
        self.local_key = self.remote_key = fabric.number()
        fabric.keys[self.local_key] = (address, num_bytes)

    def close(self) -> None:
        with self._fabric.lock:
            self._fabric.keys.pop(self.local_key, None)


class FakePair:
    def __init__(self, nic: FakeNic) -> None:
        self.nic = nic
        self._fabric = nic.fabric
        self.peer = 0
        self._broken = False
        number = self._fabric.number()
        self.address = PairAddress(nic.address, number, psn=number)
        self._fabric.pairs[number] = self

    def serve(self, peer: PairAddress) -> None:
        self.peer = peer.number

    def connect(self, peer: PairAddress) -> None:
        self.peer = peer.number

    def post(self, requests: Sequence[WorkRequest]) -> None:
        if self.nic.refuses_posts:
            raise TransferError(f"{self.nic.address.name} takes no requests")
        for request in requests:
            if not 0 <= request.work_id < 2**64:
                raise OverflowError(f"work request {request.work_id}")
            self._fabric.take(self, request)

    def arrive(self, request: WorkRequest) -> None:
        """Do a request, or fail and with it all that follow."""
        number = self.address.number
        if number not in self._fabric.pairs:
            return
        outcome = self._outcome(request)
        if outcome is not Outcome.ARRIVED:
            self._broken = True
        else:
            behind = self._fabric.behind
            source = request.remote_address + behind.get(request.remote_key, 0)
            target = request.local_address + behind.get(request.local_key, 0)
            if request.is_write:
                source, target = target, source
            ctypes.memmove(target, source, request.num_bytes)
            if self._fabric.alters(request):
                ctypes.c_ubyte.from_address(target).value ^= 0x10
            copied = Copied(request, self.nic.address.name, self.peer)
            self._fabric.copied.append(copied)
            self._fabric.order.append(copied)
        if request.signalled or outcome is not Outcome.ARRIVED:
            self.nic.ended(Completion(request.work_id, outcome, "fake"))

    def _outcome(self, request: WorkRequest) -> Outcome:
        if self._broken:
            return Outcome.FLUSHED
        other = self._fabric.pairs.get(self.peer)
        if other is None or not self.nic.is_active() or not other.is_active():
            return Outcome.LINK
        asked = self._fabric.fails(self.nic, request)
        if asked is not None:
            return asked
        if not self._covers(request.local_key, request.local_address, request.num_bytes):
            return Outcome.LOCAL_MEMORY
        if not self._covers(request.remote_key, request.remote_address, request.num_bytes):
            return Outcome.REFUSED
        return Outcome.ARRIVED

    def _covers(self, key: int, address: int, num_bytes: int) -> bool:
        begin, length = self._fabric.keys.get(key, (0, -1))
        return begin <= address and address + num_bytes <= begin + length

    def is_active(self) -> bool:
        return self.nic.is_active()

    def close(self) -> None:
        with self._fabric.lock:
            del self._fabric.pairs[self.address.number]
            self._fabric.order.append(self.address.number)


class FakeNic:
    """One port."""

    depth = 64
    max_pairs = 10**6

    def __init__(self, fabric: FakeFabric, name: str, rail: int) -> None:
        self.fabric = fabric
        self.address = NicAddress(name, bytes([*bytes(12), 10, 0, rail, 1]), 0, 3, True)
        self.refuses_posts = False
        self.refuses_pairs = False
        self.refuses_registrations = False
        self.refuses_dmabufs = False
        self.refuses_reopening = False
        self.closed = False
        self._active = True
        self._failed = False
        self._open()
        self._completions: deque[Completion] = deque()

    def _open(self) -> None:
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)
        self._events = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._ready

    def events_fileno(self) -> int:
        return self._events

    def take_events(self) -> None:
        self._check()
        _drain(self._events)

    def is_active(self) -> bool:
        return self._active and not self._failed

    def _check(self) -> None:
        if self._failed:
            raise TransferError(f"{self.address.name} has failed")

    def fail(self, *, heard_of: bool) -> None:
        """The device fails: it says so, or it is found out when asked for completions."""
        with self.fabric.lock:
            self._failed = True
        os.eventfd_write(self._events if heard_of else self._ready, 1)

    def reopen(self) -> None:
        if self.refuses_reopening:
            raise TransferError(f"{self.address.name} is not there")
        with self.fabric.lock:
            os.close(self._ready)
            os.close(self._events)
            self._open()
            self._completions.clear()
            self._failed = False

    def set_link(self, active: bool) -> None:
        """Plug the cable in, or pull it out."""
        with self.fabric.lock:
            self._active = active
        os.eventfd_write(self._events, 1)

    def register(self, address: int, num_bytes: int) -> FakeRegistration:
        self._check()
        if self.refuses_registrations:
            raise TransferError(f"{self.address.name} registers nothing")
        return FakeRegistration(self.fabric, address, num_bytes)

    def register_dmabuf(self, fd: int, offset: int, num_bytes: int) -> FakeRegistration:
        """Map what `fd` stands for; the fake fabric knows it by its offset all the same."""
        if self.refuses_dmabufs:
            raise TransferError(f"{self.address.name} takes no dmabuf")
        mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        registration = FakeRegistration(self.fabric, offset, num_bytes)
        self.fabric.behind[registration.local_key] = base
        registration.mapped = mapped
        return registration

    def new_pair(self) -> FakePair:
        self._check()
        if self.refuses_pairs:
            raise TransferError(f"{self.address.name} opens no queue pair")
        with self.fabric.lock:
            return FakePair(self)

    def ended(self, completion: Completion) -> None:
        self._completions.append(completion)
        os.eventfd_write(self._ready, 1)

    def take_completions(self) -> list[Completion]:
        self._check()
        with self.fabric.lock:
            found = list(self._completions)
            self._completions.clear()
        return found

    def arm(self) -> None:
        _drain(self._ready)

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        os.close(self._ready)
        os.close(self._events)


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(descriptor)
