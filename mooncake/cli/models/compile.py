"""`mooncake compile` makes the compiled code that a start needs, to be shipped with an image or a
volume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from mooncake.base import ConfigError
from mooncake.cli.command import Command
from mooncake.engine.config import SpeculativeConfig
from mooncake.launch.config import options
from mooncake.launch.config.config import read_settings, resolve
from mooncake.launch.config.options import OneOf, same_as, setting, text, truth
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.rank_plan import STEP_TOKENS
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.processes.start_phases import importing
from mooncake.telemetry.terminal import progress

HARDWARE = {"h100": "h800x8", "h200": "h200x8", "h800": "h800x8"}
"""GPU -> figures of a machine with as much memory: the plan needs no others."""
MODEL, ENGINE, RESULT = "model", "engine", "result"
OWN = ("gpu", "output", "json")
NOTES = """\
Give the settings that `mooncake serve` gets, or its YAML file by --config: kernels depend on them.
Neither a GPU nor the weights are needed, only the checkpoint's config.json; a model in
configs/models needs only its name. Start with `mooncake serve --compile-cache DIR`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    # fmt: off
    model: str = same_as(ServeConfig, "model", MODEL)
    dtype: str = same_as(ServeConfig, "dtype", MODEL)
    max_model_len: int | None = same_as(ServeConfig, "max_model_len", MODEL)
    kv_cache_dtype: str = same_as(ServeConfig, "kv_cache_dtype", MODEL)
    block_size: int = same_as(ServeConfig, "block_size", ENGINE)
    max_num_seqs: int = same_as(ServeConfig, "max_num_seqs", ENGINE)
    max_num_batched_tokens: int | None = same_as(ServeConfig, "max_num_batched_tokens", ENGINE)
    tensor_parallel_size: int = same_as(ServeConfig, "tensor_parallel_size", ENGINE)
    decode_context_parallel_size: int = same_as(
        ServeConfig, "decode_context_parallel_size", ENGINE)
    pipeline_parallel_size: int = same_as(ServeConfig, "pipeline_parallel_size", ENGINE)
    deterministic: bool = same_as(ServeConfig, "deterministic", ENGINE)
    speculative_config: SpeculativeConfig | None = same_as(
        ServeConfig, "speculative_config", ENGINE)
    gpu: str | None = setting(None, OneOf(*HARDWARE), RESULT, "NAME",
        "compile the kernels of this GPU (its SXM form); without it the code of CPUs is compiled")
    output: str = setting("", text, RESULT, "DIR",
        "directory to write to; what it has already is kept", required=True)
    json: bool = setting(False, truth, RESULT, "", "print what was made as JSON")
    # fmt: on


@dataclasses.dataclass(frozen=True)
class _Asked:
    own: Compile
    serve: ServeConfig | None
    """None: only the code of CPUs is asked for."""


def read(given: Mapping[str, object], file: str | None, environ: Mapping[str, str]) -> _Asked:
    """Return what is asked for, with the settings of `serve` from its own file and variables."""
    own = read_settings(Compile, given, None, environ)
    if own.gpu is None:
        if more := sorted(given.keys() - set(OWN)) + ([] if file is None else ["config"]):
            raise ConfigError(
                f"gpu: is missing; without it only the code of CPUs is compiled, which is the same "
                f"for all settings: give --gpu, or leave out {', '.join(map(options.flag, more))}"
            )
        return _Asked(own, None)
    settings = {name: value for name, value in given.items() if name not in OWN}
    settings |= {"dry_run": True, "hardware": HARDWARE[own.gpu]}
    return _Asked(own, resolve(settings, file, environ))


def run(asked: _Asked) -> int:
    """Compile, and print what was made."""
    from mooncake_kernels import trusted

    own, console = asked.own, Console(stderr=True)
    folder = Path(own.output)
    began_s = time.monotonic()
    umask = os.umask(0o022)  # what others can write to would not be used
    try:
        os.umask(umask | 0o022)
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if asked.serve is None:
            made = _for_cpus(folder)
        else:
            made = _for_gpu(folder, own.gpu or "", asked.serve, console)
    except OSError as error:
        raise ConfigError(f"output: {error.filename}: {error.strerror}") from None
    finally:
        os.umask(umask)
    made["seconds"] = round(time.monotonic() - began_s, 1)
    if own.json:
        print(json.dumps(made, indent=2))
        return 0
    for name, number in made["kernels"].items():
        print(f"{number:4} {name}")
    print(f"{made['folder']}: {sum(made['kernels'].values())} in {made['seconds']} s")
    try:
        trusted.checked(folder)
        print(f"mooncake serve --compile-cache {folder} reads it")
    except trusted.Untrusted as error:
        print(f"mooncake serve will not read it: {error}")
    return 0


def _for_cpus(folder: Path) -> dict[str, Any]:
    from mooncake_kernels.native import build

    try:
        files = build.compile_all(folder)
    except build.CannotBuild as error:
        raise ConfigError(f"the code of CPUs cannot be compiled here: {error}") from None
    return {"folder": str(folder), "kernels": {path.name: 1 for path in files}}


def _for_gpu(folder: Path, gpu: str, config: ServeConfig, console: Console) -> dict[str, Any]:
    plan = make_plan(config, machine_facts.num_cores())
    with importing():
        try:
            from mooncake_kernels.triton import ahead
        except ImportError as error:
            raise ConfigError(f"gpu: kernels are compiled by {error.name}: install it") from error
    kind = ahead.GPUS[gpu]
    variants: list[ahead.Variant] = []
    try:
        with ahead.noted(kind) as variants:
            _launch_all(plan, config)
    except RuntimeError as error:
        raise ConfigError(f"gpu: {error}") from error
    with progress("kernels", len(variants), console) as show:
        made = ahead.compile_into(folder, variants, kind, show)
    kernels = Counter(each.name for each in variants)
    return {"folder": str(made), "gpu": gpu, "kernels": dict(sorted(kernels.items()))}


def _launch_all(plan: ServePlan, config: ServeConfig) -> None:
    """Run the steps of each role's engines. Their largest step may be that of a GPU with more
    room.
    """
    from mooncake.model.compiling import model_without_numbers, run_steps

    most = config.max_num_batched_tokens or STEP_TOKENS[0]
    model = plan.model
    for role, memory in plan.ranks.items():
        engine = dataclasses.replace(plan.engine_of(role), max_batched_tokens=most)
        options = msgspec.structs.replace(plan.options, shape=memory.shape)
        made = model_without_numbers(model.spec, model.quantization, model.dtype, options)
        run_steps(*made, plan.layout, engine, options)


COMMANDS = (
    Command(
        words="compile", settings=Compile, run=run, own_read=read, takes_file=True, notes=NOTES,
        examples="mooncake compile kimi-k2-thinking --tensor-parallel-size 8 --gpu h200 \\\n"
        "    --output /cache\n"
        "mooncake compile /models/k2 --config configs/serve/k2-h200-tp8.yaml --gpu h200 \\\n"
        "    --output /cache\n"
        "mooncake compile --output /cache                the code of CPUs, for all of their kinds",
    ),
)  # fmt: skip
