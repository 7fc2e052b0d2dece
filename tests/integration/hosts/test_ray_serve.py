"""A `mooncake serve` whose workers the Ray of its user has placed over two machines is killed: the
next one adopts them where they run, and a gateway of the other machine answers all the while.
"""

from __future__ import annotations

import secrets
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

import mooncake
from tests.support.hosts.health_ports import assert_health_ports_are_where_status_says
from tests.support.hosts.hosts import HOME, SHARED, Host, Program, hosts
from tests.support.serve.server_process import nano_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # Ray gives its processes 15 s to start, whatever else runs
    pytest.mark.timeout(1500),
]

END_S = 400.0
RAY_PORT, JOIN_PORT = 6379, 6400
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 100
PAGES = "--kv-cache-memory-bytes=32MiB"
RAY = """
import signal, sys
from mooncake.launch.host import environment
environment.prepare_ray(environment.variables(), here_only=False)
from mooncake.base import ConfigError
from mooncake.launch.cluster.ray_machines.ray_node import OwnRaylet
for _ in range(3):  # Ray gives up if it has not started in 30 s
    try:
        raylet = OwnRaylet(sys.argv[1], sys.argv[2], lambda: False, head=len(sys.argv) > 3)
        print("Ray is up", flush=True)
        signal.pause()
    except ConfigError as error:
        print(error.message, flush=True)
"""


def start_ray(host: Host, head: Host, secret: str, token: str) -> None:
    """Make a machine a node of Ray, as its user would, with what `mooncake serve` needs there."""
    for name, text in ((".ray/auth_token", token), ("secret", secret)):
        file = host.path(f"{HOME}/{name}")
        file.parent.mkdir(exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text)
    host.run(
        sys.executable, "-c", RAY, f"{head.address}:{RAY_PORT}", host.address,
        *(["head"] if host is head else []),
        environment={"MOONCAKE_CLUSTER_SECRET": secret},
    ).wait_for("Ray is up", END_S)  # fmt: skip


def workers(machines: list[Host]) -> list[str]:
    """Return the processes of the workers of each machine."""
    return [each.check("sh", "-c", "pgrep -f '[w]orker_program' || true") for each in machines]


def answer(host: Host, url: str) -> list[int]:
    asked = {
        "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = host.post(f"{url}/completions", asked)["choices"][0]["token_ids"]
    return tokens


def test_the_next_serve_adopts_what_runs_on_both_machines(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        [sampled] = llm.generate([PROMPT], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    alone = list(sampled.outputs[0].token_ids)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as given:
        machines = first, second = [*given]
        secret, token = secrets.token_hex(16), secrets.token_hex(32)
        for each in machines:
            start_ray(each, first, secret, token)

        def serve() -> Program:
            program = first.mooncake(
                "serve", f"{SHARED}/{model.name}", "--headless", "--ray-without-tls",
                f"--ray-address={first.address}:{RAY_PORT}", "--bind-host=0.0.0.0",
                f"--join-port={JOIN_PORT}", "--cluster-secret-file=secret", "--kvstore=0",
                "--dtype=float32", PAGES, "--orphan-timeout=600", "--http-without-tls",
            )  # fmt: skip
            program.wait_for("--role ROLE --join", END_S)
            return program

        driver = serve()
        gateway = second.mooncake(
            "serve", "--role=gateway", f"--join={first.address}:{JOIN_PORT}", "--port=8000",
            f"--host={second.address}", f"--bind-host={second.address}",
            "--cluster-secret-file=secret",
        )  # fmt: skip
        url = gateway.wait_for(r"on (http://\S+/v1)", END_S).group(1)
        for each in machines:
            assert_health_ports_are_where_status_says(each, url, {"a", "b"})
        before = workers(machines)
        assert [len(each.split()) for each in before] == [1, 1], "each machine has an engine"

        enough = threading.Event()
        answered = Future[int]()

        def ask() -> None:
            number = 0
            try:
                while not (enough.is_set() and number):
                    assert answer(second, url) == alone
                    number += 1
            except BaseException as error:
                answered.set_exception(error)
            else:
                answered.set_result(number)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert driver.stop(9) != 0
            driver = serve()
        finally:
            enough.set()
            asking.join()
        assert answered.result(0) > 0
        assert workers(machines) == before, "no weights are loaded again"
        assert answer(second, url) == alone
        assert driver.stop(seconds=END_S) == 0, driver.output
        assert workers(machines) == ["", ""]
