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
import time
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
from tests.integration.serve.test_real_processes import prompt, stream, wait_until
from tests.support.followers import followers
from tests.support.serve.server import START_S, serving

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
        deadline_s = time.monotonic() + START_S
        while not (found := re.search(r"started at (\S+)", log.read_text())):
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, "it does not listen"
            time.sleep(0.1)
        yield psutil.Process(running.pid), found[1]
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
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
        decode = next(each for each in server.status()["workers"] if each["id"] == "decode-0")
        assert decode["load"]["counters"]["blocks_pushed_compared"] > 0

        begun = threading.Semaphore(0)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = [pool.submit(stream, server, tokens, LONG, begun=begun) for tokens in PROMPTS]
            for _ in PROMPTS:
                assert begun.acquire(timeout=60)
            stages[0].kill()
            stages[1].send_signal(signal.SIGSTOP)  # one is found by its end, one by its silence
            found = [answer.result(200) for answer in answers]
        assert [answer["ids"] for answer in found] == alone
        wait_until(whole, 120, "all workers up again")
        again = followers(far.pid)
        assert len(again) == 2
        assert not {each.pid for each in again} & {each.pid for each in stages}
    assert not [each for each in again if each.is_running()]
