"""The receipt of a call of a real cluster: gateway, prefill and decode are processes, and so are
the commands that ask for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024")
PROMPT = list(range(1, 301))
SLO_TTFT, SLO_TBT = "x-mooncake-slo-ttft-ms", "x-mooncake-slo-tbt-ms"


def mooncake(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake.cli.main", *words],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_call_is_explained_and_its_choice_made_again(tmp_path: Path) -> None:
    words = ("--prefill", "2", "--decode", "1", "--port", "0", "--max-num-batched-tokens", "128")
    with ServerProcess(str(nano_checkpoint(tmp_path)), *SMALL, *words) as server:
        server.wait_until_serving()
        body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        replies = [
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=300) for _ in range(2)
        ]
        assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
        name = replies[1].headers["x-mooncake-receipt"]
        long = body | {"prompt": PROMPT[::-1] * 3}  # eight steps of the engine
        late, served = (
            httpx.post(f"{server.url}/v1/completions", json=long, headers=own, timeout=300)
            for own in ({SLO_TTFT: "1"}, {SLO_TTFT: "3600000", SLO_TBT: "3600000"})
        )
        refused = mooncake("explain", late.headers["x-mooncake-receipt"], "--url", server.url)
        metrics = server.text("/metrics")
        shown = mooncake("explain", name, "--url", server.url)
        told = mooncake("explain", replies[1].json()["id"], "--url", server.url, "--json")
        file = tmp_path / "bundle.json"
        bundled = mooncake("explain", name, "--url", server.url, "--bundle", str(file))
        code, _ = server.stop()
        assert code in (0, 130)
    assert [run.returncode for run in (shown, told, bundled)] == [0, 0, 0], (
        shown.stderr + told.stderr + bundled.stderr
    )
    assert (late.status_code, served.status_code) == (429, 200), late.text + served.text
    assert late.headers["retry-after"]
    assert "this request's own limit of 1 ms" in late.json()["error"]["message"]
    told_limits = " ".join(refused.stdout.split())
    assert "refused with 429: request_ttft_limit; limits: first token 1.0 ms" in told_limits
    assert 'reason="request_ttft_limit"' in metrics
    replayed = mooncake("simulate", "--replay", str(file))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "the same workers" in replayed.stdout

    receipt = json.loads(told.stdout)
    assert (receipt["id"], receipt["gateway"]) == (name, "gateway")
    [sequence] = receipt["sequences"]
    assert (sequence["state"], sequence["num_output_tokens"]) == ("length", 8)
    assert sequence["num_prompt_tokens"] == len(PROMPT)
    [attempt] = sequence["attempts"]
    assert attempt["decode"] == "decode-0"
    assert attempt["ttft_s"] > 0
    assert {each["worker"] for each in attempt["choice"]["prefill"]} == {"prefill-0", "prefill-1"}
    taken = [each["worker"] for each in attempt["choice"]["prefill"] if each["taken"]]
    assert taken == [attempt["prefill"]]
    known = [*sequence["cache"]["hits"].values(), *sequence["cache"]["misses"].values()]
    assert sum(known) == 256, "the tokens of the prompt's four reusable blocks"
    steps = {step["name"]: step for step in sequence["steps"]}
    assert {"queue", "prefill", "reserve", "decode"} <= set(steps)
    assert steps["prefill"]["worker"] == attempt["prefill"]
    assert steps["decode"]["worker"] == "decode-0"
    assert name in shown.stdout
    assert "* decode-0" in shown.stdout
    text = file.read_text()
    assert json.dumps(PROMPT[:40])[1:-1] not in text
    assert {each["id"] for each in json.loads(text)["placements"][0]["placement"]["workers"]} >= {
        "prefill-0", "prefill-1", "decode-0",
    }  # fmt: skip
