"""A cluster over two machines without Ray: processes that find each other by the address of a
gateway, each killed once under load and started again as a supervisor would.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from pathlib import Path

import pytest

import mooncake
from tests.support.docs.blocks import words_of
from tests.support.hosts.hosts import HOME, SHARED, Host, Program, hosts
from tests.support.serve.server_process import nano_checkpoint
from tests.support.waiting import wait_until

NUM_KILLS = int(os.environ.get("MOONCAKE_NUM_KILLS", "1"))
"""Of each process: `make soak-nodes` sets more."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 * NUM_KILLS)]

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * count for count in (1, 20, 40)]
NUM_TOKENS = 48
NUM_CLIENTS = 3
PORT = 6400
WORKERS = ("prefill", "decode", "kvstore")
PAGE = "docs/roles.md"
CLIENT = """
import json, sys, threading, time, urllib.error, urllib.request
url, prompts, number = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
stop = threading.Event()
lock = threading.Lock()

def ask(index):
    body = {"prompt": prompts[index], "max_tokens": number, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}
    asked = urllib.request.Request(url + "/completions", json.dumps(body).encode(),
                                   {"Content-Type": "application/json"})
    try:
        choices = json.load(urllib.request.urlopen(asked, timeout=400))["choices"]
        return [each["token_ids"] for each in choices]
    except urllib.error.HTTPError as error:
        return ["refused" if error.code in (429, 503) else error.read().decode()]
    except OSError:
        return ["cut"]

def go_on(index):
    while not stop.is_set():
        for found in ask(index):
            with lock:
                print(json.dumps([index, found]), flush=True)
            if isinstance(found, str):
                time.sleep(0.2)

threads = [threading.Thread(target=go_on, args=(index,)) for index in range(len(prompts))]
for each in threads:
    each.start()
sys.stdin.read()
stop.set()
for each in threads:
    each.join()
"""


class Cluster:
    """The processes of the cluster, by name: the words with which each is started, and where."""

    def __init__(self, first: Host, second: Host, model: str) -> None:
        engine = ["--kv-cache-memory-bytes=32MiB"]
        gateway = ["--port=8000", "--dtype=float32"]
        self._model = model
        self._commands = {
            "gateway": (first, gateway),
            "gateway-2": (second, gateway),
            "prefill": (second, engine),
            "decode": (first, engine),
            "decode-2": (second, engine),
            "kvstore": (second, ["--dram=32MiB"]),
        }
        self._seeds = f"tcp://{first.address}:{PORT},{second.address}:{PORT}"
        self.running: dict[str, Program] = {}

    def start(self, role: str) -> None:
        host, words = self._commands[role]
        told = {
            "DIR": self._model, "10.0.0.7:6400": self._seeds, "10.0.0.7": host.address,
            "10.0.0.8": host.address, "decode": role.partition("-")[0],
        }  # fmt: skip
        gateway, worker = words_of(PAGE, "mooncake serve DIR --role gateway --join-port", told)
        typed = [*gateway, "--join", self._seeds] if "gateway" in role else worker
        self.running[role] = host.mooncake(*typed, *words)

    def kill(self, role: str) -> None:
        """Kill the process as the kernel does when memory is short."""
        self.running[role].stop(9)


def test_each_process_killed_under_load_costs_a_pause(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(PROMPTS, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    alone = [list(each.outputs[0].token_ids) for each in sampled]
    secret = secrets.token_hex(16)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        for each in machines:
            each.path(f"{HOME}/secret").touch(mode=0o600)
            each.path(f"{HOME}/secret").write_text(secret)
        first, second = machines
        cluster = Cluster(first, second, f"{SHARED}/{model.name}")
        for role in WORKERS:  # they wait for a gateway
            cluster.start(role)
        cluster.start("gateway-2")
        cluster.start("gateway")
        url = cluster.running["gateway"].wait_for(r"on (http://\S+/v1)").group(1)
        clients = first.run(
            "sh", "-c", 'sleep infinity | "$@"', "client", sys.executable, "-c", CLIENT, url,
            json.dumps(PROMPTS), str(NUM_TOKENS),
        )  # fmt: skip

        def answered() -> int:
            return sum(
                isinstance(json.loads(line)[1], list) for line in clients.output.splitlines()
            )

        def go_on(count: int) -> None:
            wanted = answered() + count
            wait_until(lambda: answered() >= wanted, f"{count} answers")

        def start_again(role: str) -> None:
            """All others are the processes that they were, with their weights."""
            others = [each for name, each in cluster.running.items() if name != role]
            cluster.start(role)
            cluster.running[role].wait_for("serves|on http")
            go_on(2 * NUM_CLIENTS)
            assert all(each.process.poll() is None for each in others), f"{role} was killed"

        go_on(2 * NUM_CLIENTS)
        for role in WORKERS:
            num_said = len(cluster.running["gateway"].output)
            cluster.kill(role)

            def why_lost(role: str = role, num_said: int = num_said) -> re.Match[str] | None:
                said = cluster.running["gateway"].output[num_said:]
                return re.search(rf"\({role}\) (is lost: .*|has left)\n", said)

            told = wait_until(why_lost, f"{role} is lost")
            assert told is not None
            # By the gateway that saw it first: nobody says goodbye for a killed process. And not by
            # its silence, which takes longer.
            assert re.match("is lost: its process ended|has left", told[1]), told[0]
            start_again(role)
        cluster.kill("gateway")
        asked = {"prompt": PROMPTS[1], "max_tokens": NUM_TOKENS, "temperature": 0,
                 "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        other = second.post(f"{url}/completions", asked)  # each host has its own at that address
        assert other["choices"][0]["token_ids"] == alone[1]
        start_again("gateway")
        for role in (*WORKERS, "gateway") * (NUM_KILLS - 1):
            cluster.kill(role)
            start_again(role)

        cluster.start("decode-2")
        cluster.running["decode-2"].wait_for("serves")
        assert cluster.running["decode"].stop() == 0, "it leaves once another has its place"
        go_on(2 * NUM_CLIENTS)
        for each in machines:
            assert "raylet" not in each.check("sh", "-c", "cat /proc/[0-9]*/cmdline")

        found = [json.loads(line) for line in clients.output.splitlines()]
        wrong = [each for each in found if each[1] not in (alone[each[0]], "cut", "refused")]
        assert not wrong
        cut = [each for each in found if each[1] == "cut"]
        assert cut, "the gateway was killed while it had requests"
