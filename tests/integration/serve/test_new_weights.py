"""Real processes that sleep, wake, and get the weights of another checkpoint in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server import Server, serving

PROMPTS = [[(7 * number + token) % 900 + 5 for token in range(90)] for number in range(3)]
SHAPE = ("--prefill", "1", "--decode", "1", "--kvstore", "1", "--dtype", "float32")
SMALL = (
    "--kvstore-dram-bytes",
    "64MiB",
    "--num-gpu-blocks-override",
    "64",
    "--max-model-len",
    "512",
)


def answers(server: Server) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        reply = server.complete(prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
        found.append(reply["choices"][0]["token_ids"])
    return found


def order(server: Server, path: str, body: dict[str, str] | None = None) -> dict[str, object]:
    reply = server.client.post(path, json=body) if body else server.client.post(path)
    assert reply.status_code == 200, reply.text
    answer: dict[str, object] = reply.json()
    return answer


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_sleep_and_serve_another_checkpoint_like_those_that_started_with_it(
    tmp_path: Path,
) -> None:
    old, new = (
        str(init_checkpoint("k2-nano", seed=seed, out=tmp_path / name, dtype="float32"))
        for seed, name in enumerate(("old", "new"))
    )
    with serving(new, *SHAPE, *SMALL, log=tmp_path / "fresh.log") as server:
        wanted = answers(server)
    with serving(
        old, *SHAPE, *SMALL, "--enable-sleep-mode", log=tmp_path / "changed.log"
    ) as server:
        pids = {name: server.pid_of(name) for name in ("prefill-0", "decode-0", "kvstore-0")}
        before = answers(server)
        assert before != wanted
        for level in (1, 2):
            assert order(server, f"/sleep?level={level}&mode=wait")["is_sleeping"]
            refused = server.client.post(
                "/v1/completions", json={"model": server.model, "prompt": [1, 2], "max_tokens": 1}
            )
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            order(server, "/wake_up")
            assert answers(server) == before, level
        assert server.client.post("/update_weights", json={"path": new}).status_code == 400
        order(server, "/pause")
        wrong = server.client.post("/update_weights", json={"path": str(tmp_path)})
        assert wrong.status_code == 400
        assert "config.json" in wrong.json()["error"]["message"]
        changed = order(server, "/update_weights", {"path": new})
        assert changed["weights_path"] == new
        assert not order(server, "/resume")["is_paused"]
        assert answers(server) == wanted
        assert {name: server.pid_of(name) for name in pids} == pids, "no process was started again"
