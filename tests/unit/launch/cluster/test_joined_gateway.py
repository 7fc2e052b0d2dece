"""A gateway that joins: what it takes from its cluster, what it refuses, when it is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake.base import CheckpointError, ConfigError
from mooncake.base.messages import OWN_RELEASE, GatewayNews
from mooncake.identity import Trust, cluster_keys
from mooncake.launch.cluster import joined_gateway, ray_cluster
from mooncake.launch.cluster.facts import ClusterFacts
from mooncake.launch.cluster.joined_gateway import MAX_ALONE, JoinedCluster
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from tests.support.model.checkpoints import write_config_only
from tests.support.scheduler.scheduling import ref

Join = Callable[..., JoinedCluster]


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Join:
    """Joins a cluster that serves a small model by other than the default settings."""
    model = write_config_only(tmp_path / "small")
    settings = {
        "model": str(model), "dtype": "float32", "block_size": 32, "max_model_len": 128,
        "policy": "random", "slo_ttft_s": 3, "prefill": 2, "served_model_name": ["mine", "ours"],
    }  # fmt: skip
    config = resolve(settings, None, {})
    plan = make_plan(config, 4)
    *_, worker = cluster_workers(config, plan, "tcp://127.0.0.1:1", "secret", "here")
    facts = ClusterFacts(
        gateway_address="tcp://127.0.0.1:1", worker=worker,
        scheduler=plan.scheduler, names=list(config.names),
    )  # fmt: skip

    def facts_at(address: str, trust: Trust) -> ClusterFacts:
        assert (address, list(trust.clusters)) == ("h:1", [cluster_keys("secret")])
        return facts

    monkeypatch.setattr(ray_cluster, "facts_at", facts_at)
    return lambda **given: JoinedCluster(
        resolve({"role": "gateway", "join": "h:1", "cluster_secret": "secret", **given}, None, {})
    )


def test_it_serves_the_clusters_model_and_places_as_the_cluster_does(join: Join) -> None:
    cluster = join(port=9000)
    assert cluster.config.names == ("mine", "ours")
    assert cluster.config.port == 9000
    assert (cluster.plan.model.dtype, cluster.plan.model.max_model_len) == ("float32", 128)
    assert cluster.plan.layout.block_tokens == 32
    scheduler = cluster.plan.scheduler
    assert (scheduler.policy, scheduler.ttft_slo_s, scheduler.needs_prefill) == ("random", 3, True)
    assert cluster.plan.num_engines == cluster.plan.num_kvstores == 0
    assert join(served_model_name="other").config.names == ("other",)


def test_each_has_a_name_of_its_own(join: Join) -> None:
    names = {join().gateway_id for _ in range(8)}
    assert len(names) == 8
    assert all(name > "gateway" for name in names), "the cluster's first decides for all"


def test_other_weights_are_refused(join: Join, tmp_path: Path) -> None:
    """The same files elsewhere are fine; the keys of all blocks depend on the weights."""
    copy = write_config_only(tmp_path / "copy")
    assert join(model=str(copy)).config.model == str(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    with pytest.raises(CheckpointError, match="holds other weights"):
        join(model=str(copy))
    with pytest.raises(CheckpointError, match="nowhere is not there"):
        join(model="nowhere")


def test_a_cluster_is_gone_when_its_gateway_has_been_alone_for_long(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = InprocChannel(InprocNetwork(), "mine")
    monkeypatch.setattr(joined_gateway, "ZmqChannel", lambda *_, **__: channel)
    cluster = join()
    process = cluster.open()
    try:
        for _ in range(MAX_ALONE - 1):
            assert not cluster.gone()
        news = GatewayNews(gateway=ref("gateway"), gateways=[], release=OWN_RELEASE)
        process.gateway.handle(news, 0.0)
        for _ in range(2 * MAX_ALONE):
            assert not cluster.gone()
        process.gateway.tick(1e9)
        assert [bool(cluster.gone()) for _ in range(MAX_ALONE)] == [False] * (MAX_ALONE - 1) + [
            True
        ]
    finally:
        cluster.stop()
        process.channel.close()


@pytest.mark.parametrize("name", ["policy", "slo_ttft_s", "role_switching", "max_waiting_requests"])
def test_what_all_gateways_share_is_not_for_one_to_set(name: str) -> None:
    values = {"policy": "random", "role_switching": True}
    with pytest.raises(ConfigError, match="places requests as its cluster does"):
        resolve({"role": "gateway", "join": "h:1", name: values.get(name, "5")}, None, {})
