"""A worker whose model computes nothing: everything around the model, at full speed.

The process layout, messages, block bookkeeping and pushes are the real ones; `NullRunner` answers a
step at once, or after a pause where one is asked for. `overhead` starts it as a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mooncake.base import Grammar, KvLayout, MonotonicClock, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import LayerDone, PolledRunner, RunnerEvent, StepPlan, StepResult
from mooncake.identity.credential import own_credential
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.wiring import build
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.factory import TransferConfig, open_transfer

FIRST_TOKEN, NUM_TOKENS = 1000, 5000
"""Tokens are taken from a range of words that every preset has."""


class NullRunner:
    """Answers each step after `step_s` with tokens that depend on nothing but their position."""

    def __init__(self, num_layers: int, step_s: float) -> None:
        self._num_layers = num_layers
        self._step_s = step_s
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._events: deque[RunnerEvent] = deque()
        self._readable, self._signal = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def prepare(self, grammar: Grammar) -> None:
        """There are none here."""

    def submit(self, plan: StepPlan) -> None:
        """Answer `plan` in a while, at the driver's next look if there is nothing to wait for."""
        if self._step_s:
            self._plans.put(plan)
        else:
            self._answer(plan)

    def fileno(self) -> int:
        return self._readable

    def poll(self) -> Sequence[RunnerEvent]:
        try:
            os.read(self._readable, 4096)
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()
        os.close(self._readable)
        os.close(self._signal)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            time.sleep(self._step_s)
            self._answer(plan)

    def _answer(self, plan: StepPlan) -> None:
        if plan.report_layers:
            layers = range(self._num_layers)
            self._events.extend(LayerDone(step_id=plan.step_id, layer=layer) for layer in layers)
        tokens = {
            slot.sequence_id: [FIRST_TOKEN + (slot.start + len(slot.tokens)) % NUM_TOKENS]
            for slot in plan.slots
            if slot.sample
        }
        self._events.append(StepResult(step_id=plan.step_id, tokens=tokens, seconds=1e-6))
        os.write(self._signal, b"\0")


class NullModel:
    """Stands where the checkpoint's weights would be (`launch.process.Model`)."""

    owns_pages = False

    def __init__(self, revision: str, step_s: float) -> None:
        self.revision = revision
        self._step_s = step_s

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        del progress

    def warm_up(
        self, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ) -> None:
        del config, progress

    def num_pages(self, layout: KvLayout, config: EngineConfig) -> int:
        del layout
        return config.num_blocks

    def device_pages(self, layout: KvLayout, num_pages: int) -> DeviceMemory:
        raise NotImplementedError("pages lie in the host's memory")

    def runner(
        self,
        layout: KvLayout,
        config: EngineConfig,
        pages: memoryview | DeviceMemory,
        num_threads: int | None,
        descriptor: int | None = None,
    ) -> PolledRunner:
        del config, pages, num_threads, descriptor
        return NullRunner(layout.num_layers, self._step_s)


def main(encoded: str, step_s: float) -> None:
    """Be the worker that the settings (JSON) describe until the process is ended."""
    settings = msgspec.json.decode(encoded, type=WorkerSettings)
    channel = ZmqChannel(
        settings.bind_host, credential=own_credential(settings.cluster_secret, *CredentialRole)
    )
    transfer = open_transfer(
        TransferConfig(
            secret=settings.cluster_secret,
            host=machine_facts.boot_id(),
            protocols=settings.transfer_protocols,
        ),
        SystemIds().hex(8),
        MonotonicClock(),
    )
    model = NullModel(settings.weights_revision, step_s)
    stands_in: Any = model
    build(settings, channel, transfer, contextlib.ExitStack(), model=stands_in).driver.run()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
