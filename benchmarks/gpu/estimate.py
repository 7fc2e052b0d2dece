"""What one, eight and sixteen such GPUs would serve: every assumption is a printed row.

The load is prompts of 8,192 tokens and answers of 4,096. vLLM's published run of Kimi-K2-Thinking
(INT4) on 8 x H200 asks for answers of 4,000, but most end early: its totals hold 20.5 prompt tokens
an output token with TP8 and 18.1 with DCP8. The estimate is set beside it at those mixes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RANKS, LAYERS, SHARING = 8, 61, 16
INPUT, OUTPUT = 8192, 4096
PUBLISHED = {"TP8": (485.78, 10_462.57), "TP8 and DCP8": (695.13, 13_290.35)}
"""vLLM's recipe for Kimi-K2-Thinking, 1,000 requests at 100/s: output tok/s, all tok/s."""
KV_BYTES = 70_272
"""KV bytes of a token in all layers, in bfloat16."""
EXPERT_LAYERS, EXPERTS, TOP_K, EXPERT_BYTES = 60, 384, 8, 24.77e6
"""The routed experts, and the bytes of one expert of a layer in INT4."""
OTHER_BYTES = 23.4e9
"""Weights that are no routed experts, bfloat16."""
EXPERT_FLOPS = 2 * EXPERT_LAYERS * TOP_K * 3 * 2048 * 7168
"""A token's, of routed experts."""
GEMM_FLOPS, ATTENTION_FLOPS_8K = 63.4e9, 10.2e9
"""A prompt token's, all ranks: products; attention over a prompt of 8k, expanded."""

MEASURED = {"prefill-8k": 474.0, "moe-int4-64": 487.2, "mla-decode-dcp8": 44.3}
"""What these lines took on one H200 on 2026-11-27, in their units, in the form that is served
since."""
REST_OF_STEP_BYTES = 3.7e9
"""Bytes of slice-b64-dcp8 that are neither KV nor experts."""


@dataclass(frozen=True)
class Assumption:
    """A number that the estimate stands on, and where it is from."""

    what: str
    value: float
    unit: str
    source: str


def assumptions(rows: Mapping[str, Any]) -> dict[str, Assumption]:
    """Return what goes in: measured where a GPU has run the line, in this run or before."""

    def line(name: str, what: str, unit: str, otherwise: float, source: str) -> Assumption:
        row = rows.get(name, {})
        if "value" in row and row.get("device") != "interpreter":
            return Assumption(what, row["value"], unit, f"measured, {name}")
        return Assumption(what, otherwise, unit, source)

    rest = REST_OF_STEP_BYTES / 3.67e12 * 1e3
    layers = EXPERT_LAYERS * MEASURED["moe-int4-64"] + LAYERS * MEASURED["mla-decode-dcp8"]
    return {
        "step": line(
            "slice-b64-dcp8", "decode step of a rank, B=64, 512 tokens of KV", "ms",
            round(layers / 1e3 + rest, 1),
            "60 x moe-int4-64 and 61 x mla-decode-dcp8, measured; 3.7 GB at the bandwidth, assumed",
        ),
        "attention": line(
            "prefill-8k", "prefill attention", "TFLOP/s", MEASURED["prefill-8k"],
            "measured before, prefill-8k",
        ),
        "copy": Assumption(
            "memory bandwidth", max((r.get("copy_tb_s", 0) for r in rows.values() if r.get("device")
                                     not in (None, "interpreter")), default=3.67), "TB/s",
            "measured: a large copy, else what mla-decode-8-heads moved (3.67)",
        ),
        "experts": Assumption(
            "products of a prompt, INT4 weights in bfloat16", 387, "TFLOP/s",
            "assumed: half of a plain bfloat16 product's 774, measured",
        ),
        "reduce": Assumption(
            "all-reduces of a step at B=64", 4.2, "ms",
            "assumed: 122 of 0.9 MB at sglang#2904's H100 times",
        ),
        "exchange": Assumption(
            "exchange of queries, outputs and sums under DCP8, a step", 2.4, "ms",
            "assumed: 9 MB a layer, 40 us, not overlapped",
        ),
        "prompt_reduce": Assumption(
            "share of a prompt's time that is communication", 0.2, "",
            "assumed: 122 all-reduces of a chunk, half hidden",
        ),
        "batch": Assumption("sequences that decode together", 64, "", "chosen: the measured batch"),
        "dram": Assumption(
            "DRAM of one GPU's host", 0.5, "TB/s",
            "assumed: 70 % of two sockets' 16 channels of DDR5-5600",
        ),
        "cpu": Assumption(
            "products of that host", 20, "TFLOP/s", "assumed: AMX, as ktransformers says",
        ),
        "cpu_batch": Assumption("sequences that decode on a GPU and its host", 16, "", "chosen"),
        "sharing": Assumption(
            "rows to their experts on 16 ranks and back, a layer", 313, "us",
            "DeepEP's README: 118 + 195 us of 128 tokens, H800; not overlapped",
        ),
        "read": Assumption(
            "share of the bandwidth that a step of such a rank reaches", 0.75, "",
            "assumed: the must of moe-fp8-64 to its floor",
        ),
    }  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """What follows."""

    step_ms: float
    prompt_tok_s: float
    out_tok_s: float

    def at_mix(self, prompt_tokens: float) -> float:
        """Return output tok/s where so many prompt tokens come with each output token."""
        steps_s = 1 / self.out_tok_s - INPUT / OUTPUT / self.prompt_tok_s
        return 1 / (steps_s + prompt_tokens / self.prompt_tok_s)


