"""What a configuration means: pages, threads, memory, and the limits it must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import CheckpointError, ConfigError, PageArray, Role
from mooncake.crypto.keys import KeyRing
from mooncake.launch.cluster import checks
from mooncake.launch.cluster.facts import ClusterFacts
from mooncake.launch.cluster.workers import cluster_workers, joining_workers, own_facts
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import ServePlan, check_memory, make_plan
from mooncake.launch.config.rank_plan import HOST_LIBRARY_BYTES, RankMemory
from mooncake.launch.host import machine_facts
from mooncake.model.checkpoint.making.encrypt import encrypt_checkpoint
from tests.support.model.checkpoints import write_config_only
from tests.support.model.eagle3_heads import config_of, random_tensors, write_head

BLOCK_BYTES = 3 * 64 * 20 * 2
"""layers x tokens x width x bfloat16 of the small test model"""


def rank_of(plan: ServePlan) -> RankMemory:
    """Return the memory of each rank of a decode worker."""
    return plan.ranks[Role.DECODE].stages[0]


def plan_for(model: Path, *, cores: int = 8, **settings: Any) -> ServePlan:
    return make_plan(resolve({"model": str(model), **settings}, None, {}), cores)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config_only(tmp_path / "small")


def test_one_of_each_by_default(model: Path) -> None:
    plan = plan_for(model)
    assert (plan.num_prefills, plan.num_decodes, plan.num_kvstores) == (1, 1, 1)
    assert plan.options.num_threads == 4
    assert plan.model.dtype == "bfloat16"
    assert plan.model.max_model_len == 256
    assert plan.layout.block_bytes == BLOCK_BYTES
    assert plan.engine.num_blocks == 2**30 // BLOCK_BYTES


def test_colocated_is_one_engine_and_no_pool(model: Path) -> None:
    plan = plan_for(model, colocated=True)
    assert (plan.num_prefills, plan.num_decodes, plan.num_kvstores) == (0, 1, 0)
    assert plan.options.num_threads == 8
    assert plan_for(model, colocated=True, kvstore=1).num_kvstores == 1


@pytest.mark.parametrize(
    ("role", "counts"), [("prefill", (1, 0, 0)), ("decode", (0, 1, 0)), ("kvstore", (0, 0, 1))]
)
def test_a_joining_worker_is_alone(model: Path, role: str, counts: tuple[int, int, int]) -> None:
    plan = plan_for(model, role=role, join="h:1", cluster_secret="s")
    assert (plan.num_prefills, plan.num_decodes, plan.num_kvstores) == counts


def test_each_rank_has_a_gpu_while_there_are_enough(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpus(num_gpus: int, **settings: Any) -> list[float]:
        monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: num_gpus)
        roles = {} if "colocated" in settings else {"prefill": 2, "decode": 1}
        config = resolve({"model": str(model), **roles, **settings}, None, {})
        workers = cluster_workers(config, make_plan(config, 8), "tcp://g:1", "secret", "host")
        assert all(each.num_gpus == 0 for each in workers if each.role is Role.KVSTORE)
        return [each.num_gpus for each in workers if each.role is not Role.KVSTORE]

    assert gpus(3) == gpus(8) == [1] * 3
    assert gpus(0) == gpus(3, device="cpu") == [0] * 3
    with pytest.raises(ConfigError, match="3 engines and 2 GPU: each takes all its memory"):
        gpus(2)
    assert gpus(2, num_gpu_blocks_override=8) == [0.5] * 3
    assert gpus(1, num_gpu_blocks_override=8) == [0.3333] * 3, "three fit"
    assert gpus(1, colocated=True, kvstore=1) == [1]
    with pytest.raises(ConfigError, match="shows no NVIDIA GPU"):
        gpus(0, device="cuda")


def test_a_joining_worker_computes_on_its_own_devices(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's template names a device of the gateway's machine; how to compute, it says."""
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 8)
    cluster = {"prefill": 4, "decode": 4, "attention_backend": "reference"}
    config = resolve({"model": str(model), **cluster}, None, {})
    plan = make_plan(config, 8)
    template = cluster_workers(config, plan, "tcp://g:1", "secret", "host")[3]
    assert (template.options.device, template.num_gpus) == ("cuda", 1)
    facts = ClusterFacts(
        gateway_address="tcp://g:1", worker=template,
        scheduler=plan.scheduler, names=["small"],
    )  # fmt: skip
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 0)
    config = resolve({"role": "decode", "join": "h:1", "cluster_secret": "s"}, None, {})
    [joined] = joining_workers(config, facts, "secret")
    options = joined.options
    assert (options.device, options.measure_pages) == ("cpu", False)
    assert options.attention_backend == "reference"


