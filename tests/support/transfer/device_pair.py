"""Two transfer engines whose memory may lie on devices, over any protocol."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from mooncake.base.clock import Clock, MonotonicClock
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.regions import AnyRegion, DeviceRegion
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.staging.engine import StagingEngine
from mooncake.transfer.staging.slots import StagingLimits
from tests.support.transfer.driving import WAIT_S
from tests.support.transfer.fake_device import FakeDeviceMemory

LIMITS = StagingLimits(
    slot_bytes=4096, num_slots=2, num_windows=3, num_windows_asked=2, rest_s=0.05, fence_s=WAIT_S
)


class Side:
    """One engine."""

    def __init__(
        self,
        name: str,
        fabric: InprocFabric,
        protocols: Sequence[str],
        limits: StagingLimits = LIMITS,
        clock: Clock | None = None,
        protection: Protection | None = None,
    ) -> None:
        config = TransferConfig(
            secret="s", host="h", protocols=protocols, staging=limits, protection=protection
        )
        self.transfer: RoutedTransfer = open_transfer(
            config, name, clock or MonotonicClock(), fabric=fabric
        )
        self.memories: list[FakeDeviceMemory] = []
        self._closed = False

    def device(self, num_bytes: int, seed: int = 0, **more: int) -> DeviceRegion:
        memory = FakeDeviceMemory(num_bytes, **more)
        memory.fill(random.Random(seed).randbytes(num_bytes))
        self.memories.append(memory)
        return self.transfer.register_device(memory, "pages")

    def host(self, num_bytes: int, seed: int = 0) -> AnyRegion:
        region = self.transfer.allocate(num_bytes, "host")
        region.buffer[:] = random.Random(seed).randbytes(num_bytes)
        return region

    @property
    def staging_engine(self) -> StagingEngine:
        staging_engine = self.transfer.staging_engine
        assert staging_engine is not None
        return staging_engine

    def in_loop(self, call: Callable[[], object]) -> None:
        """Run `call` in the staging loop, raise what it raises."""
        ended, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)
            ended.set()

        self.staging_engine.post(run)
        assert ended.wait(WAIT_S)
        if errors:
            raise errors[0]

    def check(self) -> None:
        """Check that slots and windows add up, whatever is under way."""
        if self.staging_engine.in_use:
            self.in_loop(self.staging_engine.check_integrity)

    def held(self) -> tuple[int, int, int]:
        """Return (slots held, windows held, windows resting)."""
        found: list[tuple[int, int, int]] = []
        self.in_loop(lambda: found.append(self.staging_engine.num_held))
        return found[0]

    def num_sessions(self) -> int:
        """Return how many sessions of clients there are."""
        found: list[int] = []
        self.in_loop(lambda: found.append(self.staging_engine.num_sessions))
        return found[0]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for memory in self.memories:
            memory.release()
        self.transfer.close()
        self.transfer.check_integrity()
        assert all(memory.num_pinned == 0 for memory in self.memories)
        for memory in self.memories:
            memory.close()


def content(region: AnyRegion) -> bytes:
    """Return all bytes of a region, by no way of the engine's."""
    if isinstance(region, DeviceRegion):
        assert isinstance(region.memory, FakeDeviceMemory)
        return region.memory.content()
    return bytes(region.buffer)


def batch(
    side: Side, op: Op, ops: Sequence[TransferOp], deadline_s: float | None = None
) -> TransferBatch:
    """Return a batch with `side` as the peer."""
    return TransferBatch(op=op, peer=side.transfer.segment, ops=list(ops), deadline_s=deadline_s)


def until(condition: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    """Do `act` now and then until the condition holds."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if condition():
            return
        act()
        pause.wait(0.002)
    raise AssertionError("never came true")
