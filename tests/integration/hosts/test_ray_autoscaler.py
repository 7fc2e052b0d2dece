"""Ray's own autoscaler adds a node because `mooncake serve --autoscale` starts a worker for which
there is no room, and removes it once that worker has left. Its provider is the one that Ray ships
for such tests: a node is a raylet of this machine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts.hosts import HOME, SHARED, Host, hosts
from tests.support.serve.server_process import nano_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # Ray gives its processes 15 s to start, whatever else runs
    pytest.mark.timeout(1800),
]

RAY_PORT, API_PORT = 6379, 8000
TRIES = 3
"""Ray gives up if it has not started in 30 s."""
END_S = 600.0
ENOUGH = "enough"
"""The file whose existence ends the load."""
LOGS = "/tmp/ray/session_latest/logs"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CLIENT = """
import json, os, sys, threading, time, urllib.request
url, enough = sys.argv[1:]

def told(path, body=None):
    asked = urllib.request.Request(url + path, body and json.dumps(body).encode(),
                                   {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=200) as reply:
        return json.load(reply)

def answers(prompts, max_tokens):
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    return [each["token_ids"] for each in told("/v1/completions", body)["choices"]]

def workers():
    return {each["id"]: each for each in told("/v1/cluster/status")["workers"]}

prompts = [[7 + number, 8, 9, 10] for number in range(12)]
expected = answers(prompts, 200)
print("expected", flush=True)

def watch():
    while not workers().get("decode-1", {"load": {}})["load"].get("num_running"):
        time.sleep(0.1)
    print("decode-1 works", flush=True)

threading.Thread(target=watch).start()
while not os.path.exists(enough):
    assert answers(prompts, 200) == expected
print("the load ends", flush=True)
while "decode-1" in workers():
    assert answers(prompts[:1], 20) == [expected[0][:20]]
    time.sleep(1)
print("decode-1 has left", sorted(workers()), flush=True)
"""
LOOK = """
import json, ray, sys
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False)
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps([nodes, [list(group["bundles_to_node_id"].values()) for group in groups]]))
"""


def provider(host: Host) -> dict[str, Any]:
    """Return what Ray's autoscaler is told: up to two nodes of one CPU beside the first."""
    lists = (
        "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands",
        "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands",
    )  # fmt: skip
    unused: dict[str, Any] = {name: [] for name in lists}
    unused |= {"auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False}
    return {
        **unused,
        "cluster_name": "one",
        "upscaling_speed": 1.0,
        "max_workers": 2,
        "idle_timeout_minutes": 0.2,
        "provider": {
            "type": "external",  # Ray's wheel lacks the defaults of "fake_multinode"
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"{host.address}:{RAY_PORT}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "more": {
                "resources": {"CPU": 1, "object_store_memory": 10**8},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 2,
            },
        },
    }


class Ray:
    """The Ray of a host, and what its autoscaler says."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.address = f"{host.address}:{RAY_PORT}"
        for _ in range(TRIES):
            host.start()
            if self._starts():
                return
            host.end()
        raise AssertionError(f"Ray does not start in {TRIES} tries")

    def _starts(self) -> bool:
        self._host.check("ip", "route", "replace", "default", "dev", "eth0")  # to its own address
        self._host.path(f"{HOME}/.ray").mkdir()
        self._host.path(f"{HOME}/.ray/auth_token").write_text("9" * 64)
        self._host.path(f"{HOME}/autoscaling.yaml").write_text(json.dumps(provider(self._host)))
        tool = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        program = self._host.run(
            *tool, "start", "--head", "--block", f"--port={RAY_PORT}", "--num-cpus=2",
            f"--node-ip-address={self._host.address}", "--object-store-memory=100000000",
            "--include-dashboard=false", "--autoscaling-config=autoscaling.yaml",
            environment=ENVIRONMENT,
        )  # fmt: skip
        try:
            program.wait_for("Ray runtime started", END_S)
        except AssertionError as error:
            print(error)
            return False
        return True

    def nodes(self) -> tuple[set[str], set[str]]:
        """Return the nodes that live, and those on which something is set aside for workers."""
        said = self._host.check(
            "env", "RAY_AUTH_MODE=token", sys.executable, "-c", LOOK, self.address, seconds=END_S
        )
        nodes, groups = json.loads(said.splitlines()[-1])
        return set(nodes), {node for group in groups for node in group}

    def log(self) -> str:
        return self._host.path(f"{LOGS}/monitor.log").read_text()


def test_a_node_comes_for_a_worker_and_goes_when_it_has_left(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with hosts(1, tmp_path / "hosts", tmp_path / "shared") as [host]:
        host.end()
        ray = Ray(host)
        server = host.mooncake(
            "serve", f"{SHARED}/{model.name}", "--ray-address", ray.address, "--bind-host",
            host.address, "--ray-without-tls", "--port", str(API_PORT), "--dtype", "float32",
            "--kvstore", "0", "--num-threads", "1", "--kv-cache-memory-bytes", "16MiB",
            "--max-model-len", "512", "--max-num-seqs", "4",
            "--autoscale", "prefill=1..1,decode=1..2,start=1,quiet=15",
        )  # fmt: skip
        server.wait_for(r"on (http://\S+)/v1", END_S)
        [first], aside = ray.nodes()
        assert aside == {first}
        client = host.run(
            sys.executable, "-c", CLIENT, f"http://127.0.0.1:{API_PORT}", f"{HOME}/{ENOUGH}"
        )
        client.wait_for("decode-1 works", END_S)
        nodes, aside = ray.nodes()
        [new] = aside - {first}
        assert new in nodes
        host.path(f"{HOME}/{ENOUGH}").touch()
        client.wait_for("decode-1 has left", END_S)
        assert client.process.wait(END_S) == 0, client.output
        end_s = time.monotonic() + END_S
        while new in (left := ray.nodes())[0]:
            assert time.monotonic() < end_s, ray.log()
        assert left[1] == {first}
        assert server.stop(seconds=END_S) == 0, server.output
