"""The engines that files of `configs/serve` start for Kimi-K2, on emulated GPUs: all that a file
says is read as `serve` reads it, for a model of four layers and small widths, with small limits.
Those of more than eight ranks take minutes of two cores: `make test-shapes` serves them, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from mooncake.base import (
    GenerateRequest,
    Role,
    SamplingParams,
    Shape,
    SystemIds,
    pack_tokens,
)
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config import shipped
from mooncake.launch.config.config import read_file, resolve
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.ranks import expert_peers
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model import backends, opening
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS, convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.quant_format import Fp8Block, QuantFormat
from mooncake.model.measuring import measure_memory
from mooncake.model.memory import GpuMemory
from tests.device.processes import Processes
from tests.device.served import Joins, opened, prompt
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import RANK_S, followers_emulated
from tests.support.cuda.streams import RANDOM
from tests.support.followers import followers
from tests.support.serve import model_cluster
from tests.support.serve.model_cluster import ModelCluster

pytestmark = pytest.mark.usefixtures("forked")
EVERY = os.environ.get("MOONCAKE_TEST_SHAPES") == "all"
SECRET = "0123456789abcdef" * 2
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 16, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 1024, "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}  # fmt: skip
"""In place of Kimi-K2's: the least that eight ranks can cut into whole blocks of FP8."""
OTHERS = "vocab_size", "torch_dtype", "quantization_config"
"""Settings of Kimi-K2 that these checkpoints do not have, or get when they are converted."""
LIMITS = {
    "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
    "num_threads": 1, "num_gpu_blocks_override": 64,
}  # fmt: skip
DEVICE_BYTES = 32 << 20
NUM_PROMPTS, NUM_TOKENS = 4, 4
Answers = tuple[dict[int, list[int]], dict[int, list[float]]]
"""The tokens and the log-probabilities of each sequence."""
ENGINES = {
    "k2-h200-tp8": True, "k2-h200-dcp8": False, "k2-h800-pp": False, "k2-h800-pd": False,
    "k2-h800-ep": True,
}  # fmt: skip
"""A file for each kind of engine that there is in any file, where it decodes; whether its GPUs are
measured before they get pages, as a worker's always are.
"""
SERVED = [
    (name, plain) for name in ENGINES for plain in (False, True)[: 1 + name.startswith("k2-h800")]
]
"""Each, and those with FP8 in float32, too: there no sum is rounded."""


def joins(numbers: range) -> Joins:
    """Prompts of these numbers. With `dcp` 8 the longest has pages on every rank."""
    return {
        0: [
            (
                prompt(3 + number % 13 + 130 * (number == 3), number),
                SamplingParams(
                    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=1
                ),
            )
            for number in numbers
        ]
    }  # fmt: skip


