"""A stage on another address than its worker's: it joins over TCP, computes and moves its layers,
and all clients see of its end is a pause.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mooncake.base import SamplingParams
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.integration.serve.test_rank_processes import SMALL
from tests.integration.serve.test_real_processes import prompt, stream
from tests.support.followers import followers
from tests.support.serve.server import START_S, serving
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HOST = "127.0.0.2"
PROMPTS = [prompt(30 + 150 * index, seed=index) for index in range(3)]
LONG = 300
WORKERS = {"kvstore-0", "prefill-0", "decode-0"}


@contextmanager
def ranks(log: Path, secret: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run `mooncake ranks` at `HOST`; yield it and its address."""
    words = ["ranks", "--bind-host", HOST, "--port", "0", "--cluster-secret-file", str(secret)]
    with log.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "mooncake.cli.main", *words],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:

        def address() -> re.Match[str] | None:
            assert running.poll() is None, log.read_text()
            return re.search(r"started at (\S+)", log.read_text())

        found = wait_until(address, "it listens", START_S)
        assert found is not None
        yield psutil.Process(running.pid), found[1]
        running.send_signal(signal.SIGTERM)
        assert running.wait(LONG_S) == 0
    finally:
        running.kill()
        running.wait()


def listening(process: psutil.Process) -> set[str]:
    """The addresses on which a process listens."""
    return {each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"}


def test_a_stage_elsewhere_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    model = init_checkpoint("k2-nano", seed=5, out=tmp_path / "nano", dtype="float32")
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    secret.chmod(0o600)
    with DirectEngine.open(
        str(model), dtype="float32", device="cpu", max_model_len=1024, num_threads=1
    ) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
        alone = engine.generate(PROMPTS, [greedy] * len(PROMPTS))
    with (
        ranks(tmp_path / "ranks", secret) as (far, address),
        serving(
            str(model), "--decode", "1", "-pp", "2", "--rank-backend", "gloo",
            "--stage-hosts", address, "--cluster-secret-file", str(secret),
            "--transport", "tcp", "--push-checksums", "on",
            "--max-num-batched-tokens", "128", "--max-num-seqs", "16", *SMALL,
            log=tmp_path / "log",
        ) as server,
    ):  # fmt: skip

        def whole() -> bool:
            up = {each["id"] for each in server.status()["workers"] if each["state"] == "up"}
            return up == WORKERS and server.status()["load"]["num_inflight"] == 0

        for tokens, expected in zip(PROMPTS, alone, strict=True):
            assert stream(server, tokens, 40)["ids"] == expected[:40]
        stages = followers(far.pid)
        assert len(stages) == 2, "the first stages of prefill and of decode"
        assert followers(server.process.pid) == [], "no rank but the leads is here"
        assert {ip for stage in stages for ip in listening(stage)} == {HOST}

        def num_compared() -> float:
            [decode] = [each for each in server.status()["workers"] if each["id"] == "decode-0"]
            return float(decode["load"]["counters"].get("blocks_pushed_compared", 0))

        wait_until(num_compared, "decode compares what was pushed")

        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = [pool.submit(stream, server, tokens, LONG, begun=begun) for tokens in PROMPTS]
            for _ in PROMPTS:
                assert begun.acquire(timeout=LONG_S)
            stages[0].kill()
            stages[1].send_signal(signal.SIGSTOP)  # one is found by its end, one by its silence
            found = [answer.result(LONG_S) for answer in answers]
        assert [answer["ids"] for answer in found] == alone

        def replaced() -> list[psutil.Process]:
            new = followers(far.pid)
            return new if whole() and len(new) == 2 and not {*new} & {*stages} else []

        again = wait_until(replaced, "all workers up again, with other stages")
    assert not [each for each in again if each.is_running()]
