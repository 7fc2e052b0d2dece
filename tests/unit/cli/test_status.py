"""The tables of `mooncake status`."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mooncake.base.errors import Unauthorized, Unavailable
from mooncake.cli.main import run
from mooncake.cli.status import engine_table, worker_table
from mooncake.launch.host.http_client import Client


def shown(workers: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(worker_table(workers))
    return out.getvalue()


def worker(name: str, **counters: float) -> dict[str, Any]:
    return {"id": name, "role": "decode", "load": {"num_running": 3, "counters": counters}}


def test_what_the_answer_says_besides_is_told_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"role": "prefill", "now": 1, "wanted": 2, "why": "prompts keep 1.70 replicas busy"}
    answer = {
        "ready": False, "draining": False, "missing": ["decode"], "weights_path": "",
        "pool": {"num_nodes": 2, "used_bytes": 3 << 30}, "replicas": [wanted],
    }  # fmt: skip
    monkeypatch.setattr(Client, "get", lambda *_: answer)
    assert run(["status"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[-5:] == [
        "replicas of now wanted why",
        "prefill 1 2 prompts keep 1.70 replicas busy",
        "ready: no",
        "missing: decode",
        "pool: 2 nodes, 3 GiB used",
    ]


def test_engines_of_others_have_a_table() -> None:
    engines = [
        {
            "url": "http://a:8000", "state": "up", "reason": "", "models": ["m", "lora"],
            "prefixes": "events", "num_blocks": 70, "num_running": 2, "num_waiting": 1,
            "num_requests": 9, "num_failed": 1, "num_prompt_tokens": 400, "num_cached_tokens": 300,
        },
        {"url": "http://b:8000", "state": "down", "reason": "refused", "prefixes": "sent"},
    ]  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=200).print(engine_table(engines))
    _, up, down = (" ".join(line.split()) for line in out.getvalue().splitlines())
    assert up == "http://a:8000 up 2 1 9 1 75% events, 70 blocks m, lora"
    assert down == "http://b:8000 down 0 0 0 0 sent refused"


def test_accepted_drafts_have_a_column_where_there_are_any() -> None:
    assert "drafts" not in shown([worker("d0", steps=5), {"id": "kv", "load": None}])
    counts = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 25}
    counts |= {"accepted_tokens_per_pos_0": 9, "accepted_tokens_per_pos_1": 7}
    drafting = worker("d1", **{f"spec_decode_num_{name}": n for name, n in counts.items()})
    table = shown([worker("d0"), drafting])
    assert "drafts accepted" in table
    rows = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    assert "62%, 3.50 tokens a step (90% 70%)" in rows["d1"]
    assert "%" not in rows["d0"]


def test_workers_that_share_experts_say_how_even_their_load_is() -> None:
    counters = {
        "expert_rows": 1000.0, "expert_rows_hottest": 250.0, "expert_rank_rows_mean": 500.0,
        "expert_rank_rows_most": 625.0, "expert_moves": 3.0, "expert_waited_for_s": 1.25,
        "expert_silent_s_decode-1": 12.4, "expert_silent_s_decode-2": 0.0,
        "expert_slow_s_decode-1": 0.0, "expert_slow_s_decode-2": 8.2,
    }  # fmt: skip
    workers = [
        {"id": "decode-0", "role": "decode", "load": {"counters": counters}},
        {"id": "decode-1", "role": "decode", "load": {"counters": {"expert_rows": 0.0}}},
    ]
    table = shown(workers)
    assert (
        "balance 0.80, hottest 25%, 3 moves, waited for 1.2 s, decode-1 was silent for 12 s, "
        "decode-2 was slow, waited 8 s for it" in table
    )
    assert "experts" not in shown(workers[1:])


def test_slow_stages_are_named() -> None:
    counters = {"stage_waited_for_s_0": 9.0, "stage_waited_for_s_1": 0.5, "stage_slow_s_0": 7.6}
    workers = [
        {"id": "prefill-0", "role": "prefill", "load": {"counters": counters}},
        {"id": "prefill-1", "role": "prefill", "load": {"counters": {"stage_waited_for_s_0": 1}}},
    ]
    table = shown(workers)
    assert "stages" in table
    assert "0 was slow, waited 8 s for it" in table
    assert "stages" not in shown(workers[1:])


def test_a_health_port_that_only_its_own_machine_reaches_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake.launch.host.machine_facts.host_name", lambda: "a")

    def shown_at(url: str, host: str) -> str:
        return shown([worker("d0") | {"health_url": url, "host": host}])

    assert "127.0.0.1:9000 on b" in shown_at("http://127.0.0.1:9000", "b")
    assert "[::1]:9000 on b" in shown_at("http://[::1]:9000", "b")
    for url, host in (
        ("http://127.0.0.1:9000", "a"), ("https://10.0.0.8:9000", "b"), ("", "b"),
    ):  # fmt: skip
        assert " on " not in shown_at(url, host)


def test_brackets_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Addresses have them, and what rich takes for an end of a style would be an error."""
    gateway = {"id": "[/g]", "address": "tcp://[fd00::8]:6400"}
    answer = {"gateways": [gateway], "workers": [], "note": "[/x]"}
    monkeypatch.setattr(Client, "get", lambda *_: answer)
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert all(said in shown for said in ("[/g]", "tcp://[fd00::8]:6400", "[/x]"))
    join = "tcp://[fd00::8]:6400"
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "s")
    assert run(["serve", "--role", "decode", "--join", join, "--dry-run"]) == 0
    assert f"the cluster at {join} decides what this decode does" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watching_asks_again_until_ctrl_c_whatever_the_server_says(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ({"workers": [worker(name)]} for name in ("first", "second"))
    answers = iter([first, Unavailable("no server"), second])
    waits: list[float] = []

    def get(*_: object) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Client, "get", get)
    monkeypatch.setattr("mooncake.cli.status.time.sleep", sleep)
    assert run(["status", "--watch", "0.5", *flags]) == 130
    out, err = capsys.readouterr()
    assert waits == [0.5] * 3
    assert out.index("first") < out.index("second")
    assert err.strip() == "mooncake: no server"
    answers = iter([Unauthorized("no such key")])
    assert run(["status", "--watch", "0.5", *flags]) == 4, "it will not be let in later either"


