"""A cluster whose file has Ray place the engines: `mooncake up` makes each machine a node of Ray.
Ray and all that looks after the engines may end; they stay as they are.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import mooncake
from tests.support.hosts.described import DescribedCluster
from tests.support.hosts.hosts import SHARED, Host, Program, hosts
from tests.support.serve.server_process import nano_checkpoint

NUM_KILLS = int(os.environ.get("MOONCAKE_NUM_KILLS", "1"))
"""Of each kind of process: `make soak-nodes` sets more."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500 * NUM_KILLS),
]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 200
WORKERS = {"prefill": 1, "decode": 2}
NUM_WORKERS = sum(WORKERS.values())
WORKER, GCS, RAYLET = "[w]orker_program", "[g]cs/gcs_server", "[r]aylet/raylet"
NODE, UP = "[-]-ray-node", "[u]p k2.yaml$"
"""What pgrep finds processes by: a worker; and of what looks after workers Ray's two, the one that
starts these, and `mooncake up`.
"""
END_S = 400.0
ASK = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile="here/ca.pem")
url, body = sys.argv[1:]
asked = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(asked, timeout=250, context=context).read().decode())
"""


def told(model: Path) -> dict[str, Any]:
    return {
        "model": f"{SHARED}/{model.name}",
        "ray": dict(WORKERS),
        "machines": {name: {"gateway": 1, "kvstore": 1} for name in "ab"},
        "settings": {"dtype": "float32", "kv-cache-memory-bytes": "32MiB"},
        "kvstore": {"kvstore-dram-bytes": "32MiB"},
    }


class Placed(DescribedCluster):
    """Two machines, and what Ray has placed there."""

    def __init__(self, machines: Sequence[Host], described: dict[str, Any], model: str) -> None:
        super().__init__(machines, described)
        self.machines = list(machines)
        self._model = model
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
        end_s = time.monotonic() + END_S
        while not (pids := self.pids(host, pattern)):
            assert time.monotonic() < end_s, f"nothing to kill: {pattern}"
        host.check("kill", "-9", *pids)

    def workers(self) -> dict[str, set[str]]:
        return {each.name: self.pids(each, WORKER) for each in self.machines}

    def head(self) -> Host:
        """Return the machine that is Ray's head, once there is one alone."""
        end_s = time.monotonic() + END_S
        while time.monotonic() < end_s:
            heads = [each for each in self.machines if self.pids(each, GCS)]
            if len(heads) == 1:
                return heads[0]
        raise AssertionError("the machines do not agree on a head")

    def num_watched(self) -> int:
        """Return how often a head has said that it looks after all workers."""
        return sum(each.output.count("Ray looks after") for each in self._said)

    def await_watched(self, number: int) -> None:
        end_s = time.monotonic() + END_S
        while self.num_watched() < number:
            assert time.monotonic() < end_s, [each.output for each in self._said]
            time.sleep(0.1)

    def answer(self, host: Host) -> list[int]:
        """Return the tokens of an answer of the gateway on a machine."""
        body = {
            "model": self._model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        url = f"https://{host.address}:8000/v1/completions"
        said = host.check(sys.executable, "-c", ASK, url, json.dumps(body), seconds=END_S)
        return list(json.loads(said)["choices"][0]["token_ids"])


def test_engines_outlive_all_that_looks_after_them(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        [sampled] = llm.generate([PROMPT], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    alone = list(sampled.outputs[0].token_ids)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        cluster = Placed(machines, told(model), model.name)
        cluster.type_up(machines[0]).wait_for("this machine is the head of Ray", END_S)
        cluster.type_up(machines[1])
        for program in cluster.programs.values():
            program.wait_for("are here", END_S)
        cluster.await_watched(1)
        before = cluster.workers()
        assert sum(map(len, before.values())) == NUM_WORKERS

        for pattern in [GCS, RAYLET, NODE, UP] * NUM_KILLS:
            head = cluster.head()
            [other] = [each for each in machines if each is not head]
            num_watched = cluster.num_watched()
            asking = Future[list[int]]()
            thread = threading.Thread(
                target=lambda asked, host: asked.set_result(cluster.answer(host)),
                args=(asking, other),
            )
            thread.start()
            cluster.kill(head, pattern)
            if pattern == UP:
                cluster.type_up(head)
            cluster.await_watched(num_watched + 1)
            thread.join()
            assert asking.result(0) == alone, pattern
            assert cluster.workers() == before, f"{pattern}: no weights are loaded again"

        lost = cluster.head()
        cluster.programs[lost.name].wait_for("are here", END_S)
        assert cluster.answer(lost) == alone
        [left] = [each for each in machines if each is not lost]
        num_watched = cluster.num_watched()
        lost.vanish()
        cluster.machines = [left]
        cluster.await_watched(num_watched + 1)
        assert cluster.answer(left) == alone
        after = cluster.workers()[left.name]
        assert len(after) == NUM_WORKERS, "what the lost machine had is here now"
        assert before[left.name] < after
        here = cluster.programs[left.name]
        assert here.stop(seconds=END_S) == 0, here.output
