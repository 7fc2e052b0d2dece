"""`mooncake train` and `mooncake eval`: settings, the page of curves, exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mooncake.api.http.client import Answer, HttpClient
from mooncake.base import ConfigError
from mooncake.bench import serve
from mooncake.cli.measure import eval as evaluation
from mooncake.cli.models import train
from mooncake.launch.config.config import read_settings
from mooncake.launch.config.shipped import configs
from mooncake.launch.config.train_settings import Train
from mooncake.tasks.mix import TASKS, evaluation_samples


def test_the_shipped_configuration_is_one() -> None:
    file = str(configs() / "train" / "k2-demo.yaml")
    wanted = read_settings(Train, {}, file, {})
    assert wanted.preset == "k2-demo"
    assert set(dict(wanted.tasks)) <= set(TASKS)
    assert dict(wanted.tasks)["call"] >= 5


def test_tasks_may_be_flags() -> None:
    given = {"out": "x", "tasks": ["sum=2", "copy=0.5"]}
    assert read_settings(Train, given, None, {}).tasks == (("sum", 2.0), ("copy", 0.5))


@pytest.mark.parametrize(
    ("tasks", "why"),
    [("quetion=1", "did you mean question"), ("sum", "above zero"), ("sum=-1", "above")],
)
def test_a_wrong_weight_is_named(tasks: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_settings(Train, {"out": "x", "tasks": [tasks]}, None, {})


def test_stages_are_read_as_the_settings_they_change() -> None:
    given = {"out": "x", "tasks": ["sum=1"], "stages": [
        {"steps": "2k", "warmup-steps": 0, "tasks": {"object": 2}}, '{"rate": 0.001}',
    ]}  # fmt: skip
    wanted = read_settings(Train, given, None, {})
    assert wanted.stages == (
        {"steps": 2000, "warmup_steps": 0, "tasks": {"object": 2.0}}, {"rate": 0.001},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ({"step": 1}, "'step' is not one of .*did you mean steps"),
        ({"seed": 1}, "'seed' is not one of"),
        ({"tasks": {"quetion": 1}}, "did you mean question"),
        ({"steps": 0}, "at least 1"),
        ("{", "not JSON"),
        (["steps"], "is not a JSON object"),
    ],
)
def test_a_wrong_stage_is_named(stage: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_settings(Train, {"out": "x", "tasks": ["object=1"], "stages": [stage]}, None, {})


def test_a_signal_lets_the_step_end_and_the_second_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with train._stop_signals() as stopped:
        assert not stopped.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "after this step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def line(step: int, loss: float, **more: Any) -> dict[str, Any]:
    numbers = {"max_logit": 3.0 * step, "tokens_per_s": 100.0, "mtp_loss": None}
    return {"step": step, "tokens": 50 * step, "loss": loss, **numbers, **more}


def test_the_page_draws_every_run() -> None:
    ours = [line(1, 6.0), line(2, 4.0, scores={"sum": 0.5}), line(3, 3.0)]
    page = train.page({"muonclip": ours, "adamw": [line(1, 6.0), line(2, 5.0)]})
    assert page.count("<svg") == 4
    for word in ("muonclip", "adamw", "sum", "max logit", "tokens per s"):
        assert word in page


def test_a_run_without_scores_has_a_page() -> None:
    assert train.page({"muonclip": [line(1, 6.0)]}).count("<svg") == 3


class Server:
    """In place of connections: answers sums, right where `right` says so."""

    def __init__(self, right: bool) -> None:
        self._right = {
            sample.messages[-1]["content"]: sample.answer if right else {"content": "?"}
            for sample in evaluation_samples("sum", 5, seed=0)
        }

    async def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, on_data: Any
    ) -> Answer:
        asked = json.loads(body)["messages"][-1]["content"]
        message = self._right.get(asked, {"content": "?"})
        on_data(json.dumps({"choices": [{"message": message}]}).encode(), 0.0)
        return Answer(200, "OK")


def evaluated(monkeypatch: pytest.MonkeyPatch, right: bool, **given: Any) -> int:
    server = Server(right)

    async def request(self: HttpClient, *arguments: Any) -> Answer:
        return await server.request(*arguments)

    async def first_model(*_: Any) -> str:
        return "tiny"

    monkeypatch.setattr(HttpClient, "request", request)
    monkeypatch.setattr(serve, "first_model", first_model)
    words = {"tasks": "sum", "num_samples": "5", **given}
    return evaluation.run(read_settings(evaluation.Eval, words, None, {}))


def test_scores_are_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    assert evaluated(monkeypatch, True, json=str(out), at_least=["sum=0.9"]) == 0
    document = json.loads(out.read_text())
    assert document["model"] == "tiny"
    assert document["tasks"]["sum"]["accuracy"] == 1.0
    assert document["tasks"]["sum"]["standard_error"] == 0.0
    assert "100.0%" in capsys.readouterr().out


def test_calls_of_tools_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(monkeypatch, False, tasks="sum") == 0
    assert "trigger similarity" not in capsys.readouterr().out
    assert evaluated(monkeypatch, False, tasks="call") == 0
    said = capsys.readouterr().out
    assert "5 answers to requests with tools: trigger similarity 0.0%, schema accuracy -" in said


def test_a_score_below_the_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluated(monkeypatch, False) == 0
    assert evaluated(monkeypatch, False, at_least=["sum=0.9"]) == 1


def test_mistakes_are_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not among"):
        evaluated(monkeypatch, True, at_least=["copy=0.9"])
    with pytest.raises(ConfigError, match="directory"):
        evaluated(monkeypatch, True, json="/not/there/x.json")
    with pytest.raises(ConfigError, match="base-url"):
        evaluated(monkeypatch, True, base_url="nowhere")
