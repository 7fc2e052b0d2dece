"""Two machines 20 ms apart: prompts are computed on one, and their tokens decoded on the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts.test_join import (
    NUM_TOKENS,
    PAGES,
    POOL,
    PORT,
    PROMPTS,
    SMALL,
    copy,
    make_secret,
    tokens_alone,
)  # fmt: skip
from tests.support.hosts.hosts import SHARED, Host, hosts
from tests.support.serve.server_process import nano_checkpoint
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DELAY_S = 0.02
MOST_S = 200.0
"""Who expects a first token later than this would refuse the call."""
GET = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=240).read().decode())
"""


def get(host: Host, url: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(host.check(sys.executable, "-c", GET, url))
    return answer


def ask(host: Host, url: str, prompt: str) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens of an answer, and the attempt of its receipt."""
    asked = {
        "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = host.post(f"{url}/completions", asked)
    receipt = get(host, f"{url}/requests/{answer['id']}/receipt")
    [sequence] = receipt["sequences"]
    [attempt] = sequence["attempts"]
    return answer["choices"][0]["token_ids"], attempt


def roles(host: Host, url: str) -> list[str]:
    return sorted(each["role"] for each in get(host, f"{url}/cluster/status")["workers"])


def test_machines_20_ms_apart_have_the_right_tokens_and_place_by_their_estimates(
    tmp_path: Path,
) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    alone = tokens_alone(model)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as (near, far):
        far.delay(DELAY_S)
        make_secret(near)
        copy(near, far, "secret")
        secret, at = "--cluster-secret-file=secret", f"{near.address}:{PORT}"
        head = near.mooncake(
            "serve", f"{SHARED}/{model.name}", "--headless", "--prefill=0", "--decode=1",
            f"--bind-host={near.address}", f"--join-port={PORT}", f"--slo-ttft-s={MOST_S}", secret,
            *SMALL, POOL,
        )  # fmt: skip
        head.wait_for("--role ROLE --join")
        gateway = near.mooncake(
            "serve", "--role=gateway", f"--join={at}", "--port=8000",
            f"--bind-host={near.address}", secret,
        )  # fmt: skip
        url = gateway.wait_for(r"on (http://\S+/v1)").group(1)

        def join(host: Host, number: int) -> str:
            """Have a prefill worker join on a machine; return its name."""
            worker = host.mooncake(
                "serve", "--role=prefill", f"--join={at}", f"--bind-host={host.address}", secret,
                PAGES,
            )  # fmt: skip
            name = worker.wait_for(r"(prefill-\S+) \(pid \d+\) serves").group(1)
            wait_until(lambda: roles(near, url).count("prefill") == number, "a prefill worker")
            return name

        distant = join(far, 1)
        for prompt, tokens in zip(PROMPTS, alone, strict=True):
            answer, attempt = ask(near, url, prompt)
            assert answer == tokens
            assert attempt["prefill"] == distant

        both = {distant, join(near, 2)}
        for prompt, tokens in zip(PROMPTS, alone, strict=True):
            answer, attempt = ask(near, url, prompt)
            assert answer == tokens
            choice = {each["worker"]: each for each in attempt["choice"]["prefill"]}
            assert set(choice) == both
            soonest = min(each["ttft_s"] for each in choice.values())
            assert choice[attempt["prefill"]]["ttft_s"] == soonest
            assert max(each["ttft_s"] for each in choice.values()) < MOST_S
            assert attempt["num_predicted_cached_tokens"] > 0 or prompt == PROMPTS[0]
        assert head.stop() == 0, head.output
