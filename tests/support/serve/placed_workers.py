"""Workers on a Ray that was told of four GPUs, each an actor that says which ones its process sees:
prints what was found, as JSON. A process of its own, as Ray wants its variables before it is
imported: `python -m tests.support.serve.placed_workers`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from typing import Any

import msgspec

from mooncake.base import MooncakeError
from mooncake.launch.cluster.ray_machines.ray_node import OwnRaylet
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.secrets.credentials import keep_ray_token_private
from tests.support.ports import free_port
from tests.support.serve.plain_settings import worker_settings

NUM_GPUS = 4
VISIBLE = "3,4,6,7"
LOOPBACK = "127.0.0.1"


class Shown:
    """Stands for a worker's process: tells the GPUs that it sees."""

    def __init__(self, worker_id: str, *, is_pool: bool) -> None:
        self._stopped = threading.Event()

    def run(self, encoded: bytes, secret_file: str, run: str, orphan_s: float) -> None:
        self._stopped.wait()

    def state(self) -> bytes:
        from mooncake.launch.cluster.supervision.attendant import State

        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        boot = machine_facts.boot_id()
        return msgspec.msgpack.encode(State(os.getpid(), boot, seen, 0, 0, ready=True))

    def stop(self, drain_s: float, waits: bool) -> None:
        self._stopped.set()


class Started:
    """A supervisor of workers that show their GPUs."""

    def __init__(self) -> None:
        from mooncake.launch.cluster.supervision.supervisor import Supervisor

        self.lost: list[str] = []
        self.supervisor = Supervisor(self.lost.append)

    def start(self, **num_gpus: float) -> None:
        from mooncake.launch.cluster.ray_machines.ray_cluster import RayKeepers

        settings = [
            worker_settings(worker_id=name, num_gpus=number) for name, number in num_gpus.items()
        ]
        self.supervisor.start(settings, lambda *_: None, RayKeepers("a run", here_only=True))

    def seen(self) -> dict[str, list[str]]:
        """Return the GPUs that each worker's process sees."""
        entries = self.supervisor.entries
        return {e.settings.worker_id: e.state.what.split(",") for e in entries if e.state}


def refusal(**num_gpus: float) -> str:
    started = Started()
    try:
        started.start(**num_gpus)
    except MooncakeError as error:
        return error.message
    finally:
        started.supervisor.stop()
    return ""


def played() -> dict[str, Any]:
    """What workers see, at first and after one was killed."""
    started = Started()
    started.start(pair=2.0, half=0.5, other_half=0.5, pool=0.0)
    before, entry = started.seen(), started.supervisor.entries[0]
    assert entry.state is not None
    pid = entry.state.pid
    os.kill(pid, signal.SIGKILL)
    while entry.state is None or not entry.state.ready or entry.state.pid == pid:
        started.supervisor._step()
    after = started.seen()
    started.supervisor.stop()
    return {"before": before, "after": after, "lost": started.lost}


def main() -> None:
    machine_facts.num_gpus = lambda: NUM_GPUS
    os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE
    environment.prepare_ray({}, here_only=True)
    from mooncake.launch.cluster.ray_machines import ray_cluster

    worker: Any = Shown
    ray_cluster.WorkerActor = worker
    keep_ray_token_private()
    address = f"{LOOPBACK}:{free_port()}"
    with contextlib.closing(OwnRaylet(address, LOOPBACK, lambda: False, head=True)):
        ray_cluster.connect(address)
        try:
            found = {
                **played(),
                "large": refusal(large=8.0),
                "second": refusal(first=3.0, second=3.0),
            }
        finally:
            ray_cluster.disconnect()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
