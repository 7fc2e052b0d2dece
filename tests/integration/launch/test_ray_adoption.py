"""A `mooncake serve` whose workers a Ray of its user has placed is killed: they stay, and the next
one adopts them where they are, with their GPUs. Ray is told of GPUs that are not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.launch.cluster.ray_machines.ray_node import OwnRaylet
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.secrets.credentials import keep_ray_token_private
from tests.support.ports import free_port
from tests.support.serve.adopting import NUM_GPUS, POOLS

pytestmark = pytest.mark.timeout(600)

LOOPBACK = "127.0.0.1"
STOP_S = 200.0


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a Ray."""
    with (
        tempfile.TemporaryDirectory(prefix="kept-") as folder,  # short: sockets lie there
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        for name, value in environment.with_ray({}, here_only=True).items():
            patch.setenv(name, value)
        keep_ray_token_private()
        found = f"{LOOPBACK}:{free_port()}"
        patch.setattr(machine_facts, "num_gpus", lambda: len(POOLS) * NUM_GPUS)
        with contextlib.closing(OwnRaylet(found, LOOPBACK, lambda: False, head=True)):
            yield found


class Adopting:
    """The program that looks after pool nodes."""

    def __init__(self, address: str, secret_file: Path, *words: str) -> None:
        command = [sys.executable, "-m", "tests.support.serve.adopting"]
        self.process = subprocess.Popen(
            [*command, address, str(secret_file), *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        told: Any = next((line for line in lines if line.startswith("[[")), "null")
        [self.nodes, self.held, self.pids] = json.loads(told)

    def end(self) -> None:
        self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_the_next_start_finds_workers_at_their_node_and_adopts_them_with_their_gpus(
    address: str, tmp_path: Path
) -> None:
    """It asks for them in the other order: Ray alone would give each the GPUs of the other, and
    both would start again.
    """
    secret_file = tmp_path / "secret"
    secret_file.write_text("hush")
    secret_file.chmod(0o600)
    first = Adopting(address, secret_file)
    assert first.held == {}
    ended = [os.pidfd_open(pid) for pid in first.pids.values()]
    first.process.send_signal(signal.SIGKILL)
    first.end()
    second = Adopting(address, secret_file, "last-first")
    second.end()
    [node] = second.nodes
    assert second.held == {"kvstore-0": [node, "0,1"], "kvstore-1": [node, "2,3"]}
    assert second.pids == first.pids
    try:
        for each in ended:
            assert select.select([each], [], [], STOP_S)[0], "it was told to leave at the end"
    finally:
        for each in ended:
            os.close(each)
