"""`mooncake conformance` against servers without a model: one that is sound, and one for each
complaint that has it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake.bench.conformance.complaints import CHECKS, COMPLAINTS
from mooncake.bench.conformance.suite import WORK
from mooncake.cli.main import run
from tests.support.faulty_server import Faults, faulty_server

SMALL = ("--prompt-tokens", "128", "--output-tokens", "8", "--deadline-s", "3", "--lease-s", "0.1")
ROOT = Path(__file__).parents[2]


def conformance(
    capsys: pytest.CaptureFixture[str], faults: Faults, *words: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code and the verdicts by check."""
    with faulty_server(faults) as url:
        code = run(["conformance", "--base-url", url, "--json", *SMALL, *words])
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    return code, {verdict["check"]: verdict for verdict in verdicts}


def test_a_sound_server_passes_and_the_rest_says_what_it_would_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with faulty_server(Faults()) as other:
        code, found = conformance(capsys, Faults(gives_handles=True), "--other-url", other)
    failed = {name: each["why"] for name, each in found.items() if each["result"] == "fail"}
    # The ratio of two equal servers is 1 on a calm machine, and anything on a busy one.
    assert set(failed) <= {"short-prompts"}, failed
    assert code == int(bool(failed))
    assert list(found)[: len(CHECKS)] == list(CHECKS)
    assert {each["complaint"] for each in found.values()} == set(COMPLAINTS)
    for name in ("aborts", "handles", "cold-warm", "one-end", "refusals", "same-answers", "hits"):
        assert found[name]["result"] == "pass"
        assert found[name]["evidence"]
    for name in ("kill-prefill", "transport", "rollout", "blacklist"):
        assert found[name]["result"] == "not possible here"
        assert found[name]["why"]


@pytest.mark.parametrize(
    ("faults", "check", "why"),
    [
        (Faults(leaks_on_abort=True), "aborts", "KV in use was 0 before"),
        (Faults(warm_differs=True), "cold-warm", "a prompt of 17 tokens, warm: token 7"),
        (Faults(hangs_one_in=5), "one-end", "did not end within 1 s"),
        (Faults(refuses_in_html=True), "refusals", "without a message in JSON"),
        (Faults(tells_cached=False), "hits", "cached_tokens is not in an answer"),
        (
            Faults(gives_handles=True, forged_handles_give_garbage=True),
            "handles",
            "blocks out of range: status 200: token 0",
        ),
        (
            Faults(gives_handles=True, old_handles_give_their_prompt=True),
            "handles",
            "a handle used twice: status 200: token 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_each_complaint_is_found(
    capsys: pytest.CaptureFixture[str], faults: Faults, check: str, why: str
) -> None:
    code, found = conformance(capsys, faults, "--checks", check, "--deadline-s", "1")
    assert code == 1
    assert list(found) == [check]
    assert found[check]["result"] == "fail"
    assert why in found[check]["why"]
    assert found[check]["issues"]


def test_other_answers_of_another_server_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    with faulty_server(Faults(warm_differs=True)) as other:
        words = ("--other-url", other, "--checks", "same-answers", "--seed", "1")
        assert conformance(capsys, Faults(), *words)[0] == 0
        code, found = conformance(capsys, Faults(), *words)  # now its prompts are warm there
    assert code == 1
    assert "instead of" in found["same-answers"]["why"]


SLEEP = "sleep 86399"
"""What stands in for a process of the server, which the test's own server does not need."""


@pytest.fixture
def sleepers() -> Iterator[list[str]]:
    """The ids of processes that a check may end and stop, and those started in their place."""
    started = [subprocess.Popen(SLEEP.split()) for _ in range(3)]
    yield [str(process.pid) for process in started]
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE or child.cmdline() == SLEEP.split():
            child.kill()
            child.wait()
    for process in started:
        process.wait()


LEFT_RUNNING = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A process that a check has started outlives the command, on purpose."""


def ending(pids: list[str]) -> list[str]:
    first, second, decode = pids
    return [
        "--processes", "--prefill-pid", f"{first},{second}", "--prefill-command", SLEEP,
        "--decode-pid", decode, "--decode-command", SLEEP, "--stop-s", "1",
        "--replacements", "1", "--checks",
        "kill-prefill,kill-decode,stop-prefill,replace-prefill,rollout",
    ]  # fmt: skip


@LEFT_RUNNING
def test_a_server_that_needs_none_of_its_processes_passes_what_ends_them(
    capsys: pytest.CaptureFixture[str], sleepers: list[str]
) -> None:
    code, found = conformance(capsys, Faults(), *ending(sleepers))
    assert code == 0, found
    assert {each["result"] for each in found.values()} == {"pass"}
    assert "3 processes ended one after another" in found["rollout"]["evidence"]
    assert "new prompts after" in found["stop-prefill"]["evidence"]


@LEFT_RUNNING
def test_answers_that_change_when_a_process_goes_on_are_found(
    capsys: pytest.CaptureFixture[str], sleepers: list[str]
) -> None:
    words = [*ending(sleepers), "--checks", "stop-prefill"]
    code, found = conformance(capsys, Faults(warm_differs=True), *words)
    assert code == 1
    assert "differs from the calm one" in found["stop-prefill"]["why"]
    code, found = conformance(capsys, Faults(fresh_change=True), *words)
    assert code == 1
    assert "has another answer afterwards" in found["stop-prefill"]["why"]


def test_lines_name_check_complaint_and_issues(capsys: pytest.CaptureFixture[str]) -> None:
    with faulty_server(Faults()) as url:
        assert run(["conformance", "--base-url", url, "--checks", "hits,rollout", *SMALL]) == 0
    told = capsys.readouterr().out
    assert "NOT POSSIBLE HERE rollout: " in told
    assert "PASS              hits: 128 of 128 tokens" in told
    assert "Mooncake#972, Mooncake#1160" in told


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], 3, "name one with --model"),
        (["--base-url", "nowhere"], 2, "base-url"),
        (["--prefill-pid", "1"], 2, "only with --processes"),
    ],
)
def test_refusals_are_json_where_json_is_asked_for(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert run(["conformance", "--json", *words]) == code
    captured = capsys.readouterr()
    assert message in json.loads(captured.out)["error"]["message"]
    assert message in captured.err


def test_every_check_has_its_complaint_and_tests_that_are_named_are_there() -> None:
    assert WORK.keys() == CHECKS.keys()
    assert set(CHECKS.values()) <= set(COMPLAINTS)
    for complaint in COMPLAINTS.values():
        assert complaint.issues
        assert complaint.tests
        for name in complaint.tests:
            assert (ROOT / name).is_file(), name
