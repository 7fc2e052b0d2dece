"""`mooncake profile`: time an engine's steps here and fit the Conductor's cost models to them.

What workers do in two seconds at their start, here with as many sizes as fit, repeats and the error
of the fit. One model for each role, as each worker has its own.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mooncake.base import ConfigError, CostSample, Role
from mooncake.engine.config import EngineConfig
from mooncake.launch import machine_facts
from mooncake.launch.profile import Shape
from mooncake.scheduler.cost import StepCostModel

if TYPE_CHECKING:
    from mooncake.launch.direct import DirectEngine

PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
"""New tokens of a step of one prompt ..."""
PREFIXES = (0, 512, 2048, 8192, 32768)
"""... after so many that are there."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of a decode step ..."""
CONTEXTS = (64, 512, 2048, 8192, 32768)
"""... with so many tokens each."""
ROLES = (Role.PREFILL, Role.DECODE)
MIN_SAMPLES = 6
TERMS = ("s a step", "s a token", "s a pair of new and earlier token", "s a pair of new tokens")


def shapes_within(role: Role, config: EngineConfig) -> list[Shape]:
    """Return the steps of a role that fit an engine's limits and pages, small ones first."""
    if role is Role.PREFILL:
        wanted = [(1, new, before) for new in PROMPTS for before in PREFIXES]
    else:
        wanted = [(sequences, 1, context) for sequences in BATCHES for context in CONTEXTS]
    return sorted(
        {
            (sequences, new, before)
            for sequences, new, before in wanted
            if sequences <= config.max_num_seqs
            and sequences * new <= config.max_batched_tokens
            and new + before <= config.max_model_len
            and sequences * config.num_pages(new + before) <= config.num_blocks
        },
        key=lambda shape: (shape[0] * shape[1], shape[0] * shape[2]),
    )


@dataclass(frozen=True)
class Fit:
    """Measured steps and what a cost model makes of them."""

    samples: Sequence[CostSample]
    coefficients: tuple[float, ...]
    predicted_s: Sequence[float]
    """Of each sample, by a model fitted to all the others: the error is not flattered."""

    @property
    def errors(self) -> list[float]:
        """Relative errors of the predictions."""
        return [
            abs(predicted - sample.seconds) / sample.seconds
            for sample, predicted in zip(self.samples, self.predicted_s, strict=True)
        ]


def fit(samples: Sequence[CostSample]) -> Fit:
    """Fit the Conductor's model and hold it against each sample in turn.

    Raises:
        ConfigError: too few samples to say anything.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(
            f"only {len(samples)} kinds of steps fit into this engine; give it more pages "
            "(--kv-cache-memory-bytes) or a longer --max-model-len"
        )
    predicted = []
    for left_out, sample in enumerate(samples):
        model = StepCostModel([*samples[:left_out], *samples[left_out + 1 :]])
        predicted.append(
            model.step_s(sample.num_new_tokens, sample.num_context_tokens, sample.num_sequences)
        )
    return Fit(samples, StepCostModel(samples).coefficients, predicted)


def run(
    model: str, settings: dict[str, Any], *, repeats: int, out: str | None, as_json: bool
) -> int:
    """Profile the checkpoint at `model`, print tables or JSON, write `out` where it is given.

    Raises:
        MooncakeError: a setting is wrong, or the model cannot be run.
    """
    from mooncake.launch.direct import DirectEngine

    if out is not None and not Path(out).absolute().parent.is_dir():
        raise ConfigError(f"out: the directory of {out} is not there")
    console = Console(stderr=as_json)
    with DirectEngine.open(model, **settings) as engine:
        config = engine.config
        fits = {role: fit(_time(engine, role, repeats, console)) for role in ROLES}
    document = {
        "model": model,
        "host": machine_facts.host_name(),
        "cores": machine_facts.num_cores(),
        "max_batched_tokens": config.max_batched_tokens,
        **{role.value: _document(found) for role, found in fits.items()},
    }
    if out is not None:
        Path(out).write_text(json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document))
    else:
        for role, found in fits.items():
            _show(found, f"{role.value} steps of {model} on this machine", console)
    return 0


def _time(engine: DirectEngine, role: Role, repeats: int, console: Console) -> list[CostSample]:
    """Return the median of a few runs of each step."""
    columns = (TextColumn(f"{role.value} steps"), BarColumn(), MofNCompleteColumn())
    samples = []
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        for shape in bar.track(shapes_within(role, engine.config)):
            timed = [engine.time_step(shape) for _ in range(repeats)]
            seconds = statistics.median(sample.seconds for sample in timed)
            samples.append(msgspec.structs.replace(timed[0], seconds=seconds))
    return samples


def _document(found: Fit) -> dict[str, Any]:
    return {
        "samples": [msgspec.structs.asdict(sample) for sample in found.samples],
        "coefficients": list(found.coefficients),
        "error": {"median": statistics.median(found.errors), "max": max(found.errors)},
    }


def _show(found: Fit, title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("sequences", "new tokens", "in KV before", "ms", "fit ms", "error"):
        table.add_column(heading, justify="right")
    rows = zip(found.samples, found.predicted_s, found.errors, strict=True)
    for sample, predicted, error in rows:
        table.add_row(
            str(sample.num_sequences),
            str(sample.num_new_tokens),
            str(sample.num_context_tokens),
            f"{1000 * sample.seconds:.2f}",
            f"{1000 * predicted:.2f}",
            f"{error:.0%}",
        )
    console.print(table)
    for value, term in zip(found.coefficients, TERMS, strict=True):
        console.print(f"{value:.3g} {term}", highlight=False)
    console.print(
        f"error of a step left out of the fit: median {statistics.median(found.errors):.0%}, "
        f"largest {max(found.errors):.0%}",
        highlight=False,
    )
