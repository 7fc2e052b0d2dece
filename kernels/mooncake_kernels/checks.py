"""Runs every fast op against its reference on this machine, for `mooncake serve --check`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mooncake_kernels.dispatch import FIXED, NATIVE, REFERENCE, TRITON, backends, kernel, ops
from mooncake_kernels.native import build
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.fp8 import widen_rows
from mooncake_kernels.reference.mla_prefill import ExpandedKeys, RaggedBatch
from mooncake_kernels.reference.paged import paged_span
from mooncake_kernels.reference.router import Routing
from mooncake_kernels.reference.sampling import DrawSettings, Penalties
from mooncake_kernels.synthetic import KIMI_K2_TP8, TINY, TINY_BLOCKED, Maker, ModelShape

EXACT = 0.0
BF16_GATE = 2e-5
FP8_GATE = 1e-3

Outputs = list[torch.Tensor]


@dataclass(frozen=True)
class CheckRow:
    """One op on one backend. difference: see `difference`; None: it could not be run."""

    op: str
    backend: str
    difference: float | None
    gate: float
    note: str

    @property
    def passed(self) -> bool:
        return self.difference is not None and self.difference <= self.gate


@dataclass(frozen=True)
class Case:
    """The arguments of an op: `run` takes an implementation and returns the outputs to compare."""

    run: Callable[[Any], Outputs]
    gate: float


def check_kernels(device: torch.device) -> Iterator[CheckRow]:
    """Yield a row for every op and every backend but the reference, in the order of names.

    On a GPU the widths are Kimi-K2's (with few experts and short contexts), otherwise tiny ones.
    """
    for op in ops():
        for backend in backends(op):
            if backend != REFERENCE:
                tiny = TINY_BLOCKED if backend == NATIVE else TINY
                shape = KIMI_K2_TP8 if device.type == "cuda" else tiny
                yield _row(op, backend, shape, device)


def _row(op: str, backend: str, shape: ModelShape, device: torch.device) -> CheckRow:
    case = CASES[op](shape, device)
    try:
        fast = kernel(op, backend)
    except ImportError as error:
        return CheckRow(op, backend, None, case.gate, f"not installed: {error.name}")
    reason = _unusable(backend, device)
    if reason:
        return CheckRow(op, backend, None, case.gate, reason)
    # A kernel that fails to compile must become a row of the table, not the end of it.
    try:
        got = case.run(fast)
    except Exception as error:
        return CheckRow(op, backend, None, case.gate, f"{type(error).__name__}: {error}"[:200])
    return CheckRow(op, backend, difference(got, case.run(kernel(op))), case.gate, "")


def _unusable(backend: str, device: torch.device) -> str:
    if backend == TRITON:
        interpreted = importlib.import_module("mooncake_kernels.triton.device").INTERPRETED
        if device.type != "cuda" and not interpreted.value:
            return "needs a CUDA GPU"
    if backend in (NATIVE, FIXED) and device.type != "cpu":
        return "computes on the CPU"
    if backend == NATIVE:
        return build.why_not() or ""
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    if backend == "onednn" and not onednn.supported(weight):
        return "needs a CPU with bfloat16"
    return ""


def difference(got: Outputs, wanted: Outputs) -> float:
    """Return the largest difference of any output; 0 means equal.

    For integers this is the share that is not equal. Otherwise it is 1 - 2<x, y> / (<x, x> + <y,
    y>) over the numbers that are finite in `wanted`, or 1 when other numbers are finite in `got`.
    """
    worst = 0.0
    for x, y in zip(got, wanted, strict=True):
        if not y.dtype.is_floating_point:
            worst = max(worst, float((x != y).double().mean()))
            continue
        finite = torch.isfinite(y)
        if not torch.equal(torch.isfinite(x), finite):
            return 1.0
        a, b = x[finite].double(), y[finite].double()
        norms = float((a * a).sum() + (b * b).sum())
        worst = max(worst, 1.0 - 2.0 * float((a * b).sum()) / norms if norms else 0.0)
    return worst


def _norm(op: str) -> Callable[[ModelShape, torch.device], Case]:
    def case(s: ModelShape, device: torch.device) -> Case:
        make = Maker(device)
        x, other, weight = (make.normal(*shape) for shape in ((5, s.hidden),) * 2 + ((s.hidden,),))
        if op == "rms_norm":
            return Case(lambda f: [f(x, weight, 1e-6)], BF16_GATE)
        return Case(lambda f: list(f(x, other, weight, 1e-6)), BF16_GATE)

    return case


def _quantize(s: ModelShape, device: torch.device) -> Case:
    x = Maker(device).normal(5, s.hidden)
    return Case(lambda f: [widen_rows(*f(x))], FP8_GATE)


def _plain_linear(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    x, bias = make.normal(5, s.hidden), make.normal(s.kv_width)
    weight = make.normal(s.kv_width, s.hidden, scale=s.hidden**-0.5)
    return Case(lambda f: [f(x, weight, bias)], BF16_GATE)


def _linear_heads(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    x = make.normal(5, s.heads, s.nope + s.rope)[..., : s.nope]
    weight = make.normal(s.heads, s.rank, s.nope, scale=s.nope**-0.5)
    return Case(lambda f: [f(x, weight)], BF16_GATE)


def _linear(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    x = make.normal(5, s.hidden)
    weight = make.normal(s.kv_width, s.hidden, scale=50).to(torch.float8_e4m3fn)
    grid = -(-s.kv_width // 128), -(-s.hidden // 128)
    factors = make.normal(*grid, dtype=torch.float32).abs() * 1e-3 + 1e-4
    return Case(lambda f: [f(x, weight, factors)], FP8_GATE)


def _rotation(make: Maker, rows: int, half: int) -> torch.Tensor:
    angles = make.normal(rows, half, dtype=torch.float32)
    return torch.polar(torch.ones_like(angles), angles)


def _rotate(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    x, turn = make.normal(5, s.heads, s.rope), _rotation(make, 5, s.rope // 2)
    return Case(lambda f: [f(x, turn, True)], BF16_GATE)


def _kv_write(query: bool) -> Callable[[ModelShape, torch.device], Case]:
    """`query`: whether to include the norm of the query."""

    def case(s: ModelShape, device: torch.device) -> Case:
        make = Maker(device)
        joined, turn = make.normal(5, s.hidden + s.kv_width), _rotation(make, 5, s.rope // 2)
        latent, key = joined[:, s.hidden : -s.rope], joined[:, -s.rope :]
        norms = (make.normal(s.hidden), 1e-6), (make.normal(s.rank), 1e-6)
        places = torch.tensor([3, -1, 17, 0, 30], device=device)

        def run(write: Any) -> Outputs:
            kv = torch.zeros(2, s.block_tokens, s.kv_width, dtype=torch.bfloat16, device=device)
            of_query = (joined[:, : s.hidden], norms[0]) if query else ()
            normed = write(*of_query, latent, key, turn, places, norms[1], kv)
            return [normed, kv] if query else [kv]

        return Case(run, BF16_GATE)

    return case


def _absorb_queries(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    q, turn = make.normal(5, s.heads, s.nope + s.rope), _rotation(make, 5, s.rope // 2)
    key_up = make.normal(s.heads, s.rank, s.nope, scale=s.nope**-0.5)
    return Case(lambda f: [f(q, turn, key_up, 0.13)], BF16_GATE)


def _gated(s: ModelShape, device: torch.device) -> Case:
    gate_up = Maker(device).normal(5, 2 * s.inner)
    return Case(lambda f: [f(gate_up)], BF16_GATE)


def _choose(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    logits = make.normal(9, s.experts, dtype=torch.float32)
    bias = make.normal(s.experts, dtype=torch.float32)
    routing = Routing(s.top_k, 1, 1, True, 2.827)
    return Case(lambda f: _sorted_choice(f(logits, bias, routing)), 1e-12)


def _route(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    x, bias = make.normal(9, s.hidden), make.normal(s.experts, dtype=torch.float32)
    weight = make.normal(s.experts, s.hidden, dtype=torch.float32, scale=s.hidden**-0.5)
    routing = Routing(s.top_k, 1, 1, True, 2.827)
    return Case(lambda f: _sorted_choice(f(x, weight, bias, routing)), 1e-12)


def _sorted_choice(choice: tuple[torch.Tensor, torch.Tensor]) -> Outputs:
    order = choice[0].argsort(dim=1)
    return [choice[0].gather(1, order), choice[1].gather(1, order)]


def _experts(kind: str) -> Callable[[ModelShape, torch.device], Case]:
    def case(s: ModelShape, device: torch.device) -> Case:
        make = Maker(device)
        count = min(s.experts, 12)
        stored = make.experts(kind, count, s.inner, s.hidden)
        x, routing = make.normal(9, s.hidden), make.routing(9, count, s.top_k)
        return Case(lambda f: [f(*stored)(x, *routing)], FP8_GATE if kind == "fp8" else BF16_GATE)

    return case


def _decode(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    lengths = [1, 3 * s.block_tokens + 5, s.block_tokens]
    kv, batch = make.paged(lengths, 1, s.kv_width, s.block_tokens)
    q = make.normal(3, s.heads, s.kv_width, scale=s.kv_width**-0.5)
    return Case(lambda f: list(f(q, kv, batch, s.rank)), BF16_GATE)


def _prefill(s: ModelShape, device: torch.device) -> Case:
    make, rows = Maker(device), 40
    keys = ExpandedKeys(
        make.normal(rows, s.heads, s.nope),
        make.normal(rows, s.rope),
        make.normal(rows, s.heads, s.value),
    )
    q = make.normal(rows, s.heads, s.nope + s.rope, scale=(s.nope + s.rope) ** -0.5)
    starts = torch.tensor([0, 25, rows], dtype=torch.int32, device=device)
    batch = RaggedBatch(starts, starts, torch.ones_like(starts[1:]), 25)
    return Case(lambda f: list(f(q, keys, batch)), BF16_GATE)


def _spans(absorbed: bool) -> Callable[[ModelShape, torch.device], Case]:
    def case(s: ModelShape, device: torch.device) -> Case:
        make = Maker(device)
        kv = make.normal(4, s.block_tokens, s.kv_width)
        spans = [
            paged_span(0, 3, s.block_tokens + 3, [2, 0], kv.shape),
            paged_span(3, 1, 5, [3], kv.shape),
        ]
        if absorbed:
            q = make.normal(4, s.heads, s.kv_width, scale=s.kv_width**-0.5)
            return Case(lambda f: [f(q, kv, spans, s.rank)], BF16_GATE)
        q = make.normal(4, s.heads, s.nope + s.rope, scale=(s.nope + s.rope) ** -0.5)
        up = make.normal(s.heads, s.rank, s.nope, scale=s.rank**-0.5)
        value_up = make.normal(s.heads, s.value, s.rank, scale=s.rank**-0.5)
        return Case(lambda f: [f(q, kv, spans, up, value_up)], 2 * BF16_GATE)

    return case


def _merge(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    outs, lses = make.normal(3, 5, s.heads, s.rank), make.normal(3, 5, s.heads).float()
    return Case(lambda f: list(f(outs, lses)), BF16_GATE)


def _draw(s: ModelShape, device: torch.device) -> Case:
    logits = Maker(device).normal(4, s.vocab, dtype=torch.float32, scale=2.0)

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    settings = DrawSettings(
        temperature=column([1, 0.7, 0, 1.5], torch.float32),
        top_k=column([0, 20, 0, 50], torch.int32),
        top_p=column([0.9, 1, 1, 0.8], torch.float64),
        min_p=column([0, 0.01, 0, 0], torch.float64),
        uniform=column([0.3, 0.8, 0.1, 0.55], torch.float64),
    )
    return Case(lambda f: [f(logits, settings)], EXACT)


def _penalize(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    logits = make.normal(2, s.vocab, dtype=torch.float32)
    counts = make.integers(0, 3, 2, s.vocab).to(torch.int32)
    each = torch.full((2,), 0.4, device=device)

    def run(penalize: Any) -> Outputs:
        changed = logits.clone()
        penalize(changed, counts > 1, counts, Penalties(each + 1, each, each))
        return [changed]

    return Case(run, 1e-12)


def _mask(s: ModelShape, device: torch.device) -> Case:
    make = Maker(device)
    logits = make.normal(3, s.vocab, dtype=torch.float32)
    allowed = make.integers(0, 256, 3, -(-s.vocab // 8)).to(torch.uint8)

    def run(mask: Any) -> Outputs:
        masked = logits.clone()
        mask(masked, allowed)
        return [masked.clamp_(min=-1e9)]

    return Case(run, EXACT)


def _most_likely(s: ModelShape, device: torch.device) -> Case:
    logits = Maker(device).normal(3, s.vocab, dtype=torch.float32)
    tokens = torch.tensor([0, 1, 2], device=device)

    def run(most_likely: Any) -> Outputs:
        found = most_likely(logits, tokens, 5)
        return [found.best, found.ids, found.own, found.ranks]

    return Case(run, 1e-12)


CASES: dict[str, Callable[[ModelShape, torch.device], Case]] = {
    "absorb_queries": _absorb_queries,
    "add_rms_norm": _norm("add_rms_norm"),
    "choose": _choose,
    "draw": _draw,
    "experts": _experts("plain"),
    "experts_fp8": _experts("fp8"),
    "experts_int4": _experts("int4"),
    "gated": _gated,
    "kv_write": _kv_write(query=False),
    "linear": _plain_linear,
    "linear_fp8": _linear,
    "linear_heads": _linear_heads,
    "merge_attention": _merge,
    "mla_absorbed": _spans(absorbed=True),
    "mla_decode": _decode,
    "mla_expanded": _spans(absorbed=False),
    "mla_prefill": _prefill,
    "mask": _mask,
    "most_likely": _most_likely,
    "penalize": _penalize,
    "quantize_rows": _quantize,
    "query_and_kv": _kv_write(query=True),
    "rms_norm": _norm("rms_norm"),
    "rotate": _rotate,
    "route": _route,
}
"""An entry for every op; a test compares the two lists."""
