"""One step of the model alone, on the CPU: `python -m benchmarks step [DIR]`.

No engine, no server. Wall and CPU time, calls of torch's operators a layer (views are none; a call
of compiled code is one), primitives that oneDNN built, and how many times longer a step takes than
reading once what it touches: weights of the experts that tokens choose, all others, and the KV.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mooncake_kernels.native import build
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.servers import KEPT_HEAP, WAIT_POLICY, machine
from mooncake.base import KvLayout, ModelSpec
from mooncake.engine.plan import StepSlot
from mooncake.launch.host import environment
from mooncake.model.backends import settle
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import load_model
from mooncake.model.options import ATTENTION_BACKENDS, MOE_BACKENDS

SHAPES = ("1,1,512", "1,1,1024", "8,1,512", "8,1,1024", "1,512,0", "1,2048,0")
BLOCK_TOKENS, NUM_PAGES = 64, 640
BF16_BYTES = 2
COMPILED = (
    "experts_bf16", "experts_int4", "experts_fp8", "linear_bf16", "linear_fp8", "attention_bf16",
    "mla_layer_bf16", "mla_expanded_bf16", "kv_write_bf16", "prepare_queries_bf16",
    "rms_norm_bf16", "route_bf16", "fixed_product", "fixed_attention", "fixed_sigmoid",
)  # fmt: skip


class Calls(TorchDispatchMode):
    """Counts operators that compute or move something, and calls of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        # `to` and `reshape` are views by name, and copies where they have to be.
        viewed = func.is_view and (
            not isinstance(made, torch.Tensor)
            or made.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        )
        self.num += 0 if viewed else 1
        return made

    def count_compiled(self, code: ctypes.CDLL) -> None:
        """Count calls of functions of `code` too, in this process from now on."""
        for name in COMPILED:
            if hasattr(code, name):  # attention is compiled for AVX-512 only
                setattr(code, name, self._counted(getattr(code, name)))

    def _counted(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            self.num += 1
            function(*args)

        return call


def touched_bytes(spec: ModelSpec, model_bytes: Callable[[str], int], shape: list[int]) -> float:
    """Return the bytes that one step must read: see the module."""
    sequences, new, before = shape
    rows = sequences * new
    share = 1 - (1 - spec.num_experts_per_tok / spec.n_routed_experts) ** rows
    kv = sequences * (before + new) * spec.kv_width * spec.num_hidden_layers * BF16_BYTES
    return model_bytes("rest") + share * model_bytes("experts") + kv


def read_bandwidth() -> float:
    """Return bytes a second of reading memory on the threads torch has."""
    room = torch.ones(1 << 28)
    room.sum()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        room.sum()
        best = min(best, time.perf_counter() - begin)
    return room.numel() * room.element_size() / best


def sizes(path: Path) -> Callable[[str], int]:
    """Return the bytes of a checkpoint's routed experts and of the rest but the embedding."""
    found = {"experts": 0, "rest": 0}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                if "embed_tokens" not in name:
                    size = opened.get_tensor(name).nbytes
                    found["experts" if ".mlp.experts." in name else "rest"] += size
    return found.__getitem__


def run(model: KimiK2, kv: KvTensors, shape: list[int], generator: torch.Generator) -> None:
    """Compute one step on pages in random order, as a busy pool hands them out."""
    sequences, new, before = shape
    each = -(-(new + before) // BLOCK_TOKENS)
    pages = torch.randperm(NUM_PAGES, generator=generator).tolist()
    slots = [
        StepSlot(
            sequence_id=number,
            start=before,
            tokens=torch.randint(1, 200, (new,), generator=generator).tolist(),
            pages=pages[number * each : (number + 1) * each],
            sample=True,
        )
        for number in range(sequences)
    ]
    inputs = build_inputs(slots, frozenset(), kv.page_shape, model.prefers_absorbed)
    model.logits(model.forward(inputs, kv)).argmax(dim=-1)


def measure(args: argparse.Namespace) -> None:
    """Print a line a shape; runs in a process of its own whose log of oneDNN the parent reads."""
    torch.set_num_threads(args.threads)
    cpu = torch.device("cpu")
    counts = Calls()
    build.keep_in(environment.cache_dir())  # code and choices are those of a server
    build.limit_to(os.environ.get("ONEDNN_MAX_CPU_ISA"))
    if build.why_not() is None:  # before the model is loaded, which keeps the functions it calls
        counts.count_compiled(build.code())
    model = load_model(
        Checkpoint.open(args.model),
        dtype=torch.bfloat16,
        device=cpu,
        backends=settle(
            args.attention_backend,
            args.moe_backend,
            cpu,
            deterministic=args.deterministic,
            dtype=torch.bfloat16,
        ),
    )
    spec = model.spec
    layout = KvLayout.for_model(
        spec, block_tokens=BLOCK_TOKENS, dtype="bfloat16", weights_revision="benchmark"
    )
    kv = KvTensors.allocate(layout, NUM_PAGES, cpu)
    kv.pages.normal_()
    generator = torch.Generator().manual_seed(0)
    held, bandwidth = sizes(args.model), read_bandwidth()
    print(f"= {bandwidth / 1e9:.1f} GB/s read by {args.threads} threads", flush=True)
    with torch.inference_mode():
        for text in args.shapes:
            shape = [int(part) for part in text.split(",")]
            run(model, kv, shape, generator)
            print("= timed", flush=True)
            walls, cpus = [], []
            for _ in range(args.repeats if shape[1] == 1 else max(2, args.repeats // 4)):
                began, began_cpu = time.perf_counter(), time.process_time()
                run(model, kv, shape, generator)
                walls.append(1e3 * (time.perf_counter() - began))
                cpus.append(1e3 * (time.process_time() - began_cpu))
            floor = 1e3 * touched_bytes(spec, held, shape) / bandwidth
            counts.num = 0
            with counts:
                run(model, kv, shape, generator)
            print(
                f"= {text:>10} {statistics.median(walls):9.1f} {min(walls):9.1f} {min(cpus):9.1f} "
                f"{counts.num / spec.num_hidden_layers:7.1f} {min(walls) / floor:7.2f}",
                flush=True,
            )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("checkpoints/k2-small"))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SEQUENCES,NEW,BEFORE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--attention-backend", choices=ATTENTION_BACKENDS, default="auto")
    parser.add_argument("--moe-backend", choices=MOE_BACKENDS, default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        measure(args)
        return 0
    print(machine())
    print("     shape  median ms   best ms  best CPU  calls/layer  x floor  primitives")
    ours = {**KEPT_HEAP, WAIT_POLICY: "PASSIVE", "ONEDNN_VERBOSE": "profile_create"}
    settings = {**os.environ, **ours}
    command = [sys.executable, "-m", "benchmarks", "step", "--here", *argv]
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        built = 0
        for line in process.stdout:
            if line.startswith("= timed"):
                built = 0
            elif line.startswith("= "):
                primitives = f" {built:11d}" if re.match(r"= +\d+,", line) else ""
                print(line[2:].rstrip() + primitives, flush=True)
            else:
                built += "create:cache_miss" in line
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
