"""`mooncake explain` and `mooncake simulate --replay`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import MooncakeError, Role
from mooncake.cli.main import run
from mooncake.launch.host.http_client import Client
from mooncake.scheduler.placement.admission import Placement
from mooncake.telemetry.receipt import Bundle, BundleEntry
from tests.support.scheduler.scheduling import conductor, hello, keys_of, request

RECEIPT: dict[str, Any] = {
    "id": "gw-1", "call_id": "chatcmpl-1", "gateway": "gw", "tenant": "one", "begun_at": 1e9,
    "num_sequences": 3,
    "sequences": [
        {
            "request_id": "chatcmpl-1-gw-1-0", "state": "stop", "status": 200, "refused": None,
            "num_prompt_tokens": 300, "num_output_tokens": 8,
            "cache": {
                "hits": {"hbm": 0, "dram": 128, "ssd": 0, "peer": 64},
                "misses": {"not_seen": 40, "out_of_reach": 64},
            },
            "ttft_s": 1.25, "ttft_slo_s": 2.0, "tbt_s": 0.021, "longest_gap_s": 0.06,
            "tbt_slo_s": None, "num_left_out": 2, "choice": None,
            "attempts": [
                {
                    "number": 1, "prefill": "prefill-0", "decode": "decode-0", "start_s": 0.0,
                    "end_s": 0.5, "lost": "worker prefill-0 was lost", "predicted_ttft_s": 0.3,
                    "ttft_s": None, "predicted_tbt_s": 0.02, "num_predicted_cached_tokens": 0,
                    "num_fetch_blocks": 0, "choice": None,
                },
                {
                    "number": 2, "prefill": "prefill-1", "decode": "decode-0", "start_s": 0.5,
                    "end_s": 2.0, "lost": None, "predicted_ttft_s": 0.4, "ttft_s": 0.75,
                    "predicted_tbt_s": 0.02, "num_predicted_cached_tokens": 256,
                    "num_fetch_blocks": 3,
                    "choice": {
                        "prefill": [
                            {
                                "worker": "prefill-1", "taken": True, "ttft_s": 0.4,
                                "queue_s": 0.1, "fetch_s": 0.05, "compute_s": 0.25,
                                "num_cached_tokens": 256, "num_fetch_blocks": 3,
                                "fetch_blocks": {"dram": 1, "ssd": 2},
                            },
                        ],
                        "decode": [
                            {
                                "worker": "decode-0", "taken": True, "tbt_s": 0.02, "push_s": 0.01,
                                "num_short_blocks": 0, "full": False,
                            },
                            {
                                "worker": "decode-1", "taken": False, "tbt_s": 0.09, "push_s": 0.01,
                                "num_short_blocks": 7, "full": False,
                            },
                        ],
                        "num_prefill": 12, "num_decode": 2,
                        "unusable": {"prefill-0": "the request failed there, or was turned away"},
                    },
                },
            ],
            "steps": [
                {"name": "queue", "start_s": 0.5, "end_s": 0.75, "worker": "prefill-1",
                 "attempt": 2, "facts": {}},
                {"name": "transfer", "start_s": 1.0, "end_s": 1.25, "worker": "prefill-1",
                 "attempt": 2, "facts": {"blocks": 5, "bytes": 4096, "path": "shm"}},
                {"name": "decode", "start_s": 1.25, "end_s": None, "worker": "decode-0",
                 "attempt": 2, "facts": {}},
            ],
        },
        {
            "request_id": "chatcmpl-1-gw-1-1", "state": "rejected", "status": 429,
            "refused": "ttft_limit", "num_prompt_tokens": 0, "num_output_tokens": 0, "cache": None,
            "ttft_s": None, "ttft_slo_s": 2.0, "tbt_s": None, "longest_gap_s": None,
            "tbt_slo_s": 0.05, "num_left_out": 0, "attempts": [], "steps": [],
            "choice": {
                "prefill": [
                    {
                        "worker": "prefill-9", "taken": True, "ttft_s": 9.0, "queue_s": 8.5,
                        "fetch_s": 0.0, "compute_s": 0.5, "num_cached_tokens": 0,
                        "num_fetch_blocks": 0, "fetch_blocks": {},
                    },
                ],
                "decode": [], "num_prefill": 1, "num_decode": 0, "unusable": {},
            },
        },
    ],
}  # fmt: skip


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Run the command before a server of these replies; return the exit code and what it asked."""

    def explain(*words: str, replies: dict[str, Any]) -> tuple[int, list[str]]:
        asked: list[str] = []

        def get(_client: Client, path: str) -> Any:
            asked.append(path)
            if path not in replies:
                raise MooncakeError("the server answered 404: no receipt")
            return replies[path]

        monkeypatch.setattr(Client, "get", get)
        return run(["explain", *words]), asked

    return explain


Explain = Callable[..., tuple[int, list[str]]]


