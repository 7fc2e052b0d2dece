"""The gateway process of `overhead`: the real API server, gateway and Conductor; no Ray, no model.

Arguments: the checkpoint, 1 for 1P + 1D or 0 for decode alone, and then, to trace calls, the
collector and the share of calls. Prints one JSON line with its URL and the settings of the workers
to be started, then "ready" when they have joined.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from benchmarks.support.servers import SERVED_NAME
from mooncake.api.http.event_loop import run_in_loop
from mooncake.api.model import load_served_model
from mooncake.base import SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess, listen
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.host import machine_facts
from mooncake.rpc.zmq_channel import ZmqChannel

POLL_S = 0.02


async def _serve(model: str, split: str, collector: str = "", share: str = "") -> None:
    given: dict[str, Any] = {
        "model": model,
        "served_model_name": [SERVED_NAME],
        "port": 0,
        "prefill": int(split),
        "kvstore": 0,
        "self_profile": False,
        "max_model_len": 8192,
        "num_threads": 1,
    }
    if collector:
        given["otlp_traces_endpoint"] = collector
        given["otlp_traces_sampling_ratio"] = float(share)
    config = resolve(given, None, {})
    plan = make_plan(config, machine_facts.num_cores())
    secret = SystemIds().hex(16)
    channel = ZmqChannel(config.bind_host, credential=own_credential(secret, *CredentialRole))
    front = GatewayProcess(plan, channel, SERVED_NAME)
    workers = cluster_workers(config, plan, channel.address, secret, machine_facts.host_name())
    served = load_served_model(plan.model.path, names=(SERVED_NAME,), max_model_len=8192)

    def tell(host: str, port: int) -> None:
        opened = {"url": f"http://{host}:{port}", "workers": workers}
        print(msgspec.json.encode(opened).decode(), flush=True)

    api_server = asyncio.create_task(
        front.serve(config, served, listen(config), asyncio.Event(), tell, list)
    )
    while not front.knows([worker.worker_id for worker in workers]):
        if api_server.done():
            break
        await asyncio.sleep(POLL_S)
    print("ready", flush=True)
    await api_server


if __name__ == "__main__":
    run_in_loop(_serve(*sys.argv[1:]))
