"""`mooncake serve --autoscale`: real processes come with the load and leave when it has gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_SEQS = 4
NUM_CLIENTS = 3 * NUM_SEQS
"""More at once than one engine takes."""
NUM_TOKENS = 200
FEW_TOKENS = 20
PAUSE_S = 1.0


def test_a_decode_worker_comes_with_the_load_and_leaves_when_it_has_gone(tmp_path: Path) -> None:
    """Requests run all the time, also while it comes and leaves, and every answer is right."""
    prompts = [[7 + number, 8, 9, 10] for number in range(NUM_CLIENTS)]
    few = {"prefill-0", "decode-0"}
    with ServerProcess(
        str(nano_checkpoint(tmp_path)), "--port", "0", "--dtype", "float32", "--kvstore", "0",
        "--kv-cache-memory-bytes", "16MiB", "--max-model-len", "512",
        "--max-num-seqs", str(NUM_SEQS),
        "--autoscale", "prefill=1..1,decode=1..2,start=1,quiet=15",
    ) as server:  # fmt: skip
        server.wait_until_serving()
        first = server.wait_for_workers(few)
        expected = [server.complete(prompt, NUM_TOKENS) for prompt in prompts]
        load_is_gone, all_is_over = threading.Event(), threading.Event()

        def ask_much(number: int) -> None:
            while not load_is_gone.is_set():
                assert server.complete(prompts[number], NUM_TOKENS) == expected[number]

        def ask_little() -> None:
            while not all_is_over.wait(PAUSE_S):
                assert server.complete(prompts[0], FEW_TOKENS) == expected[0][:FEW_TOKENS]

        with ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
            asking = [clients.submit(ask_little)]
            asking += [clients.submit(ask_much, number) for number in range(NUM_CLIENTS)]
            try:
                with_one_more = server.wait_for_workers(few | {"decode-1"})
                load_is_gone.set()
                for each in asking[1:]:
                    each.result()
                last = server.wait_for_workers(few)
            finally:
                load_is_gone.set()
                all_is_over.set()
            for each in asking:
                each.result()
        assert last == first == {name: with_one_more[name] for name in few}
        assert not any("Traceback" in line for line in server.lines), server.output
