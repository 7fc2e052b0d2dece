"""A cluster whose file has Ray place the engines: `mooncake up` makes each machine a node of Ray.
Ray and all that looks after the engines may end; they stay as they are.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

import mooncake
from tests.support.hosts.hosts import hosts
from tests.support.hosts.placed import ACTOR, END_S, GCS, NODE, RAYLET, UP, WORKERS, Placed
from tests.support.serve.server_process import nano_checkpoint

NUM_KILLS = int(os.environ.get("MOONCAKE_NUM_KILLS", "0"))
"""How often all of `KILLS` are made: `make soak-nodes` says. 0: the first ones are, once."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # Ray gives its processes 15 s to start, whatever else runs
    pytest.mark.timeout(1500 * max(NUM_KILLS, 1)),
]

FIRST = [(GCS, False), (NODE, False), (UP, True)]
KILLS = [*FIRST, (ACTOR, False), (RAYLET, False), (UP, False)]
"""What is killed on Ray's head, and whether it comes back only once the other machine is that. Of
Ray's two processes one is among the first: either's end is the end of its node.
"""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 200
NUM_WORKERS = sum(WORKERS.values())


def test_engines_outlive_all_that_looks_after_them(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        [sampled] = llm.generate([PROMPT], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    alone = list(sampled.outputs[0].token_ids)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        cluster = Placed(machines, model)
        cluster.type_up(machines[0]).wait_for("this machine is the head of Ray", END_S)
        cluster.type_up(machines[1])
        for program in cluster.programs.values():
            program.wait_for("are here", END_S)
        cluster.await_watched(1)
        before = cluster.workers()
        assert sum(map(len, before.values())) == NUM_WORKERS

        for pattern, moves in KILLS * NUM_KILLS or FIRST:
            head = cluster.head()
            [other] = [each for each in machines if each is not head]
            num_watched = cluster.num_watched()
            asking = Future[list[int]]()
            thread = threading.Thread(
                target=lambda asked, host: asked.set_result(
                    cluster.answer(host, PROMPT, NUM_TOKENS)
                ),
                args=(asking, other),
            )
            thread.start()
            if pattern == ACTOR:
                cluster.kill_actors(head)
            else:
                cluster.kill(head, pattern)
            if moves:
                cluster.programs[other.name].wait_for("this machine is the head of Ray", END_S)
            if pattern == UP:
                cluster.type_up(head)
            if pattern != ACTOR:  # whoever looks after them all is still the same
                cluster.await_watched(num_watched + 1)
            assert cluster.head() is other or not moves
            thread.join()
            assert asking.result(0) == alone, pattern
            assert cluster.workers() == before, f"{pattern}: no weights are loaded again"

        lost = cluster.head()
        cluster.programs[lost.name].wait_for("are here", END_S)
        assert cluster.answer(lost, PROMPT, NUM_TOKENS) == alone
        [left] = [each for each in machines if each is not lost]
        num_watched = cluster.num_watched()
        lost.vanish()
        cluster.machines = [left]
        cluster.await_watched(num_watched + 1)
        assert cluster.answer(left, PROMPT, NUM_TOKENS) == alone
        after = cluster.workers()[left.name]
        assert len(after) == NUM_WORKERS, "what the lost machine had is here now"
        assert before[left.name] < after
        here = cluster.programs[left.name]
        assert here.stop(seconds=END_S) == 0, here.output
