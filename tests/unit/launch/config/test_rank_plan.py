"""What each rank of an instance would hold, and what is said where that does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mooncake_kernels.native import build

from mooncake.base import ConfigError, Role, Shape
from mooncake.cli import main as cli
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import ServePlan, check_memory, make_plan
from mooncake.launch.config.rank_plan import GPU_COMMUNICATOR_BYTES, STEP_TOKENS, RankMemory
from mooncake.launch.host import machine_facts
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS
from tests.support.model.specs import KIMI_K2, small_config


def write_k2(directory: Path, kind: str, **changes: Any) -> Path:
    """Write a directory that holds Kimi-K2's config.json and nothing else."""
    directory.mkdir()
    config = small_config(**{**KIMI_K2, **changes})
    config["quantization_config"] = QUANTIZATION_CONFIGS[kind]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def rank_of(plan: ServePlan) -> RankMemory:
    """Return the memory of a rank of the last stage of a decode worker."""
    return plan.ranks[Role.DECODE].stages[-1]


def plan_for(model: Path, **settings: Any) -> ServePlan:
    return make_plan(resolve({"model": str(model), "dry_run": True, **settings}, None, {}), 8)


@pytest.mark.parametrize(("dcp", "published"), [(1, 715_072), (8, 5_721_088)])
def test_k2_int4_on_eight_h200_has_the_kv_that_vllm_has(
    tmp_path: Path, dcp: int, published: int
) -> None:
    model = write_k2(tmp_path / "k2", "int4")
    plan = plan_for(
        model, tensor_parallel_size=8, decode_context_parallel_size=dcp, hardware="h200x8"
    )
    tokens = rank_of(plan).num_pages * dcp * plan.layout.block_tokens
    assert tokens == plan.engine.num_blocks * plan.layout.block_tokens
    assert tokens == pytest.approx(published, rel=0.12)
    assert rank_of(plan).total <= 0.9 * 149.6e9
    check_memory(plan, 1)


def tokens_beside(plan: ServePlan, step: int) -> int:
    """Return the tokens of KV on the GPUs planned for, with steps of so many tokens."""
    assert plan.gpu_node is not None
    needs, shape = dataclasses.replace(plan.needs, step_tokens=step), plan.ranks[Role.DECODE].shape
    return plan.gpu_node.filled(needs, shape).num_pages * shape.dcp * plan.layout.block_tokens


