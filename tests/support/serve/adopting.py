"""Looks after a pool node that Ray places, as `mooncake serve --ray-address` does, until it is
killed: `python -m tests.support.serve.adopting ADDRESS SECRET-FILE`. It prints, as JSON, where it
has found the node and the process that it looks after then. `end` as a further word ends that.
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
POOL = worker_settings(
    role=Role.KVSTORE, worker_id="kvstore-0", kvstore=KvStoreConfig(dram_bytes=2**20)
)


def main(address: str, secret_file: str, *words: str) -> None:
    environment.prepare_ray(environment.variables(), here_only=True)
    from mooncake.launch.cluster.ray_machines import ray_cluster
    from mooncake.launch.cluster.supervision.supervisor import Supervisor
    from mooncake.launch.cluster.supervision.worker_handle import running

    ray_cluster.connect(address)
    held = ray_cluster.holders(running, RUN, [POOL.worker_id])
    keepers = ray_cluster.RayKeepers(RUN, Path(secret_file), ORPHAN_S, nodes=held)
    supervisor = Supervisor(lambda _: None, orphan_s=ORPHAN_S)
    pids = supervisor.start([POOL], lambda *_: None, keepers)
    print(json.dumps([[*ray_cluster.nodes()], held, pids]), flush=True)
    if words:
        supervisor.stop()
        ray_cluster.disconnect()
    else:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
