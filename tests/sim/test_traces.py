"""What workers tell of traced requests, through the shipped machines on simulated wires."""

from __future__ import annotations

import msgspec

from mooncake.base import FinishReason, GenerateRequest
from mooncake.scheduler.config import SchedulerConfig
from mooncake.telemetry.events import FirstToken, Placed, Worked
from mooncake.telemetry.traces import Span
from tests.support.sim.cluster import Cluster, engine_config, request, specs
from tests.support.traces import Exported, is_whole, named, outline

PROMPT = list(range(1, 60))
EAGER = SchedulerConfig(fetch_latency_s=0.0, local_bytes_per_s=1e12, remote_bytes_per_s=1e12)


def traced(name: str, prompt: list[int], max_tokens: int = 8) -> GenerateRequest:
    return msgspec.structs.replace(request(name, prompt, max_tokens), traced=True)


def tree(cluster: Cluster, name: str) -> Span:
    """Return the tree of a request that has ended, as the events of the run tell it."""
    exported = Exported()
    trace = exported.tracer.begin("", "", 0.0)
    assert trace is not None
    assert trace.follow([name])
    for event in cluster.events.events:
        exported.tracer.record(event)
    exported.tracer.end(trace, cluster.world.heap.now())
    return exported.root


def worked(root: Span) -> list[tuple[str, str]]:
    return sorted(
        (str(span.attributes["mooncake.worker"]), span.name)
        for placement in named(root, "placement")
        for span in placement.children
    )


def test_prefill_and_decode_are_in_one_tree() -> None:
    cluster = Cluster(specs(1, 1), prefill=engine_config(max_chunk_tokens=10))
    stream = cluster.world.submit(traced("r", PROMPT))
    cluster.run(5)
    cluster.check_streams()
    root = tree(cluster, "r")
    assert is_whole(root)
    prefill_id, decode_id = (
        next(getattr(e, role) for e in cluster.events.events if isinstance(e, Placed))
        for role in ("prefill", "decode")
    )
    assert worked(root) == sorted(
        [(prefill_id, name) for name in ("queue", "prefill", "transfer")]
        + [(decode_id, name) for name in ("reserve", "decode")]
    )
    [prefill], [transfer], [decode] = (
        named(root, name) for name in ("prefill", "transfer", "decode")
    )
    chunks = [event.attributes for event in prefill.events]
    assert [chunk["mooncake.start"] for chunk in chunks] == list(range(0, 59, 10))
    assert sum(int(str(chunk["mooncake.tokens"])) for chunk in chunks) == len(PROMPT)
    assert prefill.attributes["mooncake.tokens"] == len(PROMPT)
    assert transfer.attributes["mooncake.blocks"] == 15
    assert int(str(transfer.attributes["mooncake.bytes"])) > 0
    assert prefill.start_s < transfer.start_s < prefill.end_s < decode.start_s
    assert decode.attributes["mooncake.tokens"] == len(stream.tokens) - 1
    cluster.check_quiet()


def test_a_fetched_prefix_is_shown_with_where_it_came_from() -> None:
    cluster = Cluster(specs(2, 1), scheduler=EAGER, restart_s=None)
    cluster.world.submit(request("first", PROMPT))
    cluster.run(5)
    computed_by = next(e.worker_id for e in cluster.events.events if isinstance(e, FirstToken))
    cluster.world.kill(computed_by)
    cluster.run(1)
    cluster.world.submit(traced("second", [*PROMPT, 5, 6, 7]))
    cluster.run(5)
    [fetch], [prefill] = (named(tree(cluster, "second"), name) for name in ("fetch", "prefill"))
    assert fetch.attributes["mooncake.blocks"] == len(PROMPT) // 4
    assert int(str(fetch.attributes["mooncake.bytes"])) > 0
    assert str(fetch.attributes["mooncake.from"]).startswith("kvstore")
    assert prefill.attributes["mooncake.cached_tokens"] == len(PROMPT) // 4 * 4


def test_a_decode_worker_that_does_all_of_it_tells_all_of_it() -> None:
    cluster = Cluster(specs(0, 1, kvstores=False))
    cluster.world.submit(traced("r", PROMPT))
    cluster.run(5)
    root = tree(cluster, "r")
    assert [name for _, name in worked(root)] == ["decode", "prefill", "queue"]
    [prefill], [decode] = named(root, "prefill"), named(root, "decode")
    assert prefill.end_s == decode.start_s


def test_a_request_whose_worker_was_lost_goes_on_in_the_same_tree() -> None:
    cluster = Cluster(specs(1, 2), restart_s=None)
    stream = cluster.world.submit(traced("r", PROMPT, max_tokens=60))
    while len(stream.tokens) < 10:
        cluster.run(0.01)
    lost = next(e.decode for e in cluster.events.events if isinstance(e, Placed))
    cluster.world.kill(lost)
    cluster.run(20)
    cluster.check_streams()
    assert stream.finals[0].reason is FinishReason.LENGTH
    root = tree(cluster, "r")
    assert is_whole(root)
    first, second = named(root, "placement")
    assert (bool(first.error), second.error) == (True, None)
    assert first.attributes["mooncake.decode_worker"] == lost
    assert second.attributes["mooncake.decode_worker"] != lost
    assert "decode" in [span.name for span in second.children]
    assert outline(root)[0] == "api"
    cluster.check_quiet()


def test_a_request_that_is_not_traced_is_told_nothing_of() -> None:
    cluster = Cluster(specs(1, 1))
    cluster.world.submit(request("r", PROMPT))
    cluster.run(5)
    assert not any(isinstance(event, Worked) for event in cluster.events.events)
