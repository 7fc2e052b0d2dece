"""`mooncake bench` from the command line: what is sent, printed and saved; mistakes in one line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli import main as cli
from tests.support.api.server import ScriptedBackend, live_api_server, says
from tests.support.waiting import LONG_S


class ApiServer:
    """A live API server in a thread of its own."""

    def __init__(self) -> None:
        self.backend = ScriptedBackend(says("hello"))
        self.url = ""
        self._open = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with live_api_server(self.backend) as self.url:
            self._open.set()
            await self._stop.wait()

    def __enter__(self) -> ApiServer:
        self._thread.start()
        assert self._open.wait(LONG_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG_S)


@pytest.fixture
def api_server() -> Iterator[ApiServer]:
    with ApiServer() as opened:
        yield opened


def bench(api_server: ApiServer, *words: str) -> int:
    lengths = ("--random-input-len", "9", "--random-output-len", "4")
    fixed = ("--base-url", api_server.url, "--skip-tokenizer-init", "--disable-tqdm", *lengths)
    return cli.run(["bench", "serve", *fixed, *words])


def test_run_prints_the_table_and_saves_the_result(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "3", "--max-concurrency", "2", "--percentile-metrics", "ttft,e2el"]
    words += ["--metric-percentiles", "50,99", "--metadata", "version=1", "--goodput", "e2el:60000"]
    where = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert bench(api_server, *words, *where) == 0
    shown = capsys.readouterr().out
    assert "Successful requests:                     3" in shown
    assert "P50 E2EL (ms):" in shown
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["model_id"], saved["backend"], saved["version"]) == ("tiny", "openai", "1")
    assert (saved["completed"], saved["request_rate"], saved["max_concurrency"]) == (3, "inf", 2)
    assert saved["total_input_tokens"] == 27
    assert saved["p50_e2el_ms"] > 0
    assert "ttfts" not in saved
    assert len(api_server.backend.requests) == 3
    for request in api_server.backend.requests:
        assert len(request.prompt_tokens) == 9
        assert request.sampling.max_tokens == 4
        assert request.sampling.ignore_eos


def test_results_are_detailed_and_appended_when_asked_for(
    api_server: ApiServer, tmp_path: Path
) -> None:
    where = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    for _ in range(2):
        assert bench(api_server, "--num-prompts", "2", "--append-result", *where) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [len(run["ttfts"]) for run in saved] == [2, 2]


def test_sampling_and_extra_fields_are_sent(api_server: ApiServer) -> None:
    words = ["--temperature", "0.5", "--top-k", "7", "--extra-body", '{"min_tokens": 2}']
    assert bench(api_server, "--num-prompts", "1", *words) == 0
    sampling = api_server.backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_tokens) == (0.5, 7, 2)


def test_run_in_which_all_fails_is_a_failure(
    api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(api_server, "--num-prompts", "1", "--model", "other") == 1
    assert "404" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "num-prompts"),
        (["--max-concurrency", "0"], "max-concurrency"),
        (["--request-rate", "0"], "request-rate"),
        (["--burstiness", "-1"], "burstiness"),
        (["--request-rate", "fast"], "request-rate: 'fast' is not a number"),
        (["--goodput", "speed:1"], "goodput"),
        (["--percentile-metrics", "ttft,xyz"], "percentile-metrics"),
        (["--metric-percentiles", "101"], "metric-percentiles"),
        (["--metric-percentiles", "p99"], "metric-percentiles"),
        (["--header", "nothing"], "header"),
        (["--metadata", "nothing"], "metadata"),
        (["--extra-body", "[1]"], "extra-body"),
        (["--extra-body", "{"], "extra-body"),
        (["--ramp-up-strategy", "linear"], "ramp-up-start-rps"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/not/there"], "/not/there"),
        (["--dataset-name", "unheard-of"], "dataset-name: 'unheard-of' is not one of random"),
        (["--base-url", "nowhere"], "base-url"),
        (["--base-url", "http://127.0.0.1:1"], "--model"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--base-url", "--num-prompts"} & set(words)
    usual: dict[str, Any] = {"--num-prompts": "1"}
    fill = [part for name, value in usual.items() if name not in given for part in (name, value)]
    model = [] if "http://127.0.0.1:1" in words else ["--model", "m", "--skip-tokenizer-init"]
    assert cli.run(["bench", "serve", *fill, *model, *words]) == (2 if model else 3)
    error = capsys.readouterr().err
    assert error.startswith("mooncake: ")
    assert message in error
    assert "Traceback" not in error