def test_top_shows_what_each_worker_did_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that has started again counts from 0 and has no rate yet."""

    def engine(pid: int, computed: float, reused: float) -> dict[str, Any]:
        counters = {"tokens_computed": computed, "tokens_reused": reused}
        load = {"num_free_blocks": 30, "num_total_blocks": 120, "counters": counters}
        return {"id": "d0", "role": "decode", "pid": pid, "load": load}

    def node(put: float, hit: float) -> dict[str, Any]:
        return {"id": "kv", "pid": 2, "load": {"counters": {"blocks_put": put, "blocks_hit": hit}}}

    answers = [
        {"workers": [engine(1, 1000, 50), node(3, 5)]},
        {"workers": [engine(1, 4000, 250), node(13, 5)]},
        {"workers": [engine(7, 10, 0), node(13, 105)]},
    ]
    left, times, naps = iter(answers), iter([10.0, 12.0, 17.0]), iter([None, None])

    def sleep(_: float) -> None:
        print("---")
        if next(naps, 0) == 0:
            raise KeyboardInterrupt

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(Client, "get", lambda *_: next(left))
    monkeypatch.setattr("mooncake.cli.status.time.sleep", sleep)
    monkeypatch.setattr("mooncake.cli.status.time.monotonic", lambda: next(times))
    assert run(["top"]) == 130
    first, second, third = (
        " ".join(page.split()) for page in capsys.readouterr().out.split("---")[:3]
    )
    assert "75% of 120 blocks" in first
    assert "new/s reused/s" in first
    assert " tokens" not in first
    assert "1,500 tokens 100 tokens" in second
    assert "5 blocks 0 blocks" in second
    assert " tokens" not in third
    assert "0 blocks 20 blocks" in third


def test_a_key_may_come_from_either_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used: list[str | None] = []

    class Asked(Client):
        def __init__(self, url: str, api_key: str | None) -> None:
            used.append(api_key)

        def get(self, path: str) -> object:
            return {}

    monkeypatch.setattr("mooncake.cli.status.Client", Asked)
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert run(["status"]) == 0
    monkeypatch.setenv("MOONCAKE_API_KEY", "ours")
    assert run(["status"]) == 0
    assert run(["status", "--api-key", "flag"]) == 0
    assert used == ["other", "ours", "flag"]
