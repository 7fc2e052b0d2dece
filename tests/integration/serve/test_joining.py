"""Processes of each role join a cluster by the addresses that its first process prints."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

import pytest

from tests.support.docs.blocks import words_of
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DTYPE = ("--dtype", "float32")
PAGES = ("--kv-cache-memory-bytes", "32MiB")
POOL = ("--dram", "32MiB")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def test_each_role_joins_a_first_process_without_workers_by_what_it_prints(tmp_path: Path) -> None:
    """The address ends in a key. By a typed one, which does not, they join in
    tests/integration/hosts/test_without_ray.py.
    """
    model = str(nano_checkpoint(tmp_path))
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(16))
    secret = ("--cluster-secret-file", str(file))
    none = ("--prefill", "0", "--decode", "0", "--kvstore", "0")

    def typed(by_key: str = "") -> list[list[str]]:
        told = {"8001": "0", "DIR": model, "tcp://HOST:PORT#KEY": by_key}
        found = words_of("docs/roles.md", "mooncake serve DIR --headless", told)
        return [words for _, *words in found]

    with contextlib.ExitStack() as opened:

        def serve(*words: str) -> ServerProcess:
            return opened.enter_context(ServerProcess(*words, *secret))

        def id_of(worker: ServerProcess, says: str) -> str:
            return worker.wait_for(rf"((?:prefill|decode|kvstore)-\S+) .*{says}").group(1)

        first = serve(*typed()[0], *none, *DTYPE, *PAGES)
        by_key = first.wait_for(r"--role ROLE --join (\S+)").group(1)
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+#[0-9a-f]{64}", by_key)
        _, decode, of_gateway = typed(by_key)
        gateway = serve(*of_gateway)
        workers = set[str]()
        for role, words in (("prefill", PAGES), ("decode", PAGES), ("kvstore", POOL)):
            joined = serve(*(role if word == "decode" else word for word in decode), *words)
            workers.add(id_of(joined, "serves"))
        node = ("--role", "kvstore", "--join", by_key, "--node-id", "alone", "--admin-port", "0")
        workers.add(id_of(serve(model, *DTYPE, *node, *POOL), "has joined the pool"))
        gateway.wait_until_serving()
        gateway.wait_for_workers(workers)
        assert len(gateway.complete(PROMPT, 24)) == 24