@pytest.mark.parametrize(
    ("has_device", "message"), [(False, "shows no RDMA device"), (True, "pyverbs is not installed")]
)
def test_a_required_transport_that_does_not_work_here_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_device: bool, message: str
) -> None:
    """At start, in a dry run, and by a worker that hears of it from the cluster it joins."""
    monkeypatch.setattr("mooncake.transfer.choices.has_rdma_devices", lambda: has_device)
    monkeypatch.setattr("mooncake.transfer.choices.has_pyverbs", lambda: False)
    config = resolve({"model": str(model), "require_transport": "rdma"}, None, {})
    plan = make_plan(config, 8)
    with pytest.raises(ConfigError, match=f"require-transport: rdma does not work.*{message}"):
        checks.check_start(config, plan)
    facts = own_facts(config, plan, "tcp://g:1")
    joins = resolve({"role": "decode", "join": "h:1", "cluster_secret": "s"}, None, {})
    with pytest.raises(ConfigError, match=message):
        joining_workers(joins, facts, "secret")


def test_a_required_transport_is_the_only_one(model: Path) -> None:
    config = resolve({"model": str(model), "require_transport": "tcp"}, None, {})
    plan = make_plan(config, 8)
    workers = cluster_workers(config, plan, "tcp://g:1", "secret", "host")
    assert [worker.transfer_protocols for worker in workers] == [["tcp"]] * 3
    joins = resolve({"role": "decode", "join": "h:1", "cluster_secret": "s"}, None, {})
    [joined] = joining_workers(joins, own_facts(config, plan, "tcp://g:1"), "secret")
    assert joined.transfer_protocols == ["tcp"]


def test_a_worker_that_reads_the_weights_of_others_needs_no_weights(
    model: Path, tmp_path: Path
) -> None:
    config = resolve({"model": str(model)}, None, {})
    facts = own_facts(config, make_plan(config, 8), "tcp://g:1")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    joins = {"role": "decode", "join": "h:1", "cluster_secret": "s", "model": str(bare)}
    [joined] = joining_workers(
        resolve({**joins, "weights_from": "engines"}, None, {}), facts, "secret"
    )
    assert joined.model == str(bare)
    assert joined.weights_revision == facts.worker.weights_revision
    assert joined.layout == facts.worker.layout
    with pytest.raises(CheckpointError):
        joining_workers(resolve(joins, None, {}), facts, "secret")


