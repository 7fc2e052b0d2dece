"""One word of a protocol is lost, nobody dies: whoever waits for it asks again, and nothing stays
held for ever.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import FinishReason
from mooncake.base.messages import (
    AbortTask,
    KVReady,
    PinGranted,
    PushEnded,
    PutEnd,
    PutGranted,
    RequestTask,
    Reserved,
    Unpin,
)
from mooncake.instance.config import InstanceConfig
from mooncake.scheduler.config import SchedulerConfig
from tests.support.sim.cluster import Cluster, request, specs

Word = tuple[type[msgspec.Struct], str]
"""A kind of message, and what the address begins with to which it goes."""
TASKS: list[Word] = [(RequestTask, "decode"), (RequestTask, "prefill")]
WORDS: list[Word] = [
    *TASKS,
    *(
        (kind, "")
        for kind in (
            AbortTask, KVReady, PinGranted, PushEnded, PutEnd, PutGranted, Reserved, Unpin,
        )
    ),
]  # fmt: skip


def shown(word: object) -> str:
    return f"{word[0].__name__}{word[1]}" if isinstance(word, tuple) else str(word)


def lose(cluster: Cluster, word: Word, count: int) -> list[str]:
    """Lose the first `count` messages of that kind; returns the list they are written to."""
    kind, to = word
    network, lost = cluster.world.network, []
    send = network.send

    def lossy(source: Any, address: str, message: Any) -> None:
        if isinstance(message, kind) and address.startswith(to) and len(lost) < count:
            lost.append(address)
        else:
            send(source, address, message)

    network.send = lossy  # type: ignore[method-assign]
    return lost


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("word", WORDS, ids=shown)
def test_a_lost_word_holds_nothing_for_ever(word: Word, count: int) -> None:
    cluster = Cluster(
        specs(2, 2),
        scheduler=SchedulerConfig(
            policy="random",
            stall_timeout_s=10.0,
            max_attempts=20,
            fetch_latency_s=0.0,
            remote_bytes_per_s=1e12,
            local_bytes_per_s=1e12,
        ),
        instance=InstanceConfig(push_timeout_s=5.0, quarantine_s=6.0, ask_again_s=2.0),
        pool_blocks=24,
    )
    lost = lose(cluster, word, count)
    head = list(range(30))
    for index in range(24):
        cluster.world.submit(request(f"r{index}", [*head, index, index + 1], max_tokens=6))
        cluster.run(0.008 if index % 3 == 0 else 0.1)
        if index % 3 == 0:
            cluster.world.abort(f"r{index}")
    cluster.settle(120)
    assert lost, "this run never said it"
    cluster.check_streams()
    cluster.check_quiet()
    assert [pool.num_open for pool in cluster.pools()] == [0] * 4


@pytest.mark.parametrize("word", TASKS, ids=shown)
def test_settings_that_were_lost_with_a_task_are_sent_again(word: Word) -> None:
    """The tokens that stop a request decide its answer, so one without them would show."""
    cluster = Cluster(specs(2, 2), scheduler=SchedulerConfig(stall_timeout_s=10.0, max_attempts=20))
    lost = lose(cluster, word, 3)
    stops = frozenset(range(0, 600, 4))
    for index in range(24):
        prompt = [*range(30), index, index + 1]
        cluster.world.submit(
            request(f"r{index}", prompt, max_tokens=20, seed=index, stop_token_ids=stops)
        )
        cluster.run(0.05)
    cluster.settle(120)
    assert len(lost) == 3
    assert cluster.counter("tasks_without_settings") > 0, "no task came without its settings"
    cluster.check_streams()
    reasons = {stream.finals[0].reason for stream in cluster.world.streams.values()}
    assert FinishReason.STOP in reasons
    cluster.check_quiet()
