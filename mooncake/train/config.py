"""The settings of a training run, as values. It needs no torch, because the command line reads it
for its help.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPTIMIZERS = ("muonclip", "muon", "adamw")
"""Muon with and without QK-Clip, and AdamW for all weights as a comparison."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps of a run that draw the same tasks. The learning rate is that of one step."""

    tasks: Mapping[str, float]
    steps: int = 6000
    warmup_steps: int = 60
    decay_steps: int = 1500
    rate: float = 4e-3
    max_tokens: int = 4608

    def rate_at(self, step: int) -> float:
        """Return the learning rate of the stage's step `step`, from 0. It rises from zero at the
        beginning and falls to zero at the end.
        """
        rising = (step + 1) / max(1, self.warmup_steps)
        falling = (self.steps - step) / max(1, self.decay_steps)
        return self.rate * min(1.0, rising, falling)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Stage):
    """A run of one stage or several. `mooncake train --help` explains each field."""

    out: str
    stages: Sequence[Mapping[str, Any]] = ()
    """The settings of each stage that differ from the run's."""
    preset: str = "k2-demo"
    start_from: str = ""
    optimizer: str = "muonclip"
    seed: int = 0
    weight_decay: float = 0.1
    max_logit: float = 100.0
    clip_norms: bool = False
    balance_rate: float = 1e-3
    mtp_weight: float = 0.3
    mtp_steps: int = 4
    step_tokens: int = 8192
    batch_tokens: int = 8192
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1
    data_processes: int = 0
    log_steps: int = 10
    save_steps: int = 50
    score_steps: int = 250
    score_samples: int = 32

    def parts(self) -> list[Stage]:
        """Return the run's stages in their order."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(Stage)}
        return [Stage(**{**own, **changes}) for changes in self.stages or ({},)]

    def stage_of(self, step: int) -> tuple[Stage, int]:
        """Return the stage of step `step`, from 0, and how many steps of that stage come
        before it.
        """
        for stage in self.parts():
            if step < stage.steps:
                break
            step -= stage.steps
        return stage, step

    @property
    def total_steps(self) -> int:
        """The number of steps of all stages."""
        return sum(stage.steps for stage in self.parts())