def test_gpus_are_counted_as_processes_will_see_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine_facts, "Path", lambda _dev: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_facts.num_gpus() == 2
    for visible, count in (("1", 1), ("", 0), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine_facts.num_gpus() == count


def test_each_pool_has_directories_of_its_own(model: Path) -> None:
    def directories(**settings: Any) -> list[list[str]]:
        config = resolve({"model": str(model), "ssd": "/a:1MiB,/b:2MiB", **settings}, None, {})
        workers = cluster_workers(config, make_plan(config, 8), "tcp://g:1", "secret", "host")
        return [
            [disk.directory for disk in each.kvstore.ssd] for each in workers[: len(workers) - 2]
        ]

    assert directories() == [["/a", "/b"]]
    assert directories(kvstore=2) == [[f"/a/kvstore-{n}", f"/b/kvstore-{n}"] for n in (0, 1)]


def test_cores_are_shared_out_but_never_below_one(model: Path) -> None:
    assert plan_for(model, cores=2, prefill=3, decode=2).options.num_threads == 1
    assert plan_for(model, cores=2, num_threads=7).options.num_threads == 7


def test_pages_by_size_by_number_and_by_default(model: Path) -> None:
    assert plan_for(model, kv_cache_memory_bytes="1MiB").engine.num_blocks == 2**20 // BLOCK_BYTES
    assert plan_for(model, num_gpu_blocks_override=9).engine.num_blocks == 9
    assert plan_for(model, dtype="float32").layout.block_bytes == 2 * BLOCK_BYTES


def test_one_whole_sequence_always_fits(tmp_path: Path) -> None:
    long = write_config_only(tmp_path / "long", max_position_embeddings=64 * 300_000)
    plan = plan_for(long)
    assert plan.engine.num_blocks == 300_000


@pytest.mark.parametrize(
    "settings", [{"num_gpu_blocks_override": 3}, {"kv_cache_memory_bytes": 4 * BLOCK_BYTES - 1}]
)
def test_too_few_pages_for_one_sequence(model: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"room for 3 pages, but one sequence of 256 tokens takes 4"
    ):
        plan_for(model, **settings)


def test_a_shorter_limit_needs_fewer_pages(model: Path) -> None:
    plan = plan_for(model, num_gpu_blocks_override=3, max_model_len=192)
    assert plan.engine.max_model_len == 192


def test_steps_are_planned_for_the_limit_of_gaps(model: Path) -> None:
    told = plan_for(model, slo_tbt_ms=50).engine
    assert told.max_gap_s == pytest.approx(0.04)
    assert not told.max_gap_is_target


def test_prompts_wait_for_streams_under_both_limits(model: Path) -> None:
    told = plan_for(model, slo_ttft_s=5, slo_tbt_ms=50).engine
    assert told.first_token_s == pytest.approx(4.0)
    assert plan_for(model, slo_tbt_ms=50).engine.first_token_s is None


def test_without_limits_steps_are_planned_for_targets_and_nothing_is_refused(model: Path) -> None:
    plan = plan_for(model)
    assert (plan.engine.max_gap_s, plan.engine.first_token_s) == pytest.approx((0.12, 4.0))
    assert plan.engine.max_gap_is_target
    assert plan.scheduler.ttft_slo_s is plan.scheduler.tbt_slo_s is None
    other = plan_for(model, target_ttft_s=2, target_tbt_ms=50).engine
    assert (other.max_gap_s, other.first_token_s) == pytest.approx((0.04, 1.6))
    assert plan_for(model, slo_ttft_s=3).engine.first_token_s == pytest.approx(2.4)


@pytest.mark.parametrize("off", [{"target_tbt_ms": 0}, {"target_ttft_s": 0}])
def test_targets_can_be_turned_off(model: Path, off: dict[str, int]) -> None:
    engine = plan_for(model, **off).engine
    assert engine.max_gap_s is engine.first_token_s is None


def test_limits_go_to_the_scheduler_in_seconds(model: Path) -> None:
    scheduler = plan_for(model, slo_ttft_s=3, slo_tbt_ms=50, policy="random").scheduler
    assert (scheduler.ttft_slo_s, scheduler.tbt_slo_s, scheduler.policy) == (3.0, 0.05, "random")
    assert not scheduler.role_switching
    assert plan_for(model, role_switching=True).scheduler.role_switching


def test_weights_are_counted_as_they_will_be_held(model: Path) -> None:
    half, full = (
        rank_of(plan_for(model)),
        rank_of(plan_for(model, dtype="float32")),
    )
    assert half.weights < full.weights < 2 * half.weights + 1
    larger = plan_for(model, max_num_batched_tokens=4096)
    assert rank_of(larger).activations > rank_of(plan_for(model)).activations


def test_memory_adds_up(model: Path) -> None:
    plan = plan_for(model, prefill=2, decode=3, kvstore=2, kvstore_dram_bytes="10MiB")
    kv = plan.engine.num_blocks * plan.layout.block_bytes
    each = rank_of(plan).weights + kv + rank_of(plan).activations + HOST_LIBRARY_BYTES
    assert plan.total_bytes == 5 * each + 2 * 10 * 2**20
    assert plan.memory_rows()[-1][0] == "total"
    assert len(plan.memory_rows()) == 5


def test_what_does_not_fit_is_refused_with_the_bill(model: Path) -> None:
    plan = plan_for(model)
    check_memory(plan, None)
    check_memory(plan, plan.total_bytes)
    with pytest.raises(ConfigError, match=r"needs 3.* GiB .*kvstore pool 1 GiB.* GiB are free"):
        check_memory(plan, plan.total_bytes - 1)
    pool = plan_for(model, role="kvstore", cluster_secret="s", kvstore_dram_bytes="8GiB")
    with pytest.raises(ConfigError) as caught:
        check_memory(pool, 2**30)
    assert caught.value.message == (
        "this needs 8 GiB (kvstore pool 8 GiB) and 1 GiB are free; use a smaller "
        "--kvstore-dram-bytes (--dram)"
    )


def test_a_pool_without_room_for_a_block(model: Path) -> None:
    with pytest.raises(ConfigError, match="is less than one block of this model"):
        plan_for(model, kvstore_dram_bytes=100)
    assert plan_for(model, kvstore=0, kvstore_dram_bytes=100).num_kvstores == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"torch_dtype": "int7"}, "dtype 'int7' is none of"),
    ],
)
def test_configs_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_for(write_config_only(tmp_path / "odd", **changes))


