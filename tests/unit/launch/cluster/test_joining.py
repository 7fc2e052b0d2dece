"""What a worker that joins takes over from the cluster, and what it says itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import ConfigError, Role, Shape
from mooncake.base.cluster_mode import Weights
from mooncake.launch.cluster.facts import ClusterFacts, encode_facts, read_facts, with_weights
from mooncake.launch.cluster.workers import cluster_workers, joining_workers, own_facts
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model.checkpoint.weights import Checkpoint
from tests.support.model.checkpoints import write_config_only
from tests.support.model.eagle3_heads import config_of, random_tensors, write_head

APART = {
    "pipeline_parallel_size": 2, "device": "cpu", "bind_host": "10.0.0.7",
    "stage_hosts": ["g-0-1.g.default:7100"], "cluster_secret": "hush",
}  # fmt: skip


@pytest.fixture
def facts(tmp_path: Path) -> ClusterFacts:
    model = write_config_only(tmp_path / "small")
    config = resolve({"model": str(model), "device": "cpu"}, None, {})
    plan = make_plan(config, 4)
    workers = cluster_workers(config, plan, "tcp://127.0.0.1:1", "hush", "here")
    return ClusterFacts(
        gateway_address="tcp://127.0.0.1:1", worker=workers[-1], scheduler=plan.scheduler,
        names=["small"],
    )  # fmt: skip


def all_joining(facts: ClusterFacts, role: str, **given: Any) -> list[WorkerSettings]:
    joins = {"role": role, "join": "10.0.0.6:6400", "cluster_secret": "hush", "device": "cpu"}
    return joining_workers(resolve({**joins, **given}, None, {}), facts, "hush")


def joining(facts: ClusterFacts, role: str, **given: Any) -> WorkerSettings:
    [worker] = all_joining(facts, role, **given)
    return worker


def test_workers_that_share_their_experts_join_together(facts: ClusterFacts) -> None:
    """The cluster's own engines share none."""
    sharing = {"data_parallel_size": 4, "enable_expert_parallel": True}
    workers = all_joining(facts, "decode", **sharing)
    names = tuple(each.worker_id for each in workers)
    assert len({*names}) == 4
    for number, each in enumerate(workers):
        assert each.options.shape == Shape(dp=4, ep=4)
        assert each.engine.in_lockstep
        group = each.expert_group
        assert group is not None
        assert (group.number, group.size, group.workers) == (number, 4, names)
    groups = {each.expert_group and each.expert_group.name for each in workers}
    again = all_joining(facts, "decode", **sharing)[0].expert_group
    assert again is not None
    assert len({*groups, again.name}) == 2, "another group meets elsewhere"


def test_those_that_hold_experts_alone_come_after_those_that_use_them(tmp_path: Path) -> None:
    """Two decode engines, each of two workers and one with their experts. Prefill has its own."""
    model = write_config_only(tmp_path / "small")
    given = {
        "model": str(model), "device": "cpu", "decode": 2, "decode_set": "data-parallel-size=2",
        "enable_expert_parallel": True, "experts": 1,
    }  # fmt: skip
    config = resolve(given, None, {})
    plan = make_plan(config, 8)
    assert (plan.num_engines, plan.num_ranks, plan.options.num_threads) == (7, 7, 1)
    workers = cluster_workers(config, plan, "tcp://127.0.0.1:1", "hush", "here")
    groups = {each.worker_id: each.expert_group for each in workers}
    assert groups["prefill-0"] is groups["kvstore-0"] is None
    for engine in range(2):
        names = (f"decode-{2 * engine}", f"decode-{2 * engine + 1}", f"experts-{engine}")
        found = [groups[name] for name in names]
        assert [each and (each.number, each.size, each.workers) for each in found] == [
            (number, 3, names) for number in range(3)
        ]
        assert len({each and each.name for each in found}) == 1
    assert len({each and each.name for each in groups.values()}) == 3
    for each in workers:
        if each.expert_group is not None:
            assert each.options.shape == Shape(dp=2, ep=1, experts=1)
            assert each.engine.in_lockstep
    assert own_facts(config, plan, "tcp://127.0.0.1:1").worker.role is Role.DECODE


def test_workers_that_join_where_an_mtp_layer_drafts_load_it(facts: ClusterFacts) -> None:
    """Also those that share their experts."""
    options = msgspec.structs.replace(facts.worker.options, with_mtp=True)
    drafts = msgspec.structs.replace(
        facts, worker=msgspec.structs.replace(facts.worker, options=options)
    )
    sharing = {"data_parallel_size": 4, "enable_expert_parallel": True}
    for shape in ({"tensor_parallel_size": 2}, sharing):
        for joined in all_joining(drafts, "decode", **shape):
            assert joined.options.with_mtp
            assert joined.engine.speculation is None


def test_a_worker_that_joins_has_a_head_of_its_own_or_none(
    facts: ClusterFacts, tmp_path: Path
) -> None:
    """Blocks have nothing of it. Those of an MTP layer have, so it does not draft for one alone."""
    spec = Checkpoint.open(Path(facts.worker.model)).spec
    head = config_of(spec)
    folder = str(write_head(tmp_path / "head", head, random_tensors(head, spec)))
    drafts = {"method": "eagle3", "num_speculative_tokens": 2, "model": folder}
    options = joining(facts, "decode", speculative_config=drafts).options
    assert options.draft_model == folder
    with_head = msgspec.structs.replace(facts.worker, options=options)
    others = msgspec.structs.replace(facts, worker=with_head)
    assert joining(others, "decode").options.draft_model is None
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    model = write_config_only(tmp_path / "mtp", num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match="joined have no KV of an MTP layer"):
        joining(facts, "decode", model=str(model), speculative_config=mtp)


def test_a_worker_that_joins_alone_shares_no_experts_with_those_of_the_cluster(
    tmp_path: Path,
) -> None:
    model = write_config_only(tmp_path / "small")
    sharing = {"data_parallel_size": 2, "enable_expert_parallel": True, "device": "cpu"}
    config = resolve({"model": str(model), **sharing}, None, {})
    told = own_facts(config, make_plan(config, 4), "tcp://127.0.0.1:1")
    assert told.worker.expert_group is not None
    assert joining(told, "decode").expert_group is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_its_shape_and_where_its_stages_are_are_its_own(facts: ClusterFacts, role: str) -> None:
    worker = joining(facts, role, **APART)
    assert worker.options.shape == Shape(pp=2)
    assert worker.options.rank_backend == "gloo"
    assert worker.stage_hosts == [("g-0-1.g.default", 7100)]
    alone = joining(facts, role)
    assert (alone.options.shape, alone.stage_hosts) == (Shape(), [])
    assert alone.options.rank_backend == facts.worker.options.rank_backend


def test_a_worker_that_joins_after_new_weights_begins_with_them(
    facts: ClusterFacts, tmp_path: Path
) -> None:
    new = str(write_config_only(tmp_path / "new"))
    told = read_facts(encode_facts(with_weights(facts, Weights(2, new, "r2", "f2"))))
    for given in ({}, {"model": facts.worker.model}):
        worker = joining(told, "decode", **given)
        assert (worker.model, worker.weights_revision) == (new, "r2")
        assert worker.layout.fingerprint == "f2"
        assert worker.mode.weights.number == 2, "gateways do not send it away"
    pool = joining(told, "kvstore")
    assert (pool.layout.fingerprint, pool.mode.weights.number) == ("f2", 2)


def test_a_pool_node_has_no_stages(facts: ClusterFacts) -> None:
    assert joining(facts, "kvstore").stage_hosts == []
