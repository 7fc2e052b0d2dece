"""Three pool nodes as processes: one goes as planned, and its blocks are warm on the others."""

from __future__ import annotations

import json
import random
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from mooncake.cli import main as cli
from tests.support.kvstore.pool_process import SECRET, PoolProcess
from tests.support.model.checkpoints import write_config_only

_ADDRESS = re.compile(r"clients and other nodes: (\S+)")


def test_a_planned_removal_loses_no_warm_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_config_only(tmp_path / "small")
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    with ExitStack() as running:
        first = running.enter_context(PoolProcess(model, tmp_path / "log0", "--dram", "1MiB"))
        match = _ADDRESS.search(first.output)
        assert match is not None
        join = ("--join", match.group(1), "--dram", "1MiB")
        second, going = (
            running.enter_context(
                PoolProcess(model, tmp_path / f"log{n}", *join, "--node-id", f"n{n}")
            )
            for n in (1, 2)
        )
        with going.session() as session:
            size = session.block_bytes
            blocks = {n.to_bytes(16, "big"): random.Random(n).randbytes(size) for n in range(20)}
            assert session.put(blocks) == list(blocks)
        assert cli.run(["pool", "drain", "--url", going.url, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["drained"] is True
        assert shown["blocks"] == {"over": True, "num_copied": 20}
        assert going.stop(signal.SIGTERM) == 0
        found: dict[bytes, bytes] = {}
        for node in (first, second):
            with node.session() as session:
                for key in blocks:
                    found.update(zip([key], session.get([key]), strict=False))
        assert found == blocks
