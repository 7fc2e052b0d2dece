"""`mooncake profile` times an engine's steps here and fits the Conductor's cost models to them.

Workers do this in two seconds at their start. Here it is done with as many sizes as fit, with
repeats, and with the error of the fit. Each role gets one model, as each worker has its own.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from mooncake.base import CostSample, Role
from mooncake.cli.command import Command
from mooncake.cli.results import check_writable, write
from mooncake.launch.config.options import count, same_as, setting, shared_values, text, truth
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.profile import ROLES, Fit, fit, shapes_within
from mooncake.telemetry.terminal import progress, show_rows

if TYPE_CHECKING:
    from mooncake.launch.worker.direct import DirectEngine

TERMS = (
    "s a step", "s a token", "s a pair of new and earlier token", "s a pair of new tokens",
    "s an earlier token",
)  # fmt: skip
STREAM_TERMS = ("s a step of streams", "s a stream", "s an earlier token of a stream")
ENGINE, RESULT = "engine", "result"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    model: str = setting("", text, ENGINE, "DIR", "the checkpoint", positional=True, required=True)
    dtype: str = same_as(ServeConfig, "dtype", ENGINE)
    max_model_len: int | None = same_as(ServeConfig, "max_model_len", ENGINE)
    max_num_seqs: int = same_as(ServeConfig, "max_num_seqs", ENGINE)
    max_num_batched_tokens: int | None = same_as(ServeConfig, "max_num_batched_tokens", ENGINE)
    num_threads: int | None = same_as(ServeConfig, "num_threads", ENGINE)
    kv_cache_memory_bytes: int | None = same_as(ServeConfig, "kv_cache_memory_bytes", ENGINE)
    device: str = same_as(ServeConfig, "device", ENGINE)
    repeats: int = setting(3, count(1), RESULT, "N", "number of times that each step is run")
    out: str | None = setting(
        None, text, RESULT, "FILE", "write the samples and the fit to this file"
    )
    json: bool = setting(False, truth, RESULT, "", "print what --out writes")


def run(wanted: Profile) -> int:
    """Profile a checkpoint, print tables or JSON, write `out` where it is given."""
    from mooncake.launch.worker.direct import DirectEngine

    check_writable(wanted.out)
    console = Console(stderr=wanted.json)
    with DirectEngine.open(**shared_values(wanted, ServeConfig)) as engine:
        config = engine.config
        experts = engine.expert_timings
        fits = {role: fit(_time(engine, role, wanted.repeats, console)) for role in ROLES}
    document = {
        "model": wanted.model,
        "host": machine_facts.host_name(),
        "cores": machine_facts.num_cores(),
        "max_batched_tokens": config.max_batched_tokens,
        "experts": experts,
        **{role.value: _document(found) for role, found in fits.items()},
    }
    write(wanted.out, json.dumps(document, indent=1) + "\n")
    if wanted.json:
        print(json.dumps(document))
    else:
        if experts:
            _show_experts(experts, console)
        for role, found in fits.items():
            _show(found, f"{role.value} steps of {wanted.model} on this machine", console)
    return 0


def _time(engine: DirectEngine, role: Role, repeats: int, console: Console) -> list[CostSample]:
    """Return the median of a few runs of each step."""
    samples, shapes = [], shapes_within(role, engine.config)
    with progress(f"{role.value} steps", len(shapes), console) as show:
        for done, shape in enumerate(shapes, 1):
            timed = [engine.time_step(shape) for _ in range(repeats)]
            seconds = statistics.median(sample.seconds for sample in timed)
            samples.append(msgspec.structs.replace(timed[0], seconds=seconds))
            show(done, len(shapes))
    return samples


def _document(found: Fit) -> dict[str, Any]:
    return {
        "samples": [msgspec.structs.asdict(sample) for sample in found.samples],
        "coefficients": list(found.coefficients),
        "stream_coefficients": list(found.stream_coefficients),
        "error": {"median": statistics.median(found.errors), "max": max(found.errors)},
    }


def _show_experts(timings: list[dict[str, Any]], console: Console) -> None:
    """Print how one layer's experts were timed by each candidate, to choose between them."""
    rows = [["kind", "tokens", "compiled code, CPU ms", "oneDNN (widened first), CPU ms", "taken"]]
    for found in timings:
        few_s, many_s = found["few_s"], found["many_s"]
        taken = "compiled" if few_s <= many_s else "oneDNN"
        tokens = str(found["tokens"])
        rows.append([found["kind"], tokens, f"{1e3 * few_s:.2f}", f"{1e3 * many_s:.2f}", taken])
    show_rows("experts of one layer on this CPU", rows, console)


def _show(found: Fit, title: str, console: Console) -> None:
    rows = [["sequences", "new tokens", "in KV before", "ms", "fit ms", "error"]]
    for sample, predicted, error in zip(
        found.samples, found.predicted_s, found.errors, strict=True
    ):
        numbers = sample.num_sequences, sample.num_new_tokens, sample.num_context_tokens
        times = f"{1000 * sample.seconds:.2f}", f"{1000 * predicted:.2f}", f"{error:.0%}"
        rows.append([*map(str, numbers), *times])
    show_rows(title, rows, console)
    of_streams = any(sample.num_streams for sample in found.samples)
    fitted = found.stream_coefficients if of_streams else found.coefficients
    for value, term in zip(fitted, STREAM_TERMS if of_streams else TERMS, strict=True):
        console.print(f"{value:.3g} {term}", highlight=False)
    console.print(
        f"error of a step left out of the fit: median {statistics.median(found.errors):.0%}, "
        f"largest {max(found.errors):.0%}",
        highlight=False,
    )


COMMANDS = (
    Command(
        words="profile", settings=Profile, run=run,
        examples="mooncake profile checkpoints/k2-small\n"
        "mooncake profile checkpoints/k2-small --num-threads 2 --out this-machine.json --json",
    ),
)  # fmt: skip
