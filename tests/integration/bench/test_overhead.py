"""A worker that dies under `benchmarks overhead` ends it, instead of leaving it to wait."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import overhead
from tests.support.waiting import LONG_S

WAIT = "import sys; print(sys.argv[1], flush=True); sys.stdin.read()"


def test_who_waits_for_the_gateway_learns_that_a_worker_died() -> None:
    gateway = subprocess.Popen(
        [sys.executable, "-c", WAIT, "started"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    worker = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], text=True)
    dead: list[str] = []
    with gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == "started\n"
        overhead.end_with(worker, gateway, dead).join(LONG_S)
        assert gateway.stdout.readline() == "", "as a cluster waits for `ready`"
    assert dead == ["a worker ended with code 7: see what it printed above"]


def test_a_cluster_whose_worker_dies_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[str]:
        code = WAIT if "benchmarks.support.null_gateway" in command else "raise SystemExit(7)"
        argument = '{"url": "", "workers": [{}]}'
        return started([sys.executable, "-c", code, argument], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(overhead.subprocess, "Popen", popen)
    with (
        pytest.raises(RuntimeError, match="a worker ended with code 7"),
        overhead.cluster(tmp_path, split=False),
    ):
        pytest.fail("it has no workers")
