"""Looks after pool nodes that Ray places, as `mooncake serve --ray-address` does, until it is
killed: `python -m tests.support.serve.adopting ADDRESS SECRET-FILE`. It prints, as JSON, where it
has found them and the processes that it looks after then. `last-first` as a further word has it
start them in the other order and end them.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from mooncake.base import Role
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.host import environment
from tests.support.serve.plain_settings import worker_settings

RUN = "a run"
ORPHAN_S = 600.0
NUM_GPUS = 2
POOLS = [
    worker_settings(
        role=Role.KVSTORE, worker_id=f"kvstore-{number}", kvstore=KvStoreConfig(dram_bytes=2**20),
        num_gpus=float(NUM_GPUS),
    )
    for number in range(2)
]  # fmt: skip


def main(address: str, secret_file: str, *words: str) -> None:
    environment.prepare_ray(environment.variables(), here_only=True)
    from mooncake.launch.cluster.ray_machines import ray_cluster
    from mooncake.launch.cluster.supervision.supervisor import Supervisor
    from mooncake.launch.cluster.supervision.worker_handle import running

    ray_cluster.connect(address)
    held = ray_cluster.holders(running, RUN, [each.worker_id for each in POOLS])
    keepers = ray_cluster.RayKeepers(
        RUN, Path(secret_file), ORPHAN_S, nodes={name: each.node for name, each in held.items()},
        groups=ray_cluster.groups_of_held(POOLS, held),
    )  # fmt: skip
    supervisor = Supervisor(lambda _: None, orphan_s=ORPHAN_S)
    pids = supervisor.start(POOLS[::-1] if words else POOLS, lambda *_: None, keepers)
    print(json.dumps([[*ray_cluster.nodes()], held, pids]), flush=True)
    if words:
        supervisor.stop()
        ray_cluster.disconnect()
    else:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
