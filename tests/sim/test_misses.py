"""Why prompts were not cached, in a whole simulated cluster in which every reason occurs."""

from __future__ import annotations

from msgspec.structs import asdict, replace

from mooncake.base import CostSample, GenerateRequest
from mooncake.base.request import CacheHits, CacheMisses, CacheUse
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.world.world import Stream
from mooncake.telemetry.metrics import Metrics
from tests.sim.test_cluster import PROMPT, prompts
from tests.sim.test_pool import kill_all
from tests.support.sim.cluster import LAYOUT, Cluster, engine_config, request, specs

PROFILE = [
    CostSample(num_new, context, 1, 0.0005 * num_new)
    for num_new in (4, 8, 24, 60)
    for context in (0, 20, 60)
]
FETCH_COSTS = SchedulerConfig(
    fetch_latency_s=0.004, local_bytes_per_s=1e12, remote_bytes_per_s=1e12, read_ahead_bytes=0
)
"""By the profile a fetch takes as long as computing eight tokens, whatever is fetched. Workers that
start again read nothing ahead, so that their first requests fetch.
"""
NUM_REUSABLE = (len(PROMPT) - 1) // 4 * 4


class Story:
    """A cluster with little memory, and requests one after another."""

    def __init__(self) -> None:
        small = engine_config(32)
        self.cluster = Cluster(
            specs(1, 1), scheduler=FETCH_COSTS, profile=PROFILE, prefill=small, decode=small,
            pool_blocks=20, ssd_blocks=100,
        )  # fmt: skip

    def submit(self, prompt: list[int], **changes: int) -> Stream:
        name = f"r{len(self.cluster.world.streams)}"
        generate: GenerateRequest = request(name, prompt, **{"max_tokens": 2, **changes})
        return self.cluster.world.submit(generate)

    def ask(self, prompt: list[int], **changes: int) -> CacheUse:
        stream = self.submit(prompt, **changes)
        self.cluster.run(5)
        return use_of(stream)

    def restart(self, worker_id: str) -> None:
        self.cluster.world.kill(worker_id)
        self.cluster.run(5)


def use_of(stream: Stream) -> CacheUse:
    [final] = stream.finals
    assert final.cache is not None
    return final.cache


def hit(**tiers: int) -> CacheUse:
    return CacheUse(hits=CacheHits(**tiers))


def missed(**reasons: int) -> CacheUse:
    return CacheUse(misses=CacheMisses(**reasons))


def test_every_tier_and_every_reason_and_they_add_up() -> None:
    story = Story()
    cluster = story.cluster
    assert story.ask(PROMPT) == missed(not_seen=NUM_REUSABLE)
    assert story.ask(PROMPT) == hit(hbm=NUM_REUSABLE)
    story.restart("prefill-0")
    assert story.ask(PROMPT) == hit(dram=NUM_REUSABLE)
    kill_all(cluster)
    assert story.ask(PROMPT) == hit(ssd=NUM_REUSABLE)

    story.restart("prefill-0")
    assert story.ask(PROMPT[:6]) == missed(recomputed=4)

    first = story.submit(PROMPT, max_tokens=41)
    cluster.run(5)
    turn = story.ask([*PROMPT, *first.tokens, 1, 2, 3])
    assert turn == hit(hbm=NUM_REUSABLE, peer=40) + missed(not_seen=4), "decode put the answer"

    cluster.world.kill("prefill-0")
    cluster.run(1.5)
    cluster.world.kill("kvstore-prefill-0")
    cluster.run(0.6)
    assert story.ask(PROMPT) == missed(out_of_reach=NUM_REUSABLE), "only decode's pages have it"

    story.restart("prefill-0")
    stream = story.submit(PROMPT)
    cluster.world.kill("kvstore-prefill-0")
    cluster.run(20)
    assert use_of(stream) == missed(fetch_failed=NUM_REUSABLE)

    for prompt in prompts(30, seed=3):
        story.ask(prompt)
    longer = story.ask([*PROMPT, *range(60, 80)])
    assert longer == missed(evicted=NUM_REUSABLE, not_seen=20)

    cluster.check_streams()
    cluster.check_quiet()
    streams = cluster.world.streams.values()
    total = sum(map(use_of, streams), CacheUse())
    num_hit, num_missed = sum(asdict(total.hits).values()), sum(asdict(total.misses).values())
    reusable = [(len(stream.request.prompt_tokens) - 1) // 4 for stream in streams]
    assert num_hit + num_missed == sum(reusable) * LAYOUT.block_tokens
    assert num_hit == sum(stream.finals[0].num_cached_tokens for stream in streams)
    absent = [tier for tier, number in asdict(total.hits).items() if not number]
    assert absent == ["object"], "these pools have no bucket"
    assert all(asdict(total.misses).values())
    assert shown(cluster) == asdict(total.hits) | asdict(total.misses)


def shown(cluster: Cluster) -> dict[str, float]:
    """Return what the cluster's events make of the two metrics, by tier and reason."""
    metrics = Metrics("k2")
    for event in cluster.events.events:
        metrics.record(event)
    lines = metrics.render().decode().splitlines()
    found = [line.split() for line in lines if line.startswith("mooncake:prompt_tokens_")]
    return {
        series.split('"')[-2]: float(number)
        for series, number in found
        if 'tier="' in series or 'reason="' in series
    }


def test_a_tenant_learns_nothing_of_what_another_has_cached() -> None:
    story = Story()
    story.ask(PROMPT)
    for change in ({"tenant": "other"}, {"cache_salt": "other"}):
        generate = replace(request(f"of-{change}", PROMPT), **change)
        stream = story.cluster.world.submit(generate)
        story.cluster.run(5)
        assert use_of(stream) == missed(not_seen=NUM_REUSABLE)