def write_one_tensor(model: Path) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def test_a_dry_run_hashes_no_weights_and_a_start_hashes_them_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_one_tensor(model)
    assert plan_for(model, dry_run=True).model.revision == ""
    assert not (tmp_path / "mooncake").exists()
    revision = plan_for(model).model.revision
    assert len(revision) == 16
    kept = tmp_path / "mooncake" / "file-digests.json"
    before = kept.stat()
    assert plan_for(model).model.revision == revision
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_layouts_differ_by_weights(tmp_path: Path, model: Path) -> None:
    same = plan_for(model).layout
    assert plan_for(model).layout == same
    other = write_config_only(tmp_path / "other", vocab_size=301)
    assert plan_for(other).layout.fingerprint != same.fingerprint


MTP = {"method": "mtp", "num_speculative_tokens": 2}


def test_an_mtp_layer_has_weights_and_kv(tmp_path: Path) -> None:
    model = write_config_only(tmp_path / "mtp", num_nextn_predict_layers=1)
    plan, plain = plan_for(model, speculative_config=MTP), plan_for(model)
    assert (plan.options.with_mtp, plain.options.with_mtp) == (True, False)
    assert plan.layout.block_bytes * 3 == plain.layout.block_bytes * 4
    assert plan.layout.fingerprint != plain.layout.fingerprint
    assert rank_of(plan).weights > rank_of(plain).weights


