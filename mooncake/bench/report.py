"""A benchmark's table and JSON, in the layout that scripts around `vllm bench serve` read. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mooncake.bench.arrivals import TITLES
from mooncake.bench.endpoint import Output
from mooncake.bench.metrics import Metrics, Spread

WIDTH = 50


def table(
    metrics: Metrics, shown: Sequence[str], *, max_concurrency: int | None, rate: float
) -> str:
    """Return the printed result; `shown` names the distributions that are wanted."""
    rows: list[tuple[str, int | float | None]] = [
        ("Successful requests:", metrics.num_completed),
        ("Failed requests:", metrics.num_failed),
        ("Maximum request concurrency:", max_concurrency),
        ("Request rate configured (RPS):", None if rate == math.inf else float(rate)),
        ("Benchmark duration (s):", metrics.duration_s),
        ("Total input tokens:", metrics.num_input_tokens),
        ("Total generated tokens:", metrics.num_output_tokens),
        ("Request throughput (req/s):", metrics.request_throughput),
        ("Request goodput (req/s):", metrics.request_goodput),
        ("Output token throughput (tok/s):", metrics.output_throughput),
        ("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        ("Peak concurrent requests:", float(metrics.max_concurrent_requests)),
        ("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_row(label, value) for label, value in rows if value is not None]
    for name in shown:
        heading, short = TITLES[name]
        lines.append(heading.center(WIDTH, "-"))
        lines += _spread_rows(short, metrics.spreads[name])
    if metrics.drafts.drafts:
        lines.append("Speculative Decoding".center(WIDTH, "-"))
        lines += [
            _row("Acceptance rate (%):", metrics.drafts.acceptance_rate),
            _row("Acceptance length:", metrics.drafts.acceptance_length),
            _row("Drafts:", metrics.drafts.drafts),
            _row("Draft tokens:", metrics.drafts.draft_tokens),
            _row("Accepted tokens:", metrics.drafts.accepted_tokens),
        ]
        lines += [
            _row(f"Acceptance at position {position} (%):", 100 * rate)
            for position, rate in enumerate(metrics.drafts.acceptance_rates)
        ]
    if metrics.expert_balance is not None:
        lines.append("Shared Experts".center(WIDTH, "-"))
        if metrics.expert_balance_before is not None:
            lines.append(_row("Balance of ranks before:", metrics.expert_balance_before))
        lines.append(_row("Balance of ranks in this run:", metrics.expert_balance))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _spread_rows(short: str, spread: Spread) -> list[str]:
    rows = [
        _row(f"Mean {short} (ms):", spread.mean),
        _row(f"Median {short} (ms):", spread.median),
    ]
    rows += [
        _row(f"P{_number(percent)} {short} (ms):", value) for percent, value in spread.percentiles
    ]
    return rows


def _row(label: str, value: float) -> str:
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label:<40} {shown}"


def _number(value: float) -> str:
    return str(int(value)) if int(value) == value else str(value)


def document(metrics: Metrics, outputs: Sequence[Output], shown: Sequence[str]) -> dict[str, Any]:
    """Return the result as JSON fields; the caller adds what the run was asked to do."""
    fields: dict[str, Any] = {
        "duration": metrics.duration_s,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
        "total_input_tokens": metrics.num_input_tokens,
        "total_output_tokens": metrics.num_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "input_lens": [output.num_prompt_tokens for output in outputs],
        "output_lens": [output.num_output_tokens for output in outputs],
        "ttfts": [output.ttft_s for output in outputs],
        "itls": [output.itls_s for output in outputs],
        "start_times": [output.start_s for output in outputs],
        "generated_texts": [output.text for output in outputs],
        "errors": [output.error for output in outputs],
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
        "rtfx": 0.0,
    }
    for name in shown:
        spread = metrics.spreads[name]
        fields[f"mean_{name}_ms"] = spread.mean
        fields[f"median_{name}_ms"] = spread.median
        fields[f"std_{name}_ms"] = spread.std
        for percent, value in spread.percentiles:
            fields[f"p{_number(percent)}_{name}_ms"] = value
    if metrics.drafts.drafts:
        fields |= {
            "spec_decode_acceptance_rate": metrics.drafts.acceptance_rate,
            "spec_decode_acceptance_length": metrics.drafts.acceptance_length,
            "spec_decode_num_drafts": metrics.drafts.drafts,
            "spec_decode_draft_tokens": metrics.drafts.draft_tokens,
            "spec_decode_accepted_tokens": metrics.drafts.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": metrics.drafts.acceptance_rates,
        }
    if metrics.expert_balance is not None:
        fields["expert_balance_before"] = metrics.expert_balance_before
        fields["expert_balance"] = metrics.expert_balance
    return fields


DETAILS = (
    "input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors",
)  # fmt: skip
"""Lists with one entry for each request: only in files saved with --save-detailed."""
