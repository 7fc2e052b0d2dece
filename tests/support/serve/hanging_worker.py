"""A worker in a process of its own whose first step hangs: `python -m … HOW`, settings on stdin.

`HOW` is `step` (the runner never ends it; the loop goes on) or `loop` (the loop itself stops). When
the worker has failed, the process waits for its stdin to close, so that its health can be asked.
"""

from __future__ import annotations

import base64
import sys
import threading

import msgspec

from mooncake.base import MooncakeError
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import StepPlan
from mooncake.launch.worker import process
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.regions import no_progress
from tests.support.engine.fake_runner import FakeRunner
from tests.support.serve.local_world import HashModel, PolledFakeRunner


class HangingRunner(PolledFakeRunner):
    """Takes a step and never ends it, or never comes back from taking it."""

    def submit(self, plan: StepPlan) -> None:
        if sys.argv[1] == "loop":
            threading.Event().wait()


class HangingModel(HashModel):
    """A model of hashes on a `HangingRunner`."""

    def runner(
        self,
        layout: process.KvLayout,
        config: EngineConfig,
        pages: memoryview | DeviceMemory,
        num_threads: int | None,
        descriptor: int | None = None,
    ) -> HangingRunner:
        assert isinstance(pages, memoryview)
        return HangingRunner(FakeRunner(layout, config.num_blocks, memory=pages))


def main() -> None:
    written = base64.b64decode(sys.stdin.readline())
    settings = msgspec.msgpack.decode(written, type=WorkerSettings)
    process.open_model = lambda *_: HangingModel(settings.weights_revision)  # type: ignore[assignment]
    try:
        process.run(settings, progress=no_progress, started=lambda _: None)
    except MooncakeError as error:
        print(error.message, flush=True)
        sys.stdin.read()
        sys.exit(1)


if __name__ == "__main__":
    main()
