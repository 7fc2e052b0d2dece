"""`mooncake plan --live` prints what a running server advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.cli.main import run
from mooncake.cli.measure.plan import TRIES
from mooncake.launch.host.http_client import Client

ADVICE = [
    {"role": "prefill", "now": 1, "wanted": 3, "why": "2.10 replicas' work of prompts"},
    {"role": "decode", "now": 2, "wanted": 2, "why": "90 sequences at once"},
]


def test_the_advice_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[str] = []

    def get(_: Client, path: str) -> object:
        asked.append(path)
        return {"replicas": ADVICE}

    monkeypatch.setattr(Client, "get", get)
    written = tmp_path / "advice.json"
    assert run(["plan", "--live", "--json", str(written)]) == 0
    shown = capsys.readouterr().out
    assert asked == ["/v1/cluster/status"]
    assert "2.10 replicas' work of prompts" in " ".join(shown.split())
    assert json.loads(written.read_text()) == ADVICE


def test_a_server_that_gives_no_advice_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("mooncake.cli.measure.plan.time.sleep", waits.append)
    monkeypatch.setattr(Client, "get", lambda *_: {"workers": []})
    assert run(["plan", "--live", "--url", "http://h:1"]) == 1
    said = capsys.readouterr().err
    assert "the server at http://h:1 gives no advice: it is of an older release" in said
    assert waits == [1.0] * (TRIES - 1)


def test_a_server_that_has_just_started_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"replicas": []}, {"replicas": ADVICE}])
    monkeypatch.setattr("mooncake.cli.measure.plan.time.sleep", lambda _: None)
    monkeypatch.setattr(Client, "get", lambda *_: next(answers))
    assert run(["plan", "--live"]) == 0
