"""What a training run does, as values. No torch: the command line reads this for its help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OPTIMIZERS = ("muonclip", "muon", "adamw")
"""Muon with and without QK-Clip, and AdamW for all weights to compare with."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run. `mooncake train --help` says what each field is; rates are those of one step."""

    out: str
    tasks: Mapping[str, float]
    preset: str = "k2-demo"
    optimizer: str = "muonclip"
    seed: int = 0
    steps: int = 6000
    warmup_steps: int = 60
    decay_steps: int = 1500
    rate: float = 4e-3
    weight_decay: float = 0.1
    max_logit: float = 100.0
    clip_norms: bool = False
    balance_rate: float = 1e-3
    mtp_weight: float = 0.3
    mtp_steps: int = 4
    step_tokens: int = 8192
    batch_tokens: int = 8192
    max_tokens: int = 4608
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1
    log_steps: int = 10
    save_steps: int = 50
    score_steps: int = 250
    score_samples: int = 32