def test_where_an_mtp_layer_cannot_draft_says_so(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no MTP layer .* the method ngram needs none"):
        plan_for(model, speculative_config=MTP)
    other = write_config_only(tmp_path / "mtp", num_nextn_predict_layers=1)
    assert plan_for(other, speculative_config=MTP, tensor_parallel_size=2).options.with_mtp


def test_the_last_of_several_stages_has_what_drafts(tmp_path: Path) -> None:
    """Its layer, the layer's KV and the embedding that it reads."""
    model = write_config_only(tmp_path / "mtp", num_nextn_predict_layers=1)
    stages = {"pipeline_parallel_size": 2}
    with_it, plain = (
        plan_for(model, **stages, **each) for each in ({"speculative_config": MTP}, {})
    )
    first, last = with_it.ranks[Role.DECODE].stages
    without = plain.ranks[Role.DECODE].stages
    assert (first.weights, first.block_bytes) == (without[0].weights, without[0].block_bytes)
    of_layer = with_it.layout.slice_bytes
    assert last.block_bytes == without[1].block_bytes + of_layer
    spec = with_it.model.spec
    embedding = 2 * spec.vocab_size * spec.hidden_size
    assert last.weights - without[1].weights > embedding
    options = msgspec.structs.replace(with_it.options, device="cuda")
    pages = PageArray(with_it.layout, 4)
    held = [options.held_by(rank, pages).layers for rank in range(2)]
    assert held == [range(2, 4), range(2)]


def test_a_head_has_weights_and_kv_of_its_own(tmp_path: Path, model: Path) -> None:
    spec = plan_for(model).model.spec
    config = config_of(spec)
    head = write_head(tmp_path / "head", config, random_tensors(config, spec))
    eagle3 = {"method": "eagle3", "num_speculative_tokens": 2, "model": str(head)}
    plan, plain = plan_for(model, speculative_config=eagle3), plan_for(model)
    assert plan.options.draft_model == str(head)
    assert plan.layout == plain.layout, "blocks are those without it"
    split = resolve({"model": str(model), "speculative_config": eagle3, "prefill": 1}, None, {})
    workers = cluster_workers(split, make_plan(split, 8), "tcp://g:1", "secret", "host")
    at_start = {worker.role: worker.options.head_at_start for worker in workers}
    assert (at_start[Role.PREFILL], at_start[Role.DECODE]) == (False, True)
    rows = 2 * 512 * (plan.engine.max_num_seqs + 9)  # one for rows unneeded, and eight copied
    more = rank_of(plan).weights - rank_of(plain).weights - rows * 2 * 2 * 16 * 2
    assert 0 < more <= (head / "model.safetensors").stat().st_size
    plan, plain = (
        plan_for(model, dtype="float32", **each) for each in ({"speculative_config": eagle3}, {})
    )
    wide = rank_of(plan).weights - rank_of(plain).weights - rows * 2 * 2 * 16 * 4
    assert wide == 2 * more, "it takes what it takes when loaded, not what its files take"
    assert plan_for(model, speculative_config=eagle3, tensor_parallel_size=2).options.draft_model
    stages = {"pipeline_parallel_size": 2, "dtype": "float32"}
    found = [
        plan_for(model, **stages, **each).ranks[Role.DECODE].stages
        for each in ({"speculative_config": eagle3}, {})
    ]
    assert found[0][0].weights == found[1][0].weights, "the last stage has it"
    embedding = 4 * spec.vocab_size * spec.hidden_size
    assert found[0][1].weights - found[1][1].weights == 2 * more + rows * 2 * 2 * 16 * 4 + embedding
    other = write_config_only(tmp_path / "other", hidden_size=128)
    with pytest.raises(CheckpointError, match=r"target_hidden_size=.* is not the model's .128."):
        plan_for(other, speculative_config=eagle3)
    with pytest.raises(CheckpointError, match="no such directory"):
        plan_for(model, speculative_config={**eagle3, "model": str(tmp_path / "none")})


def test_a_cluster_is_ready_with_what_it_was_planned_with(model: Path) -> None:
    def needs_prefill(**settings: Any) -> bool:
        return plan_for(model, **settings).scheduler.needs_prefill

    assert needs_prefill()
    assert not needs_prefill(prefill=0)
    assert not needs_prefill(colocated=True)
    assert needs_prefill(headless=True)
    assert not needs_prefill(headless=True, prefill=0)
    assert needs_prefill(headless=True, prefill=0, decode=0), "all of them join"


def test_pushes_carry_checksums_between_hosts_and_from_host_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 2)

    def wanted(**settings: Any) -> bool:
        config = resolve({"model": str(model), "prefill": 1, "decode": 1, **settings}, None, {})
        workers = cluster_workers(config, make_plan(config, 8), "tcp://g:1", "secret", "host")
        [found] = {each.instance.push_checksums for each in workers}
        return found

    assert not wanted(device="cpu")
    assert wanted(device="cpu", bind_host="10.0.0.7")
    assert not wanted(device="cuda", bind_host="10.0.0.7"), "reading a GPU's memory is dear"
    assert wanted(device="cuda", push_checksums="on")
    assert not wanted(device="cpu", bind_host="10.0.0.7", push_checksums="off")