def test_a_receipt_is_shown_as_tables_and_a_timeline(
    explain: Explain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    code, _ = explain("gw-1", replies={"/v1/requests/gw-1/receipt": RECEIPT})
    assert code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "gw-1 chatcmpl-1", "tenant one",
        "chatcmpl-1-gw-1-0: stop; 300 prompt tokens, 8 new",
        "first token after 400.0 ms 750.0 ms 2.00 s",
        "a token every 20.0 ms 21.0 ms, longest 60.0 ms",
        "prompt tokens reused 256 128 dram, 64 peer",
        "computed, because 40 not seen, 64 out of reach",
        "attempt 1: prefill-0 -> decode-0; lost: worker prefill-0 was lost",
        "attempt 2: prefill-1 -> decode-0",
        "* prefill-1 400.0 ms 100.0 ms 50.0 ms, blocks: 1 dram, 2 ssd 250.0 ms 256",
        "* decode-0 20.0 ms 10.0 ms yes", "decode-1 90.0 ms 10.0 ms 7 blocks short",
        "11 more were compared for the prompt",
        "prefill-0 was not compared: the request failed there, or was turned away",
        "transfer, prefill-1 blocks 5, bytes 4096, path shm",
        "2 events were too many",
        "chatcmpl-1-gw-1-1: refused with 429: ttft_limit; limits: first token 2.00 s, gaps 50.0 ms",
        "* prefill-9 9.00 s 8.50 s 0.0 ms 500.0 ms 0",
        "1 more sequences are not kept",
    ):  # fmt: skip
        assert words in shown


def test_bars_lie_where_their_steps_do(
    explain: Explain, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    explain("gw-1", replies={"/v1/requests/gw-1/receipt": RECEIPT})
    lines = capsys.readouterr().out.splitlines()
    bars = [
        next(line for line in lines if f" {name}" in line and "#" in line)
        for name in ("queue", "transfer", "decode, decode-0")
    ]
    ends = [(line.index("#"), line.rindex("#")) for line in bars]
    assert ends[0][1] < ends[1][0] <= ends[1][1] <= ends[2][0], "each after the other"


def test_json_is_what_the_server_answers(
    explain: Explain, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = explain("gw-1", "--json", replies={"/v1/requests/gw-1/receipt": RECEIPT})
    assert code == 0
    assert json.loads(capsys.readouterr().out) == RECEIPT


def test_a_name_is_quoted(explain: Explain) -> None:
    code, asked = explain(
        "chatcmpl-a/b?c", replies={"/v1/requests/chatcmpl-a%2Fb%3Fc/receipt": RECEIPT}
    )
    assert code == 0
    assert len(asked) == 1


def test_a_receipt_that_is_not_there_is_an_error(
    explain: Explain, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = explain("gw-1", replies={})
    assert code == 1
    assert "404" in capsys.readouterr().err


def a_bundle() -> dict[str, Any]:
    """Return a bundle of one placement as a server answers it."""
    made = conductor(
        [hello("p0", Role.PREFILL), hello("p1", Role.PREFILL), hello("d0", Role.DECODE)]
    )
    made.keeps_facts = True
    asked = request("r", 100)
    placement = made.place(asked, keys_of(asked), 0, 0.0)
    assert isinstance(placement, Placement)
    assert placement.facts is not None
    entry = BundleEntry(request_id="r", attempt=1, placement=placement.facts.bundled())
    bundle: dict[str, Any] = msgspec.to_builtins(Bundle(receipt="gw-1", placements=[entry]))
    return bundle


def test_a_bundle_is_written_and_replayed(
    explain: Explain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, figures = tmp_path / "bundle.json", tmp_path / "replayed.json"
    replies = {"/v1/cluster/bundles/gw-1": a_bundle()}
    code, _ = explain("gw-1", "--bundle", str(file), replies=replies)
    assert code == 0
    assert "1 placements" in capsys.readouterr().out
    assert run(["simulate", "--replay", str(file), "--json", str(figures)]) == 0
    assert "the same workers" in capsys.readouterr().out
    assert json.loads(figures.read_text()) == {
        "receipt": "gw-1",
        "same": True,
        "placements": [
            {"request_id": "r", "attempt": 1, "then": "p0 -> d0", "now": "p0 -> d0"},
        ],
    }


def test_facts_that_lead_to_other_workers_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the code that places has changed since, or somebody asks what would have been."""
    bundle = a_bundle()
    [entry] = bundle["placements"]
    [p0] = [worker for worker in entry["placement"]["workers"] if worker["id"] == "p0"]
    p0["load"]["queue_s"] = 60.0
    file = tmp_path / "bundle.json"
    file.write_text(json.dumps(bundle))
    assert run(["simulate", "--replay", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "OTHER WORKERS" in shown
    assert "p1 -> d0" in shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not the bundle of a receipt"),
        ('{"receipt": "x", "placements": [], "version": 1}', "version"),
        ('{"receipt": "x", "placements": [{}], "version": 2}', "request_id"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_bundle_is_an_error(
    text: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bundle.json"
    if text is not None:
        file.write_text(text)
    assert run(["simulate", "--replay", str(file)]) == 2
    assert why in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_an_error(
    explain: Explain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = {"/v1/cluster/bundles/gw-1": a_bundle()}
    code, _ = explain("gw-1", "--bundle", str(tmp_path / "no" / "b.json"), replies=replies)
    assert code == 2
    assert "No such file" in capsys.readouterr().err
