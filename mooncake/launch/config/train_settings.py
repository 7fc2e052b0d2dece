"""Settings of `mooncake train`. Defaults come from the fields of `mooncake.train` that they set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mooncake.base import ConfigError
from mooncake.launch.config.options import (
    OneOf,
    count,
    flag,
    json_object,
    nearest,
    number,
    options_of,
    owned,
    positive,
    setting,
    text,
    texts,
    truth,
)
from mooncake.tasks.mix import TASKS
from mooncake.train.config import OPTIMIZERS, Stage, TrainConfig

MODEL, DATA, OPTIMIZER, PROGRESS = "model", "data", "optimizer", "progress"


def weights(name: str, value: object) -> tuple[tuple[str, float], ...]:
    """Read weights of tasks: a mapping, one text "TASK=WEIGHT", or a list of such texts."""
    if isinstance(value, Mapping):
        pairs = {str(task): weight for task, weight in value.items()}
    else:
        split = [written.partition("=") for written in texts(name, value)]
        pairs = {task: weight for task, _, weight in split}
    for task in pairs:
        if task not in TASKS:
            raise ConfigError(
                f"{flag(name)}: {task!r} is not one of {', '.join(TASKS)}{nearest(task, TASKS)}"
            )
    return tuple((task, positive(f"{name} {task}", weight)) for task, weight in pairs.items())


def stages(name: str, value: object) -> tuple[dict[str, Any], ...]:
    """Read settings of stages: mappings, or texts that hold them as JSON objects."""
    known = options_of(Train)
    own = [field.name for field in dataclasses.fields(Stage)]
    found = []
    for written in value if isinstance(value, list | tuple) else [value]:
        stage = {}
        for key, one in json_object(name, written).items():
            field = str(key).replace("-", "_")
            if field not in own:
                raise ConfigError(
                    f"{flag(name)}: {key!r} is not one of {', '.join(map(flag, own))}"
                    f"{nearest(flag(str(key)), map(flag, own))}"
                )
            read = known[field][0].read(field, one)
            stage[field] = dict(read) if field == "tasks" else read
        found.append(stage)
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    # fmt: off
    out: str = setting("", text, MODEL, "DIR",
        "directory of the run; if it holds a saved state, the run goes on from there",
        required=True)
    preset: str = owned(TrainConfig, "preset", text, MODEL, "NAME",
        "shape and tokenizer of the model")
    start_from: str = owned(TrainConfig, "start_from", text, MODEL, "DIR",
        "directory of an earlier run of the preset, with whose weights this one begins; random "
        "weights where none is given")
    seed: int = owned(TrainConfig, "seed", count(0), MODEL, "N", "seed of weights and samples")
    dtype: str = owned(TrainConfig, "dtype", OneOf("bfloat16", "float32"), MODEL, "NAME",
        "data type of products; weights and sums are float32")
    device: str = owned(TrainConfig, "device", text, MODEL, "NAME",
        "device that computes: cpu or cuda")
    threads: int = owned(TrainConfig, "threads", count(1), MODEL, "N",
        "number of CPU threads; each computes one batch of a step at a time, and their number "
        "changes no result")
    tasks: tuple[tuple[str, float], ...] = setting((), weights, DATA, "TASK=WEIGHT",
        f"how often each task is drawn, of {', '.join(TASKS)}", repeat=True, required=True)
    step_tokens: int = owned(TrainConfig, "step_tokens", count(1), DATA, "N", "tokens of a step")
    batch_tokens: int = owned(TrainConfig, "batch_tokens", count(1), DATA, "N",
        "tokens computed at a time; this bounds memory")
    max_tokens: int = owned(TrainConfig, "max_tokens", count(8), DATA, "N",
        "most tokens of a conversation; longer ones are drawn again")
    data_processes: int = owned(TrainConfig, "data_processes", count(0), DATA, "N",
        "processes that draw the samples of coming steps; 0: none, the run draws each in its turn")
    stages: tuple[dict[str, Any], ...] = setting((), stages, DATA, "JSON",
        "stages of the run, one after another, each an object with the settings that differ: "
        "tasks, steps, rate, warmup-steps, decay-steps, max-tokens", repeat=True)
    optimizer: str = owned(TrainConfig, "optimizer", OneOf(*OPTIMIZERS), OPTIMIZER, "NAME",
        "optimizer; muon is muonclip without QK-Clip")
    steps: int = owned(TrainConfig, "steps", count(1), OPTIMIZER, "N", "number of steps of a stage")
    warmup_steps: int = owned(TrainConfig, "warmup_steps", count(0), OPTIMIZER, "N",
        "steps at the beginning of a stage in which the rate rises")
    decay_steps: int = owned(TrainConfig, "decay_steps", count(0), OPTIMIZER, "N",
        "steps at the end of a stage in which the rate falls to zero")
    rate: float = owned(TrainConfig, "rate", positive, OPTIMIZER, "R", "learning rate")
    weight_decay: float = owned(TrainConfig, "weight_decay", number, OPTIMIZER, "W",
        "weight decay of matrices")
    max_logit: float = owned(TrainConfig, "max_logit", positive, OPTIMIZER, "X",
        "QK-Clip shrinks heads whose attention logits exceed this")
    clip_norms: bool = owned(TrainConfig, "clip_norms", truth, OPTIMIZER, "",
        "scale gradients down to the 95 % quantile of the last 128 norms")
    balance_rate: float = owned(TrainConfig, "balance_rate", number, OPTIMIZER, "R",
        "change of the router's bias in a step")
    mtp_weight: float = owned(TrainConfig, "mtp_weight", number, OPTIMIZER, "W",
        "weight of the MTP layer's loss")
    mtp_steps: int = owned(TrainConfig, "mtp_steps", count(0), OPTIMIZER, "N",
        "train the MTP layer too in every N-th step; 0: never")
    log_steps: int = owned(TrainConfig, "log_steps", count(1), PROGRESS, "N",
        "steps between two log lines")
    save_steps: int = owned(TrainConfig, "save_steps", count(1), PROGRESS, "N",
        "steps between two saves")
    score_steps: int = owned(TrainConfig, "score_steps", count(1), PROGRESS, "N",
        "steps between two scores on held-out samples")
    score_samples: int = owned(TrainConfig, "score_samples", count(1), PROGRESS, "N",
        "number of samples of each task for a score")
    # fmt: on

    def run(self) -> TrainConfig:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)}
        return TrainConfig(**{**given, "tasks": dict(self.tasks)})
