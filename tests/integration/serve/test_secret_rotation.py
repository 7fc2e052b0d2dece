"""The cluster secret is replaced while a cluster serves: nothing is restarted, no request lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.serve.test_rolling_restart import PROMPT, SMALL, Load
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS = {"prefill-0", "decode-0", "kvstore-0"}
USED = "cluster-secret-file: .* has been read again and is used now"
NUM_PROCESSES = 1 + len(WORKERS)
"""Those that read the file, or a copy of it, and say so: the gateway and the workers."""


def test_a_new_secret_takes_the_place_of_the_old_one_under_load(tmp_path: Path) -> None:
    file, old_file = tmp_path / "secret", tmp_path / "old"
    for each in (file, old_file):
        each.write_text("old secret\n")
    words = (
        *SMALL, "--port", "0", "--cluster-secret-file", str(file), "--log-format", "json",
    )  # fmt: skip
    with ServerProcess(str(nano_checkpoint(tmp_path)), *words) as server:
        server.wait_until_serving()
        address = server.wait_for(r'--join ([^\s"]+)').group(1)
        pids = server.wait_for_workers(WORKERS)
        load = Load([server.url], server.complete(PROMPT, 40))
        try:
            three = ("old secret\nnew secret\n", "new secret\nold secret\n", "new secret\n")
            for number, secrets in enumerate(three, 1):
                file.write_text(secrets)
                server.wait_for(USED, number=number * NUM_PROCESSES)
                load.wait_for(3)
            join = ("--role", "decode", "--join", address, *SMALL[2:])
            with ServerProcess(*join, "--cluster-secret-file", str(file)) as newcomer:
                name = newcomer.wait_for(r"(decode-\S+) \(pid \d+\) serves").group(1)
                server.wait_for_workers(WORKERS | {name})
                load.wait_for(3)
            with ServerProcess(*join, "--cluster-secret-file", str(old_file)) as former:
                former.wait_for(r"cluster-secret: the gateway at \S+ has another one")
        finally:
            load.close()
        assert load.wrong == []
        told = [line for line in server.lines if '"worker":"decode-0"' in line]
        assert told, "what workers log is printed"
        assert [line for line in told if not line.startswith("{")] == [], "as it is"
        assert server.worker_pids().items() >= pids.items(), "nothing was restarted"
        counters = server.get("/v1/cluster/status")["counters"]
        assert not counters.get("attempts_lost", 0)
        assert not counters.get("workers_lost", 0) - 1, "but for the newcomer, which left"