def test_steps_on_a_gpu_are_the_largest_beside_which_the_kv_fits(tmp_path: Path) -> None:
    """The longer one sequence may be, the smaller a step; what is asked for is taken as it is."""
    model = write_k2(tmp_path / "k2", "int4", max_position_embeddings=10**7)
    wanted = {"tensor_parallel_size": 8, "hardware": "h200x8"}
    most = {size: tokens_beside(plan_for(model, max_model_len=64, **wanted), size)
            for size in STEP_TOKENS}  # fmt: skip
    assert most[8192] < most[4096] < most[2048]
    for size in STEP_TOKENS:
        plan = plan_for(model, max_model_len=most[size], **wanted)
        assert plan.steps.number == size
        assert f"{most[size]} tokens of KV on h200x8" in plan.steps.why
        assert plan.engine.max_batched_tokens == plan.engine.max_chunk_tokens == size
        assert rank_of(plan).num_pages * plan.layout.block_tokens == most[size]
        check_memory(plan, None)
    too_long = plan_for(model, max_model_len=most[2048] + 64, **wanted)
    assert (too_long.steps.number, too_long.steps.why[:9]) == (2048, "the least")
    sized = {"num_gpu_blocks_override": most[4096] // 64, "max_model_len": 64, **wanted}
    assert plan_for(model, **sized).steps.number == 4096, "pages asked for count, too"
    given = plan_for(model, max_model_len=most[2048], max_num_batched_tokens=8192, **wanted)
    assert (given.steps.number, given.steps.why) == (8192, "as asked for")


def test_steps_here_go_by_what_the_driver_says_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [""]

    def answer(query: list[str], **_how: object) -> subprocess.CompletedProcess[str]:
        if not said[0]:
            raise subprocess.CalledProcessError(9, query)
        return subprocess.CompletedProcess(query, 0, said[0], "")

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", answer)
    model = write_k2(tmp_path / "k2", "int4")
    wanted: dict[str, Any] = {"tensor_parallel_size": 8, "colocated": True}
    assert plan_for(model, **wanted, device="cpu").steps.why == "the default on a CPU"
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 8)
    said[0] = "143771\n142000\n"
    assert machine_facts.gpu_bytes() == 142000 * 2**20
    plan = plan_for(model, **wanted)
    assert (plan.steps.number, plan.engine.max_batched_tokens) == (8192, 8192)
    assert "on this machine" in plan.steps.why
    said[0] = "81559\n81559\n"
    assert plan_for(model, **wanted).steps.number == 2048
    for said[0] in ("", "[N/A]\n", "\n"):
        assert "not known" in plan_for(model, **wanted).steps.why
        assert plan_for(model, **wanted).steps.number == 2048


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("fp8", {"tensor_parallel_size": 8},
         r"room for \d+ tokens of KV, and 131072 are wanted; this would: --tensor-parallel-size 8 "
         r"--decode-context-parallel-size 8, or --max-model-len \d+, or INT4 weights as tp8"),
        ("fp8", {"tensor_parallel_size": 8, "hardware": "h800x8"},
         "0 tokens of KV, and 131072 are wanted; this would: --tensor-parallel-size 8 "
         "--pipeline-parallel-size 2, or INT4 weights as tp8"),
        ("fp8", {"data_parallel_size": 16, "enable_expert_parallel": True, "hardware": "h800x8"},
         r"tp1-dp16-ep16 on h800x8 does not fit: each rank holds 72.8 GiB of weights and 3.75 "
         r".* of 71.7 GiB .* this would: --tensor-parallel-size 4 --decode-context-parallel-size 2 "
         r"--data-parallel-size 4 --enable-expert-parallel, or INT4 weights as tp1-dp16-ep16"),
        ("int4", {"tensor_parallel_size": 4}, "this would: --tensor-parallel-size 8$"),
        ("int4", {"tensor_parallel_size": 8, "num_gpu_blocks_override": 100_000},
         "and 6400000 are wanted"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    model = write_k2(tmp_path / "k2", kind)
    plan = plan_for(model, **{"hardware": "h200x8", **settings})
    with pytest.raises(ConfigError, match=message):
        check_memory(plan, None)


@pytest.mark.parametrize(
    ("kind", "settings", "weights", "tokens"),
    [
        ("int4", {"data_parallel_size": 16}, 59.1e9, 191_744),
        ("fp8", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2,
                 "data_parallel_size": 4}, 68.1e9, 131_072),
        ("fp8", {"tensor_parallel_size": 8, "decode_context_parallel_size": 8,
                 "data_parallel_size": 2}, 66.4e9, 781_824),
    ],
)  # fmt: skip
def test_sixteen_gpus_of_80_gb_share_the_experts(
    tmp_path: Path, kind: str, settings: dict[str, Any], weights: float, tokens: int
) -> None:
    model = write_k2(tmp_path / "k2", kind)
    settings = {"enable_expert_parallel": True, "max_num_batched_tokens": 2048, **settings}
    plan = plan_for(model, hardware="h800x8", **settings)
    check_memory(plan, None)
    rank, shape = rank_of(plan), plan.ranks[Role.DECODE].shape
    assert rank.weights == pytest.approx(weights, rel=0.002)
    assert rank.num_pages * shape.dcp * plan.layout.block_tokens >= tokens
    assert (plan.num_prefills, plan.num_decodes) == (shape.dp, shape.dp)
    assert plan.engine_of(Role.DECODE).in_lockstep == (shape.dp > 1)


