"""A cluster whose file has Ray place the engines, on hosts made of namespaces: what runs there, and
what looks after it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.hosts.described import DescribedCluster
from tests.support.hosts.hosts import SHARED, Host, Program
from tests.support.waiting import wait_until

WORKERS = {"prefill": 1, "decode": 2}
"""What Ray places."""
WORKER, GCS, RAYLET = "[w]orker_program", "[g]cs/gcs_server", "[r]aylet/raylet"
NODE, UP, ACTOR = "[-]-ray-node", "[u]p k2.yaml$", "[r]ay::WorkerActor"
"""What pgrep finds processes by: a worker; and of what looks after workers Ray's two, the one that
starts these, `mooncake up`, and the actors.
"""
END_S = 400.0
ASK = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile="here/ca.pem")
url, body = sys.argv[1:]
asked = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(asked, timeout=250, context=context).read().decode())
"""


def description(model: Path) -> dict[str, Any]:
    """Return the file of the cluster, but for the addresses of its machines."""
    return {
        "model": f"{SHARED}/{model.name}",
        "ray": dict(WORKERS),
        "machines": {name: {"gateway": 1, "kvstore": 1} for name in "ab"},
        "settings": {"dtype": "float32", "kv-cache-memory-bytes": "32MiB"},
        "kvstore": {"kvstore-dram-bytes": "32MiB"},
    }


class Placed(DescribedCluster):
    """Machines, and what Ray has placed there."""

    def __init__(self, machines: Sequence[Host], model: Path, **decode: Any) -> None:
        """`decode`: flags of decode workers."""
        super().__init__(machines, description(model) | {"decode": decode})
        self.machines = list(machines)
        self._model = model.name
        self.programs: dict[str, Program] = {}
        """What runs on each machine."""
        self._said: list[Program] = []

    def type_up(self, host: Host) -> Program:
        self.programs[host.name] = self.up(host)
        self._said.append(self.programs[host.name])
        return self.programs[host.name]

    def pids(self, host: Host, pattern: str) -> set[str]:
        return set(host.check("sh", "-c", f"pgrep -f '{pattern}' || true").split())

    def kill(self, host: Host, pattern: str) -> None:
        pids = wait_until(lambda: self.pids(host, pattern), f"{pattern} to kill", END_S)
        host.check("kill", "-9", *pids)

    def workers(self) -> dict[str, set[str]]:
        return {each.name: self.pids(each, WORKER) for each in self.machines}

    def kill_actors(self, host: Host) -> None:
        """Kill what looks after the workers of a machine, and wait until others do."""
        killed, wanted = self.pids(host, ACTOR), self._num_attended(host)
        assert len(killed) == wanted > 0
        host.check("kill", "-9", *killed)

        def are_back() -> bool:
            others = self.pids(host, ACTOR) - killed
            return len(others) == self._num_attended(host) == wanted

        wait_until(are_back, "actors that look after the workers again", END_S)

    def _num_attended(self, host: Host) -> int:
        """Return how many workers of a machine have a connection of what looks after them."""
        sockets = [line.split() for line in host.check("cat", "/proc/net/unix").splitlines()]
        return sum(
            (kind, state) == ("0005", "03") and "/worker-" in place
            for _, _, _, _, kind, state, _, place in filter(lambda each: len(each) == 8, sockets)
        )

    def head(self) -> Host:
        """Return the machine that is Ray's head, once there is one alone."""
        heads: list[Host] = []

        def is_one() -> bool:
            heads[:] = [each for each in self.machines if self.pids(each, GCS)]
            return len(heads) == 1

        wait_until(is_one, "the machines to agree on a head", END_S)
        return heads[0]

    def num_watched(self) -> int:
        """Return how often a head has said that it looks after all workers."""
        return sum(each.output.count("Ray looks after") for each in self._said)

    def await_watched(self, number: int) -> None:
        end_s = time.monotonic() + END_S
        while self.num_watched() < number:
            assert time.monotonic() < end_s, [each.output for each in self._said]
            time.sleep(0.1)

    def answer(self, host: Host, prompt: str, num_tokens: int) -> list[int]:
        """Return the tokens of an answer of the gateway on a machine."""
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        url = f"https://{host.address}:8000/v1/completions"
        said = host.check(sys.executable, "-c", ASK, url, json.dumps(body), seconds=END_S)
        return list(json.loads(said)["choices"][0]["token_ids"])