def estimate(given: Mapping[str, Assumption]) -> Estimate:
    """Return output tokens a second of a node that does both: its time is shared between them.

    An output token costs its share of a step and, once for 4,096 of them, a prompt of 8,192. The
    slice was measured at 512 tokens of KV a sequence and rank; the mean context here is 10,240
    tokens, 1,280 a rank: the rest of its KV is read at the bandwidth of a copy.
    """
    batch = given["batch"].value
    more = (INPUT + OUTPUT / 2) / RANKS - 512
    kv_ms = batch * more * KV_BYTES / (given["copy"].value * 1e12) * 1e3
    step_ms = given["step"].value + kv_ms + given["reduce"].value + given["exchange"].value
    products = GEMM_FLOPS / RANKS / (given["experts"].value * 1e12)
    attention = ATTENTION_FLOPS_8K / RANKS / (given["attention"].value * 1e12)
    prompt_s = (products + attention) / (1 - given["prompt_reduce"].value)
    return _served(batch, step_ms, prompt_s)


def _served(batch: float, step_ms: float, prompt_s: float, ranks: int = 1) -> Estimate:
    """Return what each of `ranks` does that decode `batch` sequences and compute their prompts."""
    each_s = step_ms / 1e3 / batch + INPUT / OUTPUT * prompt_s
    return Estimate(step_ms, ranks / prompt_s, ranks / each_s)


def estimate_one(given: Mapping[str, Assumption]) -> Estimate:
    """Return output tokens a second of one GPU with the routed experts in its host's DRAM
    (`--expert-device cpu`): the host computes them, the GPU the rest, one after the other.
    """
    batch, dram = given["cpu_batch"].value, given["dram"].value * 1e12
    distinct = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** batch)
    routed_s = EXPERT_LAYERS * distinct * EXPERT_BYTES / dram
    kv = batch * (INPUT + OUTPUT / 2) * KV_BYTES
    step_s = routed_s + (OTHER_BYTES + kv) / (given["copy"].value * 1e12)
    on_gpu = (GEMM_FLOPS - EXPERT_FLOPS) / (given["experts"].value * 1e12)
    on_gpu += ATTENTION_FLOPS_8K / (given["attention"].value * 1e12)
    prompt_s = EXPERT_FLOPS / (given["cpu"].value * 1e12) + on_gpu
    return _served(batch, step_s * 1e3, prompt_s)


def estimate_sharing(given: Mapping[str, Assumption]) -> Estimate:
    """Return output tokens a second of sixteen ranks that each have all but the routed experts, of
    which they share out whole ones (`-dp 16 -ep`; on GPUs it has run emulated only).
    """
    batch = given["batch"].value
    held = EXPERT_LAYERS * EXPERTS / SHARING * EXPERT_BYTES  # of so many tokens all are used
    kv = batch * (INPUT + OUTPUT / 2) * KV_BYTES
    reached = given["copy"].value * 1e12 * given["read"].value
    step_ms = (OTHER_BYTES + held + kv) / reached * 1e3
    step_ms += EXPERT_LAYERS * given["sharing"].value / 1e3
    products = GEMM_FLOPS / (given["experts"].value * 1e12)
    attention = ATTENTION_FLOPS_8K / (given["attention"].value * 1e12)
    prompt_s = (products + attention) / (1 - given["prompt_reduce"].value)
    return _served(batch, step_ms, prompt_s, SHARING)


def _at_published_mix(found: Estimate, shape: str, rates: tuple[float, float]) -> str:
    output, total = rates
    mix = (total - output) / output
    return (
        f"| 8 x H200, {shape} | {mix:.1f} | {output:,.0f} output tok/s | "
        f"{found.at_mix(mix):,.0f} output tok/s |"
    )


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the assumptions and the estimates as Markdown."""
    given = assumptions(rows)
    found = estimate(given)
    two = Estimate(found.step_ms, 2 * found.prompt_tok_s, 2 * found.out_tok_s)
    others = {
        "1 x H200, routed experts in DRAM": estimate_one(given),
        "16 x H200, two instances as that of eight": two,
        "16 x H200 that share experts (on GPUs emulated only)": estimate_sharing(given),
    }
    shown = ["| assumption | value | from |", "|---|---|---|"]
    shown += [f"| {a.what} | {a.value:g} {a.unit} | {a.source} |" for a in given.values()]
    shown += [
        "",
        f"8 x H200, {INPUT} in / {OUTPUT} out: a step of {found.step_ms:.1f} ms, prompts at "
        f"{found.prompt_tok_s:,.0f} tok/s, together {found.out_tok_s:,.0f} output tok/s",
        "",
        "| the mix that vLLM published | prompt tokens an output token | vLLM | estimate |",
        "|---|---|---|---|",
        *(_at_published_mix(found, *each) for each in PUBLISHED.items()),
        "",
        "| the same load on | step | prompts | output |",
        "|---|---|---|---|",
        *(
            f"| {name} | {each.step_ms:.0f} ms | {each.prompt_tok_s:,.0f} tok/s | "
            f"{each.out_tok_s:,.0f} tok/s |"
            for name, each in others.items()
        ),
    ]
    return shown