def test_what_is_advised_fits(tmp_path: Path) -> None:
    model = write_k2(tmp_path / "k2", "fp8")
    wanted = {"tensor_parallel_size": 8, "hardware": "h200x8"}
    check_memory(plan_for(model, decode_context_parallel_size=8, **wanted), None)
    check_memory(plan_for(model, max_model_len=16_000, **wanted), None)


def test_quantized_weights_on_the_cpu_take_what_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_k2(tmp_path / "k2", "int4")
    monkeypatch.setattr(build, "unlikely", lambda folder=None: None)
    plan = plan_for(model, device="cpu")
    assert rank_of(plan).weights == pytest.approx(594e9, rel=0.005)
    assert plan.memory_rows()[0][0] == "weights (INT4, bfloat16)"
    monkeypatch.setattr(build, "unlikely", lambda folder=None: "there is no C++ compiler")
    wide = plan_for(model, device="cpu")
    assert rank_of(wide).weights == pytest.approx(2.05e12, rel=0.005)
    assert wide.memory_rows()[0][0] == "weights (bfloat16)"


def test_k2_thinking_on_one_gpu_and_dram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, shared experts and the dense layer on an H200, 570 GB of experts beside it."""
    monkeypatch.setattr(build, "unlikely", lambda folder=None: "what this machine can is not asked")
    model = write_k2(tmp_path / "k2", "int4")
    wanted = {"hardware": "h200x1", "expert_device": "cpu", "colocated": True}
    plan = plan_for(model, **wanted)
    check_memory(plan, None)
    rank = rank_of(plan)
    assert rank.dram == pytest.approx(1014.7e9 * (1 / 2 + 2 / 32), rel=0.002)
    assert rank.weights == pytest.approx(11.7e9 * 2 + 60 * 384 * 4, rel=0.01)
    assert rank.num_pages * 64 > 1_000_000
    words = f"serve {model} --dry-run --colocated --expert-device cpu --hardware h200x1"
    assert cli.run(words.split()) == 0
    assert "DRAM" in capsys.readouterr().out
    from_yaml = tmp_path / "serve.yaml"
    from_yaml.write_text("expert-device: cpu\nhardware: h200x1\ncolocated: true\n")
    assert cli.run(f"serve {model} --dry-run --config {from_yaml}".split()) == 0
    two = plan_for(model, hardware="h200x1", expert_device="cpu")
    check_memory(two, None)  # one engine a node
    fp8 = plan_for(write_k2(tmp_path / "fp8", "fp8"), **wanted)
    with pytest.raises(ConfigError, match=r"does not fit on h200x1: 1 x \(945.* GiB of routed "):
        check_memory(fp8, None)
    with pytest.raises(ConfigError, match=r"KV, and 131072 are wanted"):
        check_memory(plan_for(model, hardware="h200x1", colocated=True), None)


def test_a_node_has_so_many_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_k2(tmp_path / "k2", "int4")
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 4)
    words = (
        "8 ranks of a stage lie on one node, which has 4 GPUs; "
        "here this model can be cut among 1, 2, 4 ranks"
    )
    with pytest.raises(ConfigError, match=words):
        plan_for(model, tensor_parallel_size=8)


def test_ranks_on_cpus_have_no_triton(tmp_path: Path) -> None:
    model = write_k2(tmp_path / "k2", "int4")
    with pytest.raises(ConfigError, match="moe-backend=triton: ranks on CPUs do not use it"):
        plan_for(model, tensor_parallel_size=2, device="cpu", moe_backend="triton")


def test_some_shapes_are_planned_and_not_served_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_k2(tmp_path / "k2", "int4")
    assert plan_for(model, tensor_parallel_size=2).ranks[Role.DECODE].shape.tp == 2
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 4)
    served = {"tensor_parallel_size": 2, "dry_run": False, "device": "cuda"}
    for dcp in (1, 2):
        plan = plan_for(model, decode_context_parallel_size=dcp, **served)
        assert (plan.options.group_kind, plan.options.own_memories) == ("nccl", True)
        assert plan.ranks[Role.DECODE].shape == Shape(tp=2, dcp=dcp)
    plan = plan_for(model, enable_expert_parallel=True, **served)
    assert plan.ranks[Role.DECODE].shape == Shape(tp=2, ep=2)
    plan = plan_for(model, enable_expert_parallel=True, enable_eplb=True, **served)
    assert plan.options.eplb is not None
    stages = {"pipeline_parallel_size": 2, "colocated": True}
    plan = plan_for(model, **served, **stages)
    assert plan.ranks[Role.DECODE].shape == Shape(tp=2, pp=2)
    shared = {"enable_expert_parallel": True, "data_parallel_size": 2}
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 8)
    plan = plan_for(model, **served, **shared)
    assert plan.ranks[Role.DECODE].shape == Shape(tp=2, dp=2, ep=4)
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 4)
    alone = {"dry_run": False, "device": "cuda", "num_gpu_blocks_override": 100_000}
    with pytest.raises(ConfigError, match="6 ranks and 4 GPU"):  # NCCL needs a GPU for each
        plan_for(model, **alone, **shared, prefill=2)
    refused = {
        "data-parallel-size=2: engines on GPUs do not share experts in DRAM yet": {
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "expert_device": "cpu",
        },
        "all2all-backend=deepep_low_latency: DeepEP is not served yet": {
            "all2all_backend": "deepep_low_latency",
        },
        "enable-eplb: experts in DRAM beside a GPU are not moved yet": {
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "expert_device": "cpu",
        },
        "rank-backend=gloo: ranks on GPUs exchange by NCCL": {"rank_backend": "gloo"},
        "pipeline-parallel-size=4: without stage-hosts .* so far, and the 8 ranks of tp2-pp4 are "
        "more than its 4 GPUs": {"pipeline_parallel_size": 4, "colocated": True},
        "data-parallel-size=4: .* on one machine so far, and the 8 ranks of tp2-dp4-ep8 are more": {
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
        },
        "8 ranks and 4 GPU": {"prefill": 3, "num_gpu_blocks_override": 100_000},
    }
    for words, settings in refused.items():
        with pytest.raises(ConfigError, match=words):
            plan_for(model, **served, **settings)


def test_experts_apart_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """K2 in FP8: what a GPU has no room for beside experts, it has without; the experts are where
    there is no KV.
    """
    model = write_k2(tmp_path / "k2", "fp8")
    words = f"serve {model} --dry-run --hardware h200x8 --prefill 0 -dp 4 -ep"
    assert cli.run(words.split()) == 2
    capsys.readouterr()
    plan = plan_for(
        model, hardware="h200x8", prefill=0, data_parallel_size=4, enable_expert_parallel=True,
        experts=12,
    )  # fmt: skip
    check_memory(plan, None)
    assert [role for role, _ in plan.engines] == [Role.DECODE, Role.EXPERTS]
    [attention], [experts] = (plan.ranks[role].stages for role, _ in plan.engines)
    assert 12 * experts.weights + attention.weights == pytest.approx(1027e9, rel=0.03)
    assert attention.weights < 25e9
    assert (experts.kv, experts.num_pages) == (0, 0)
    assert attention.num_pages * plan.layout.block_tokens > 1_000_000
    assert cli.run([*words.split(), "--experts", "12"]) == 0
    shown = capsys.readouterr().out
    assert "memory of each rank of a worker with the experts of tp1-dp4-experts12" in shown
    assert "of routed experts" in shown
    assert cli.run([*words.split(), "--experts", "4"]) == 2
    assert "of routed experts and" in (told := capsys.readouterr().err)
    assert "raise --experts" in told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "experts: workers hold whole experts; add --enable-expert-parallel"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2},
         "experts=2: engines whose experts are on other workers have one rank each, and "
         "tensor-parallel-size is 2"),
        ({"enable_expert_parallel": True, "pipeline_parallel_size": 2},
         "one rank each, and pipeline-parallel-size is 2"),
        ({"enable_expert_parallel": True, "experts": 5}, "384 experts do not divide among 5 ranks"),
        ({"enable_expert_parallel": True, "colocated": True},
         "experts=2: one process .--colocated. has one worker"),
        ({"enable_expert_parallel": True, "role_switching": True}, "role-switching: workers that"),
        ({"enable_expert_parallel": True, "autoscale": "prefill=1..2,decode=1..4"},
         "autoscale: workers that"),
        ({"enable_expert_parallel": True, "role": "decode", "join": "h:1", "cluster_secret": "s"},
         "experts=2: workers that join a running cluster hold their experts themselves"),
    ],
)  # fmt: skip
def test_where_experts_are_not_apart(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    model = write_k2(tmp_path / "k2", "int4")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match=message):
        plan_for(model, **{"experts": 2, "dry_run": False, "device": "cpu", **settings})


def test_stages_hold_their_layers(tmp_path: Path) -> None:
    """K2 in FP8 on 16 H800, as its recipe: 65 GB of weights a rank, and one page is the same block
    in both stages.
    """
    model = write_k2(tmp_path / "k2", "fp8")
    plan = plan_for(
        model, tensor_parallel_size=8, pipeline_parallel_size=2, hardware="h800x8", colocated=True
    )
    check_memory(plan, None)
    memory = plan.ranks[Role.DECODE]
    first, last = memory.stages
    assert (first.layers, last.layers) == (range(31), range(31, 61))
    assert first.weights == pytest.approx(65.1e9, rel=0.03)
    assert first.num_pages == last.num_pages == plan.engine.num_blocks
    assert first.block_bytes + last.block_bytes == plan.layout.block_bytes
    whole = plan_for(model, tensor_parallel_size=8, hardware="h800x8", colocated=True)
    together = sum(rank.weights for rank in memory.stages)
    assert together == rank_of(whole).weights, "no tensor is held twice, none is missing"


def test_a_row_for_each_rank_of_each_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    model = write_k2(tmp_path / "k2", "fp8")
    words = f"serve {model} --dry-run --hardware h800x8 -tp 8 --colocated -pp 3"
    assert cli.run(words.split()) == 0
    table = capsys.readouterr().out.partition("memory of each rank of an engine of tp8-pp3")[2]
    assert "1 engine on 3 nodes" in table
    rows = [line.split()[:2] for line in table.splitlines()[2:]]
    layers = ["0-19"] * 8 + ["20-40"] * 8 + ["41-60"] * 8
    ranks = [*range(16, 24), *range(8, 16), *range(8)]
    assert rows == [[str(rank), held] for rank, held in zip(ranks, layers, strict=True)]


def test_a_stage_between_two_others_has_a_communicator_more(tmp_path: Path) -> None:
    model = write_k2(tmp_path / "k2", "fp8")
    plan = plan_for(
        model, tensor_parallel_size=8, pipeline_parallel_size=3, hardware="h800x8", colocated=True
    )
    first, middle, last = (rank.communication for rank in plan.ranks[Role.DECODE].stages)
    assert (first, middle - first) == (last, GPU_COMMUNICATOR_BYTES)


def test_ranks_on_cpus_share_cores_and_add_up(tmp_path: Path) -> None:
    model = tmp_path / "small"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small_config()))
    one, two = (plan_for(model, tensor_parallel_size=number, device="cpu") for number in (1, 2))
    assert two.engine_bytes(Role.DECODE) == 2 * rank_of(two).total - rank_of(two).kv, (
        "one copy of the pages"
    )
    assert (one.options.num_threads, two.options.num_threads) == (4, 2)
    assert rank_of(two).weights < rank_of(one).weights < 2 * rank_of(two).weights
    assert rank_of(two).kv == rank_of(one).kv
    staged = plan_for(model, pipeline_parallel_size=2, device="cpu")
    assert staged.options.num_threads == 2
    stages = staged.ranks[Role.DECODE].stages
    assert sum(rank.kv for rank in stages) == rank_of(one).kv
    assert staged.engine_bytes(Role.DECODE) == sum(rank.total for rank in stages)
    dealt = plan_for(model, tensor_parallel_size=2, decode_context_parallel_size=2, device="cpu")
    assert rank_of(dealt).num_pages == -(-dealt.engine.num_blocks // 2)
    limits = dealt.engine_of(Role.DECODE)
    assert (limits.num_homes, limits.num_blocks) == (2, 2 * rank_of(dealt).num_pages)


def test_the_command_prints_a_row_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    model = write_k2(tmp_path / "k2", "int4")
    words = f"serve {model} --dry-run -tp 8 -dcp 8 --hardware h200x8"
    assert cli.run(words.split()) == 0
    table = capsys.readouterr().out.partition("memory of each rank of an engine of tp8-dcp8")[2]
    assert "2 engines on 2 nodes" in table
    assert [line.split()[0] for line in table.splitlines()[2:]] == list("01234567")
    assert cli.run(f"serve {model} --dry-run -tp 4 --hardware h200x8".split()) == 2
    shown = capsys.readouterr()
    assert "memory of each rank" in shown.out
    assert "this would: --tensor-parallel-size 8" in shown.err


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("int4", "-tp 3", "64 attention heads do not divide among 3 ranks; this model can be cut "
         "among 1, 2, 4, 8, 16, 32, 64 ranks"),
        ("fp8", "-tp 32", "would be cut into rows of 576 among 32 ranks, and its quantized blocks "
         "are 128 wide; this model can be cut among 1, 2, 4, 8, 16 ranks"),
        ("int4", "-tp 16", "16 ranks of a stage lie on one node, which has 8 GPUs; "
         "this would: --tensor-parallel-size 8"),
        ("fp8", "-tp 16", "which has 8 GPUs; this would: --tensor-parallel-size 8 "
         "--decode-context-parallel-size 8, or INT4 weights as tp8"),
        ("int4", "--prefill-set tensor-parallel-size=16", "16 ranks of a stage lie on one node"),
        ("narrow", "-tp 2", "down_proj.weight would be cut into columns of 784 among 2 ranks, and "
         "its quantized blocks are 32 wide; this model cannot be cut: leave it at 1"),
        ("int4", "-tp 8 --decode-set decode-context-parallel-size=3",
         "3 does not divide tensor-parallel-size 8; each rank holds one share of the context: "
         "1, 2, 4, 8 would do"),
        ("int4", "-tp 4", "125 GiB (0.9 of a GPU): that leaves room for 0 tokens of KV, and 131072 "
         "are wanted; this would: --tensor-parallel-size 8"),
        ("int4", "-tp 8 -pp 62", "each of 62 stages needs a layer, and this model has 61"),
        ("int4", "-dp 2", "data-parallel-size=2: workers share their experts only with "
         "--enable-expert-parallel; add it, or start 2 workers that share none with --prefill"),
    ],
)  # fmt: skip
def test_the_command_refuses_shapes_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, flags: str, message: str
) -> None:
    # 49 groups of INT4 in a row of an expert's down_proj: no two ranks have as many.
    changes = {"moe_intermediate_size": 49 * 32} if kind == "narrow" else {}
    model = write_k2(tmp_path / "k2", "int4" if kind == "narrow" else kind, **changes)
    assert cli.run(f"serve {model} --dry-run --hardware h200x8 {flags}".split()) == 2
    assert message in capsys.readouterr().err


def test_roles_may_have_shapes_of_their_own(tmp_path: Path) -> None:
    model = tmp_path / "small"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small_config()))
    config = resolve(
        {
            "model": str(model), "prefill": 2, "device": "cpu", "dry_run": True,
            "prefill_set": ["tensor-parallel-size=2"],
        },
        None,
        {},
    )  # fmt: skip
    plan = make_plan(config, 10)
    assert {role: str(rank.shape) for role, rank in plan.ranks.items()} == {
        Role.PREFILL: "tp2",
        Role.DECODE: "tp1",
    }
    assert plan.options.num_threads == 2, "ten cores for five ranks"
    prefill, decode = (plan.engine_bytes(role) for role in (Role.PREFILL, Role.DECODE))
    assert plan.total_bytes == 2 * prefill + decode + plan.kvstore.dram_bytes
    assert plan.memory_rows()[0][0] == "weights (bfloat16), prefill"
    workers = cluster_workers(config, plan, "tcp://g:1", "secret", "host")
    assert {each.worker_id: each.options.shape.tp for each in workers} == {
        "prefill-0": 2, "prefill-1": 2, "decode-0": 1, "kvstore-0": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("max-model-len=4", "not NAME=VALUE with a name of tensor-parallel-size"),
        ("tensor-paralel-size=4", r"did you mean tensor-parallel-size\?"),
        ("tensor-parallel-size=x", "'x' is not a whole number"),
        (["tensor-parallel-size=2", "tensor_parallel_size=4"], "is given twice"),
    ],
)
def test_what_roles_cannot_have(written: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({"model": "m", "decode_set": written}, None, {})


STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2, "device": "cpu",
    "stage_hosts": ["127.0.0.2:7100"], "cluster_secret": "hush",
}  # fmt: skip


def test_stages_on_other_machines_take_no_memory_here(tmp_path: Path) -> None:
    model = write_k2(tmp_path / "k2", "fp8", num_hidden_layers=4)
    here = plan_for(model, **STAGES)
    alone = plan_for(model, **{k: v for k, v in STAGES.items() if k != "stage_hosts"})
    assert here.stage_hosts == (("127.0.0.2", 7100),)
    for role, number in here.engines:
        last = here.ranks[role].stages[-1]
        assert number == 1
        assert here.engine_bytes(role) == last.total + last.dram
        assert alone.engine_bytes(role) > here.engine_bytes(role)
    assert here.memory_rows()[-1][2] != alone.memory_rows()[-1][2]
    assert (here.num_ranks, alone.num_ranks) == (2, 4)
    assert here.options.group_kind == "gloo"


def test_stages_on_gpus_of_other_machines_take_no_gpu_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of four ranks, on a machine of four GPUs."""
    monkeypatch.setattr(machine_facts, "num_gpus", lambda: 4)
    model = write_k2(tmp_path / "k2", "fp8", num_hidden_layers=4)
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    here = {
        "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "device": "cuda",
        "dry_run": False,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="8 ranks and 4 GPU"):
        plan_for(model, **here)
    config = resolve({"model": str(model), **STAGES, **here}, None, {})
    plan = make_plan(config, 8)
    assert plan.options.group_kind == "nccl"
    workers = cluster_workers(config, plan, "tcp://g:1", "hush", "host")
    engines = [each for each in workers if each.role is not Role.KVSTORE]
    assert [each.num_gpus for each in engines] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 1}, "no engine has stages; add --pipeline-parallel-size 2"),
        (
            {"pipeline_parallel_size": 3},
            "the 3 stages of tp1-pp3 need 2, not 1; give one for each stage but",
        ),
        ({"rank_backend": "shm"}, "share no memory; leave out rank-backend=shm"),
        ({"colocated": True}, "has all its stages on this machine"),
        ({"cluster_secret": None}, "know their cluster's secret"),
        ({"stage_hosts": ["10.0.0.8:7100"]}, "other machines cannot reach 127.0.0.1"),
        (
            {"bind_host": "0.0.0.0", "ray_address": "h:1"},
            "do not listen on 0.0.0.0, which is every network",
        ),
        ({"stage_hosts": ["10.0.0.8"]}, "is not HOST:PORT"),
    ],
)
def test_stages_on_other_machines_need_what_they_need(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = write_k2(tmp_path / "k2", "fp8", num_hidden_layers=4)
    with pytest.raises(ConfigError, match=message):
        plan_for(model, **{name: value for name, value in {**STAGES, **changes}.items() if value})
