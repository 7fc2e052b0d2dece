"""`mooncake tune` measures kernel configurations on this GPU and writes their table."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from mooncake.base import ConfigError
from mooncake.cli.command import Command
from mooncake.launch.config import options
from mooncake.launch.config.options import SomeOf, setting, text
from mooncake.telemetry.terminal import progress

EXPERTS = "experts of Kimi-K2"
FORMATS = ("plain", "fp8", "int4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune:
    # fmt: off
    split: str = setting("tp8", text, EXPERTS, "NAME", "how the experts are split: tp8, tp16, ep16")
    format: tuple[str, ...] = setting(FORMATS, SomeOf(*FORMATS), EXPERTS, "NAME",
        "format of the weights; may be repeated", repeat=True)
    # fmt: on


def tune(wanted: Tune) -> int:
    """Measure the experts of Kimi-K2, split as asked for, on this GPU and write its table."""
    from mooncake_kernels.timing import local_device
    from mooncake_kernels.tune import BATCHES, KIMI_K2_RANKS, rank_shape, tune_experts
    from mooncake_kernels.tuning import TABLES, Target, save_table

    split = options.OneOf(*KIMI_K2_RANKS)("split", wanted.split)
    device, place = local_device()
    if device.type != "cuda":
        raise ConfigError("tune measures kernels on a CUDA GPU, and there is none here")
    import triton

    target = Target(place, triton.__version__)
    console = Console(stderr=True)
    for name in wanted.format:
        shape = rank_shape(name, split)
        with progress(shape.key, len(BATCHES), console) as show:
            found = tune_experts(shape, progress=show)
        save_table(TABLES / target.file_name, target, {shape.key: found})
        console.print(f"{shape.key}: {len(found)} batches in {TABLES / target.file_name}")
    return 0


COMMANDS = (
    Command(
        words="tune", settings=Tune, run=tune,
        examples="mooncake tune --split tp8 --format int4\n"
        "mooncake tune --split ep16 --format fp8 --format int4",
    ),
)  # fmt: skip
