"""A gateway that joins: what it takes from its cluster, what it refuses, when it is left alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mooncake.base import CheckpointError, ConfigError
from mooncake.base.messages import OWN_RELEASE, GatewayNews
from mooncake.identity.credential import Credential, cluster_keys
from mooncake.launch.cluster.facts import ClusterFacts
from mooncake.launch.cluster.gateways import joined_gateway
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess
from mooncake.launch.cluster.gateways.joined_gateway import MAX_ALONE, JoinedCluster
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.secrets.credentials import secret_file, write_private
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.scheduler.placement.conductor import Layout
from tests.support.model.checkpoints import write_config_only
from tests.support.scheduler.scheduling import ref

Join = Callable[..., JoinedCluster]
GATEWAY = f"tcp://127.0.0.1:1#{'ab' * 32}"


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

    def facts_of_seeds(config: ServeConfig, credential: Credential) -> ClusterFacts:
        assert (config.seeds, list(credential.clusters)) == ((GATEWAY,), [cluster_keys("secret")])
        return facts

    monkeypatch.setattr(joined_gateway, "facts_of_seeds", facts_of_seeds)

    def joined(**given: object) -> JoinedCluster:
        told = {"role": "gateway", "join": GATEWAY, "cluster_secret": "secret", **given}
        set_ones = {name: value for name, value in told.items() if value is not None}
        return JoinedCluster(resolve(set_ones, None, {}))

    return joined


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


def test_a_gateway_tells_how_the_kvcache_is_set_up_of_engines_of_its_own_alone(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others join with as many blocks as they like."""
    network = InprocNetwork()
    monkeypatch.setattr(
        joined_gateway, "ZmqChannel", lambda *_, **__: InprocChannel(network, "mine")
    )
    cluster = join()
    joined = cluster.open()
    cluster.stop()
    settings = {"model": cluster.config.model, "num_gpu_blocks_override": "77", "device": "cpu"}
    plan = make_plan(resolve(settings, None, {}), 4)
    first = GatewayProcess(plan, InprocChannel(network, "first"), "mine")
    measured = dataclasses.replace(
        plan, options=msgspec.structs.replace(plan.options, measure_pages=True)
    )
    on_gpus = GatewayProcess(measured, InprocChannel(network, "on GPUs"), "mine")
    assert [joined._conductor.layout, first._conductor.layout] == [
        Layout(fingerprint=each.layout.fingerprint, block_tokens=each.layout.block_tokens)
        for each in (cluster._facts.worker, plan)
    ], "known before a worker comes, so that none can bring another one"
    for process, shown in ((first, True), (joined, False), (on_gpus, False)):
        series = process.backend.metrics(for_operator=True)
        assert (b"mooncake:cache_config_info{" in series) is shown
        assert (b'num_gpu_blocks="77"' in series) is shown
        process.channel.close()


@pytest.mark.parametrize("name", ["policy", "slo_ttft_s", "role_switching", "max_waiting_requests"])
def test_what_all_gateways_share_is_not_for_one_to_set(name: str) -> None:
    values = {"policy": "random", "role_switching": True}
    with pytest.raises(ConfigError, match="places requests as its cluster does"):
        resolve({"role": "gateway", "join": GATEWAY, name: values.get(name, "5")}, None, {})


def test_processes_of_the_same_user_find_the_secret_by_the_address(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match="cluster-secret: the cluster at tcp:"):
        join(cluster_secret=None)
    write_private(secret_file(GATEWAY), "secret")
    assert join(cluster_secret=None).config.names == ("mine", "ours")


def test_an_address_is_copied_whole() -> None:
    for address, message in ((GATEWAY[:-1], "copy the whole address"), ("http://h:1", "HOST:PORT")):
        with pytest.raises(ConfigError, match=message):
            resolve({"role": "gateway", "join": address, "cluster_secret": "s"}, None, {})
