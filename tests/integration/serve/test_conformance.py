"""`mooncake conformance --processes` against a real cluster: its processes are killed, stopped and
replaced while clients stream, and workers that joined it end on SIGTERM.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli import main
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--kv-cache-memory-bytes", "32MiB", "--kvstore-dram-bytes", "32MiB")
STOP_S = "18"
"""Longer than a gateway waits for a sign of a worker."""


def conformance(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> dict[str, Any]:
    """Return the verdicts by check, all of which have to be well."""
    capsys.readouterr()
    code = main.run(
        ["conformance", "--base-url", url, "--json", "--processes", "--prompt-tokens", "400",
         "--stop-s", STOP_S, "--deadline-s", "240", "--replacements", "2", *words]
    )  # fmt: skip
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert code == 0, verdicts
    assert {verdict["result"] for verdict in verdicts} == {"pass"}, verdicts
    return {verdict["check"]: verdict for verdict in verdicts}


def test_ours_passes_what_ends_its_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(nano_checkpoint(tmp_path))
    with ExitStack() as running:
        server = running.enter_context(
            ServerProcess(model, "--port", "0", "--dtype", "float32", "--prefill", "2", *SMALL)
        )
        server.wait_until_serving()
        ids = set(server.worker_pids())
        found = conformance(
            capsys, server.url, "--checks",
            "kill-prefill,kill-decode,stop-prefill,replace-prefill",
        )  # fmt: skip
        assert "new prompts after" in found["stop-prefill"]["evidence"], found["stop-prefill"]
        pids = server.wait_for_workers(ids)

        address = server.wait_for(r"--role ROLE --join (\S+)").group(1)
        named: list[str] = []
        for role in ("prefill", "decode"):
            one = running.enter_context(
                ServerProcess("--role", role, "--join", address, *SMALL[:2])
            )
            one.wait_for(r"\(pid \d+\) serves")
            named += [f"--{role}-pid", f"{one.process.pid},{pids[f'{role}-0']}"]
        found = conformance(capsys, server.url, "--checks", "rollout", *named)
        assert "2 processes ended one after another" in found["rollout"]["evidence"]
        server.wait_for_workers(ids)