class TestEncryptedWeights:
    @pytest.fixture
    def model(self, model: Path) -> Path:
        write_one_tensor(model)
        return model

    @pytest.fixture
    def key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.delenv("MOONCAKE_WEIGHTS_KEY", raising=False)
        (tmp_path / "key").write_text("ab" * 32)
        return tmp_path / "key"

    @pytest.fixture
    def sealed(self, model: Path, key: Path) -> Path:
        keys = KeyRing.parse(key.read_text(), "key")
        return encrypt_checkpoint(model, model.parent / "sealed", keys)

    def test_blocks_of_both_are_the_same(self, model: Path, sealed: Path, key: Path) -> None:
        plan = plan_for(sealed, weights_key_file=str(key))
        assert plan.layout == plan_for(model).layout
        assert plan.options.weights_key.file == str(key)

    def test_a_key_that_is_missing_or_wrong_shows_at_once(
        self, model: Path, sealed: Path, key: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(CheckpointError, match="sealed: its weights are encrypted"):
            plan_for(sealed)
        with pytest.raises(CheckpointError, match="small: its weights are not encrypted, but"):
            plan_for(model, weights_key_file=str(key))
        key.write_text("cd" * 32)
        with pytest.raises(ConfigError, match=r"weights-key: .*sealed was encrypted with another"):
            plan_for(sealed, weights_key_file=str(key))
        monkeypatch.setenv("MOONCAKE_WEIGHTS_KEY", "ab" * 32)
        plan_for(sealed)

    @pytest.mark.parametrize("role", ["gateway", "kvstore"])
    def test_gateways_and_pool_nodes_that_join_need_no_key(
        self, model: Path, sealed: Path, role: str
    ) -> None:
        join = {"gateway": f"tcp://h:1#{'ab' * 32}", "kvstore": "h:1"}[role]
        plan = plan_for(sealed, role=role, join=join, cluster_secret="s")
        assert plan.layout == plan_for(model).layout

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_workers_that_join_do(self, sealed: Path, role: str) -> None:
        with pytest.raises(CheckpointError, match="are encrypted; give the key"):
            plan_for(sealed, role=role, join="h:1", cluster_secret="s")


def test_pages_of_ranks_with_memories_of_their_own_are_counted_with_their_copies(
    model: Path,
) -> None:
    def kv_bytes(backend: str, dcp: int) -> int:
        shape = {"tensor_parallel_size": 2, "decode_context_parallel_size": dcp}
        plan = plan_for(model, rank_backend=backend, **shape)
        memory = plan.ranks[Role.DECODE]
        rest = memory.sum(lambda rank: rank.weights + rank.overhead)
        return (plan.engine_bytes(Role.DECODE) - rest) // plan.layout.block_bytes

    pages = plan_for(model).engine.num_blocks
    assert kv_bytes("auto", 1) == kv_bytes("gloo", 2) == kv_bytes("auto", 2)
    assert kv_bytes("gloo", 1) == 2 * kv_bytes("auto", 1) == 2 * pages