class Models:
    """The small checkpoint in the format of each of Kimi-K2's, made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[str, Answers] = {}

    def path(self, name: str, *, plain: bool) -> Path:
        """Return the checkpoint that stands for one of `configs/models`. plain: in float32, before
        it was quantized.
        """
        path = self._folder / name
        wide = path.with_name(f"{name}-wide")
        if not path.exists():
            given = shipped.configs() / "models" / name / "config.json"
            config = json.loads(given.read_text())
            [precision] = (
                each
                for each, quantization in QUANTIZATION_CONFIGS.items()
                if quantization == config["quantization_config"]
            )
            kept = {key: value for key, value in config.items() if key not in OTHERS} | SMALL
            init_checkpoint("k2-nano", 0, wide, "float32", overrides=kept)
            convert_checkpoint(wide, path, precision)
        return wide if plain else path

    def answers(self, worker: WorkerSettings) -> Answers:
        """Return the answers of one rank on the CPU, by the references of the format."""
        if worker.model not in self._answers:
            self._answers[worker.model] = answers_of_one_rank(worker)
        return self._answers[worker.model]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("k2"))


def config_of(name: str, models: Models, *, plain: bool, **settings: Any) -> ServeConfig:
    """Return what a file says of `serve`, with these settings and a small model."""
    written = read_file(str(shipped.configs() / "serve" / f"{name}.yaml"))
    for only_planned in ("dry_run", "hardware"):
        written.pop(only_planned, None)
    model = str(models.path(Path(str(written.pop("model"))).name, plain=plain))
    return resolve({**written, **LIMITS, **settings, "model": model}, None, {})


def with_gpus() -> Any:
    """Have this machine show GPUs for all engines of any file."""
    return mock.patch.object(machine_facts, "num_gpus", return_value=128)


def started(
    name: str, models: Models, address: str = "", *, plain: bool = False
) -> tuple[ServePlan, list[WorkerSettings]]:
    """Return what `serve` starts by a file on one machine, as workers of the gateway at
    `address`.
    """
    config = config_of(name, models, plain=plain)
    with with_gpus():
        plan = make_plan(config, 1)
        return plan, cluster_workers(config, plan, address, SECRET, "host")


def engine_of(
    name: str, models: Models, address: str = "", *, plain: bool
) -> tuple[ServePlan, list[WorkerSettings]]:
    """Return the plan by a file, and the workers of its first engine that decodes."""
    plan, workers = started(name, models, address, plain=plain)
    engine = [worker for worker in workers if worker.role is Role.DECODE]
    return plan, engine[: engine[0].options.shape.dp]


def test_each_engine_of_a_file_is_of_a_kind_that_is_served_here(models: Models) -> None:
    def kind(plan: ServePlan, role: Role) -> tuple[Any, ...]:
        options = msgspec.structs.replace(plan.options, shape=plan.ranks[role].shape)
        return plan.model.quantization, options, plan.engine_of(role)

    served = [kind(started(name, models)[0], Role.DECODE) for name in ENGINES]
    for path in (shipped.configs() / "serve").glob("k2-*.yaml"):
        plan, _ = started(path.stem, models)
        assert all(kind(plan, role) in served for role, _ in plan.engines), path
    assert started("k2-h800-16-nodes", models)[0].num_ranks == 128


def answers_of_one_rank(worker: WorkerSettings) -> Answers:
    options = msgspec.structs.replace(
        worker.options, device="cpu", shape=Shape(), attention_backend="reference",
        moe_backend="triton", measure_pages=False,
    )  # fmt: skip
    config = dataclasses.replace(
        worker.engine, num_homes=1, num_stages=1, max_steps_in_flight=1, num_blocks=640
    )
    with (
        emulated(),
        reference_ops(),
        mock.patch.object(backends, "_need_triton"),  # its references need no GPU
        opened(Path(worker.model), options, worker.layout, config) as engine,
    ):
        return engine.run(joins(range(NUM_PROMPTS))), engine.logprobs


def serving(
    worker: WorkerSettings, machine: dict[str, Any], numbers: range, measures: bool
) -> Iterator[tuple[Answers, list[GpuMemory]]]:
    """Be this worker: yield its answers to these prompts, and what its ranks measured."""
    torch.set_num_threads(1)
    with (
        mock.patch.object(expert_peers, "EXCHANGE_S", RANK_S),
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
        measured() as memories,
    ):
        group, peers = worker.expert_group, None
        if group is not None:
            credential = own_credential(SECRET, CredentialRole.WORKER)
            peers = expert_peers.meet(group, credential, worker.options)
        path, layout, limits = Path(worker.model), worker.layout, worker.engine
        with opened(path, worker.options, layout, limits, peers, measures=measures) as engine:
            answers = engine.run(joins(numbers), first=numbers.start), engine.logprobs
            engine.engine.check_integrity([], [])
            yield answers, memories
        gpus.finish()


@contextmanager
def measured() -> Iterator[list[GpuMemory]]:
    """Yield a list into which an engine that starts in the block puts what its ranks measure."""
    found: list[GpuMemory] = []

    def measure(*args: Any) -> list[GpuMemory]:
        found[:] = measure_memory(*args)
        return list(found)

    with mock.patch.object(opening, "measure_memory", measure):
        yield found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "plain"), SERVED if EVERY else SERVED[:1])
def test_an_engine_of_a_file_has_the_answers_of_one_rank_on_the_cpu(
    models: Models, name: str, plain: bool
) -> None:
    plan, workers = engine_of(name, models, f"a test at {SystemIds().hex(8)}", plain=plain)
    wanted = models.answers(workers[0])
    each = NUM_PROMPTS // len(workers)
    engines = Processes(
        serving,
        [
            (
                worker,
                {
                    "num_devices": int(worker.num_gpus),
                    "device_bytes": DEVICE_BYTES,
                    "order": RANDOM,
                    "seed": number,
                },
                range(number * each, (number + 1) * each),
                ENGINES[name],
            )
            for number, worker in enumerate(workers)
        ],
    )
    found = engines.found()
    assert not any(isinstance(each, str) for each in found), found
    engines.go_on()
    for answers, memories in found:
        check_answers(answers, wanted, plan.model.quantization)
        if ENGINES[name] and not plain:
            check_memory(plan, workers[0], memories)
    engines.join()
    assert [each.exitcode for each in engines.each] == [0] * len(workers)


def check_answers(made: Answers, wanted: Answers, quantization: QuantFormat | None) -> None:
    """Compare answers with those of one rank. With FP8, sums in another order may be rounded to
    another number of eight bits: noise of a millionth in the embedding moves log-probabilities of
    one rank by up to 0.15. Then a token that is as likely may come; what follows it is another
    text.
    """
    rounds = isinstance(quantization, Fp8Block)
    within, num_alike = (0.2, 0.75) if rounds else (1e-4, 1.0)
    alike = 0
    for number, tokens in made[0].items():
        pairs = list(zip(tokens, wanted[0][number], strict=True))
        first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
        ours, theirs = (logprobs[number][: first + 1] for logprobs in (made[1], wanted[1]))
        assert ours == pytest.approx(theirs, abs=within)
        alike += first == len(pairs)
    assert alike >= num_alike * len(made[0])


def check_memory(plan: ServePlan, worker: WorkerSettings, found: list[GpuMemory]) -> None:
    """Each rank holds the weights that `--dry-run` shows for it, and little else."""
    shape = worker.options.shape
    assert len(found) == shape.num_ranks
    for rank, memory in enumerate(found):
        stage = plan.ranks[worker.role].stages[shape.stage_of(rank)]
        assert stage.weights <= memory.resident_bytes < 1.05 * stage.weights


@pytest.mark.skipif(not EVERY, reason="it takes 32 ranks: `make test-shapes` runs it")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plain", [False, True])
def test_prefill_and_decode_of_a_file_have_the_answers_of_one_rank_on_the_cpu(
    models: Models, plain: bool
) -> None:
    """Those of k2-h800-pd: blocks go from the 16 GPUs of one engine to the 16 of another. Both
    leads are threads of this process, and share its first GPU.
    """
    config = config_of(
        "k2-h800-pd", models, plain=plain,
        num_gpu_blocks_override=256, kvstore_dram_bytes=1 << 24, self_profile=False,
    )  # fmt: skip
    plan, workers = engine_of("k2-h800-pd", models, plain=plain)
    wanted = models.answers(workers[0])
    machine: dict[str, Any] = {"num_devices": 16, "device_bytes": 2 * DEVICE_BYTES, "order": RANDOM}
    with (
        mock.patch.object(model_cluster, "ANSWER_S", RANK_S),
        with_gpus(),
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
    ):
        cluster = ModelCluster(config, by_role=True, protocols=("tcp",))
        try:
            requests = [
                GenerateRequest(request_id=str(number), prompt=pack_tokens(tokens), sampling=each)
                for number, (tokens, each) in enumerate(joins(range(NUM_PROMPTS))[0])
            ]
            answers = dict(enumerate(map(cluster.submit, requests)))
            for answer in answers.values():
                answer.final()
            made = (
                {number: answer.tokens for number, answer in answers.items()},
                {number: answer.logprobs for number, answer in answers.items()},
            )
            check_answers(made, wanted, plan.model.quantization)
            assert len(followers()) == 30
        finally:
            cluster.stop()
        gpus.finish()
