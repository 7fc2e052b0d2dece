"""Whole runs of a tiny model: resumed bit for bit, logged, saved as a checkpoint that serves."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake.base import CheckpointError, ConfigError
from mooncake.model.checkpoint.making.presets import PRESETS, Preset, write_preset_files
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.loading import load_model
from mooncake.tasks.mix import TASKS
from mooncake.train.batches import Batch, Batches, packed
from mooncake.train.checkpoint import STATE_NAME, WEIGHTS_NAME, named_tensors, own_tensor
from mooncake.train.config import TrainConfig
from mooncake.train.experts import Experts
from mooncake.train.muon_clip import NormClip
from mooncake.train.run import LOG_NAME, Run
from tests.support.model.tiny_models import forward, kv_for, slot

NANO = PRESETS["k2-nano"]


SMALL: Preset = dataclasses.replace(
    NANO,
    config={
        **NANO.config, "num_hidden_layers": 2, "n_routed_experts": 4,
        "num_nextn_predict_layers": 1,
    },
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def preset() -> Iterator[None]:
    """Have a preset smaller than k2-nano, with an MTP layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "k2-test", SMALL)
        yield


@pytest.fixture(scope="module")
def files(preset: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and tokenizer, which take longer to make than a step."""
    home = tmp_path_factory.mktemp("files")
    write_preset_files("k2-test", home)
    return home


@pytest.fixture
def tmp_path(tmp_path: Path, files: Path) -> Path:
    """A directory for runs, in which the files of each are there already."""
    for name in (".", "whole", "halves", "muonclip", "muon", "adamw"):
        shutil.copytree(files, tmp_path / name, dirs_exist_ok=True)
    return tmp_path


def config(out: Path, **changes: Any) -> TrainConfig:
    given = {
        "out": str(out), "preset": "k2-test", "tasks": {"sum": 1.0, "copy": 1.0},
        "steps": 6, "warmup_steps": 2, "decay_steps": 2, "step_tokens": 400, "mtp_steps": 2,
        "log_steps": 1, "save_steps": 100, "score_steps": 3, "score_samples": 4,
        "max_logit": 0.5, "clip_norms": True,
    }  # fmt: skip
    return TrainConfig(**{**given, **changes})


def train(wanted: TrainConfig, until: int | None = None) -> Run:
    run = Run(wanted)
    run.go(lambda line: None, until)
    return run


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG_NAME).read_text().splitlines()]


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("muonclip", "bfloat16"), ("adamw", "bfloat16"), ("muonclip", "float32")],
)
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, optimizer: str, dtype: str) -> None:
    whole = train(config(tmp_path / "whole", optimizer=optimizer, dtype=dtype))
    halves = config(tmp_path / "halves", optimizer=optimizer, dtype=dtype)
    train(halves, until=3)
    resumed = train(halves)
    assert resumed.step == whole.step == 6
    for (name, value), other in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name
    for name in (STATE_NAME, WEIGHTS_NAME):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    untimed = [
        [{**line, "tokens_per_s": 0} for line in lines(tmp_path / name)]
        for name in ("whole", "halves")
    ]
    assert untimed[0] == untimed[1]


def test_any_number_of_threads_takes_the_same_steps_bit_for_bit(tmp_path: Path) -> None:
    for name, threads in (("whole", 1), ("halves", 3)):
        wanted = config(tmp_path / name, threads=threads, batch_tokens=60, steps=3, mtp_steps=1)
        train(wanted)
    assert len(Batches(tmp_path, 0, 400, 60).of_step(0, wanted.tasks, 4608)) >= 3
    for name in (STATE_NAME, WEIGHTS_NAME):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    logged = [{**line, "tokens_per_s": 0} for line in lines(tmp_path / "whole")]
    assert logged == [{**line, "tokens_per_s": 0} for line in lines(tmp_path / "halves")]


def test_stages_follow_one_another_and_a_run_stopped_in_one_goes_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    stages = [
        {"steps": 3, "decay_steps": 0},
        {"steps": 3, "tasks": {"memory": 1.0}, "rate": 0.001, "warmup_steps": 1},
        {"steps": 2, "tasks": {"sum": 1.0}, "max_tokens": 100, "decay_steps": 0},
    ]
    halves = config(tmp_path / "halves", stages=stages)
    train(halves, until=4)
    resumed, whole = train(halves), train(config(tmp_path / "whole", stages=stages))
    assert resumed.step == whole.step == 8
    for name in (STATE_NAME, WEIGHTS_NAME):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    assert [line["rate"] for line in lines(tmp_path / "halves")] == pytest.approx(
        [0.002, 0.004, 0.004, 0.001, 0.001, 0.0005, 0.002, 0.004]
    )
    assert set(lines(tmp_path / "whole")[-1]["scores"]) == {"sum", "copy", "memory"}


def test_each_stage_draws_its_own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, set[str], int]] = []
    of_step = Batches.of_step

    def noted(self: Batches, step: int, weights: Mapping[str, float], most: int) -> list[Batch]:
        drawn.append((step, set(weights), most))
        return of_step(self, step, weights, most)

    monkeypatch.setattr(Batches, "of_step", noted)
    stages = [{"steps": 2}, {"steps": 1, "tasks": {"memory": 1.0}, "max_tokens": 300}]
    train(config(tmp_path, stages=stages))
    plain = {"sum", "copy"}
    assert drawn == [(0, plain, 4608), (1, plain, 4608), (2, {"memory"}, 300)]


def test_a_run_that_broke_off_forgets_what_it_did_not_save(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    train(wanted, until=2)
    state = (tmp_path / STATE_NAME).read_bytes()
    train(wanted, until=4)
    (tmp_path / STATE_NAME).write_bytes(state)
    assert Run(wanted).step == 2
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_it_saves_when_it_is_stopped(tmp_path: Path) -> None:
    run = Run(config(tmp_path))
    run.go(lambda line: None, stopping=lambda: run.step == 2)
    assert Run(config(tmp_path)).step == 2


def test_what_fills_a_batch_is_no_right_answer(tmp_path: Path) -> None:
    run = Run(config(tmp_path))
    run.model.eval()
    [drawn] = Batches(tmp_path, 0, 400, 8192).of_step(0, {"copy": 1.0}, 4608)
    [rounded] = Batches(tmp_path, 0, 400, 8192, rounded=True).of_step(0, {"copy": 1.0}, 4608)
    assert rounded.num_fillers > 0
    assert run.num_right(rounded) == run.num_right(drawn)


def test_it_learns_and_says_so(tmp_path: Path) -> None:
    train(config(tmp_path, steps=20, rate=0.01, max_logit=100.0))
    logged = lines(tmp_path)
    assert logged[-1]["loss"] < 0.8 * logged[0]["loss"]
    assert [line["step"] for line in logged] == list(range(1, 21))
    assert set(logged[2]["scores"]) == {"sum", "copy"}
    assert [line["mtp_loss"] is None for line in logged[:4]] == [False, True, False, True]
    assert len(logged[0]["max_logits"]) == 3  # two layers and the MTP layer
    assert logged[0]["max_logit"] == max(max(heads) for heads in logged[0]["max_logits"])


def test_qk_clip_works_in_a_run_and_only_where_it_is_asked_for(tmp_path: Path) -> None:
    clipped = [
        sum(line["clipped"] for line in lines(tmp_path / optimizer))
        for optimizer in ("muonclip", "muon", "adamw")
        if train(config(tmp_path / optimizer, optimizer=optimizer, max_logit=0.01, steps=2))
    ]
    assert clipped[0] > 0
    assert clipped[1:] == [0, 0]


def test_the_checkpoint_serves_what_was_trained(tmp_path: Path) -> None:
    run = train(config(tmp_path, dtype="float32"))
    checkpoint = Checkpoint.open(tmp_path)
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    tokens = list(range(40, 80))
    engine = forward(model, kv_for(checkpoint.spec), [slot(0, 0, tokens, range(3))], whole=True)[0]
    with torch.no_grad():
        run.model.eval()
        for weight in run.model.parameters():  # as stored
            weight.copy_(weight.to(torch.bfloat16))
        own = run.model.logits(run.model.hidden(packed([(tokens, [True] * 40)])))
    torch.testing.assert_close(engine, own, rtol=1e-3, atol=1e-3)


def test_the_mtp_layer_has_deepseeks_names(tmp_path: Path) -> None:
    run = train(config(tmp_path, steps=1))
    checkpoint = Checkpoint.open(tmp_path)
    for name in (
        "embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head",
        "self_attn.q_b_proj", "mlp.gate", "mlp.experts.3.down_proj", "mlp.shared_experts.up_proj",
    ):  # fmt: skip
        stored = checkpoint.raw(f"model.layers.2.{name}.weight")
        wanted = {
            "embed_tokens": "embed_tokens.weight", "shared_head.head": "lm_head.weight",
        }.get(name, f"mtp.{name}.weight")  # fmt: skip
        assert torch.equal(stored, own_tensor(run.model.state_dict(), wanted).to(torch.bfloat16))
    bias = checkpoint.raw("model.layers.2.mlp.gate.e_score_correction_bias")
    assert bias.dtype == torch.float32


def test_a_run_begins_with_the_weights_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(tmp_path / "whole", steps=2))
    begun = Run(config(tmp_path / "halves", start_from=str(tmp_path / "whole"), seed=1))
    stored = Checkpoint.open(tmp_path / "whole")
    for name, value in named_tensors(begun.model):
        assert torch.equal(value, stored.tensor(name, tuple(value.shape)).float()), name
    begun.go(lambda line: None, 1)
    resumed = Run(config(tmp_path / "halves", start_from=str(tmp_path / "none"), seed=1))
    assert resumed.step == 1, "a saved state goes before the weights to begin with"
    deeper = {**SMALL.config, "num_hidden_layers": 3}
    monkeypatch.setitem(PRESETS, "k2-deeper", dataclasses.replace(SMALL, config=deeper))
    train(config(tmp_path / "deeper", preset="k2-deeper", steps=1))
    for other in ("none", "muon", "deeper"):
        with pytest.raises(CheckpointError, match="no run of this preset can begin with"):
            Run(config(tmp_path, start_from=str(tmp_path / other)))


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    train(config(tmp_path, steps=1))
    with pytest.raises(CheckpointError, match="not the state of this model"):
        Run(config(tmp_path, preset="k2-nano"))
    with pytest.raises(CheckpointError, match="not the state of this model"):
        Run(config(tmp_path, optimizer="adamw"))
    (tmp_path / STATE_NAME).write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="not the state of this model"):
        Run(config(tmp_path))


def test_a_run_does_not_go_on_with_other_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(tmp_path, steps=1)
    train(wanted)
    Run(config(tmp_path, steps=2, tasks={"sum": 1.0, "memory": 1.0}))  # a task more is no change
    monkeypatch.setitem(TASKS, "sum", TASKS["difference"])
    with pytest.raises(CheckpointError, match="samples of sum are not those"):
        Run(wanted)


class Killed(Exception):
    """The process is gone: nothing is saved any more."""


def test_a_run_killed_after_any_step_ends_as_one_that_was_not(tmp_path: Path) -> None:
    changes = {"save_steps": 2, "steps": 5, "score_steps": 100, "tasks": {"copy": 1.0, "call": 1.0}}
    whole = train(config(tmp_path / "whole", **changes))

    def killing(last: int, line: Mapping[str, Any]) -> None:
        if line["step"] == last:
            raise Killed

    for last in range(1, 6):
        with pytest.raises(Killed):
            Run(config(tmp_path / "halves", **changes)).go(partial(killing, last))
    resumed = train(config(tmp_path / "halves", **changes))
    assert resumed.step == whole.step == 5
    for name in (STATE_NAME, WEIGHTS_NAME):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    assert [line["step"] for line in lines(tmp_path / "halves")] == [1, 2, 3, 4, 5]


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset"):
        Run(config(tmp_path, preset="k2-huge"))


@pytest.mark.parametrize("optimizer", ["muonclip", "adamw"])
def test_a_step_on_a_device_reads_nothing_from_it_and_mixes_no_devices(
    tmp_path: Path, optimizer: str
) -> None:
    """Tensors of torch's "meta" device have no values: reading one raises, as does an op over one
    and a tensor of the CPU. Their ops take the forms of a GPU.
    """
    run = Run(config(tmp_path, device="meta", optimizer=optimizer, dtype="bfloat16", max_logit=1.0))
    drawn = Batches(tmp_path, 0, 1500, 900).of_step(0, {"code": 1.0, "sum": 1.0}, 900)
    assert len(drawn) > 1
    run._norms = NormClip(window=2)
    measured = [run.take_step(drawn) for _ in range(4)][-1]
    assert run.step == 4
    assert measured.max_logits.device.type == "meta"
    with pytest.raises(RuntimeError):
        measured.line()


def test_other_forms_on_a_gpu_take_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forms that a GPU takes, on the CPU."""
    drawn = Batches(tmp_path, 0, 1500, 900).of_step(0, {"copy": 1.0}, 900)
    losses = []
    for name, form in (("adamw", Experts.chosen_only), ("muon", Experts.all_at_once)):
        monkeypatch.setattr(Experts, "forward", form)
        run = Run(config(tmp_path / name, optimizer="muonclip", dtype="float32"))
        losses.append([float(run.take_step(drawn).loss) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
