"""One run, or several, as one self-contained HTML page with plots.

Pure: the same run always gives the same bytes.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from itertools import pairwise

from mooncake.sim.measure import Moment
from mooncake.sim.results.plots import Line, histogram_plot, lines_plot
from mooncake.sim.results.result import SimulationResult
from mooncake.sim.timeline import RANKS

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2733;max-width:1380px;
margin:24px auto;padding:0 16px}
h1{font-size:24px;margin:0}h2{font-size:16px;margin:0 0 4px}.sub{color:#5b6875;margin:0 0 20px}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:0 0 20px}
.card{border:1px solid #dde3e9;border-radius:8px;padding:10px 16px;min-width:130px}
.card b{display:block;font-size:22px}.card span{color:#5b6875;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:20px}
figure{margin:0;border:1px solid #dde3e9;border-radius:8px;padding:12px}
svg{width:100%;height:auto}svg text{font-size:11px;fill:#5b6875}svg .mark{fill:#d1662b}
.axis{stroke:#5b6875}.grid{stroke:#eef1f4}
.legend{margin:4px 0 0;font-size:13px}
.legend span{display:inline-block;margin-right:14px;white-space:nowrap}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:5px}
table{border-collapse:collapse;margin:20px 0}td,th{padding:4px 14px;border-bottom:1px solid #eef1f4;
text-align:right}td:first-child,th:first-child{text-align:left}
"""


def rows_of(result: SimulationResult) -> list[tuple[str, str]]:
    """Return the rows of the result table: (name, value with its unit)."""
    ttft, slow, gaps = result.ttft_s, result.tbt_slow10_ms, result.tbt_ms
    requests, cache = result.requests, result.cache
    tiers = ", ".join(
        f"{name} {100 * tokens / max(1, cache.total_tokens):.1f} %"
        for name, tokens in cache.by_tier.items()
    )
    return [
        ("an instance", result.instance),
        ("TTFT mean / p50 / p90 / p99", f"{_four(ttft.mean, ttft.p50, ttft.p90, ttft.p99)} s"),
        ("TBT of all gaps", f"{_four(gaps.mean, gaps.p50, gaps.p90, gaps.p99)} ms"),
        ("TBT, slowest tenth a request", f"{_four(slow.mean, slow.p50, slow.p90, slow.p99)} ms"),
        (
            f"effective (TTFT <= {result.ttft_slo_s:g} s, TBT <= {result.tbt_slo_ms:g} ms)",
            f"{result.effective_requests} of {requests.total} ({result.effective_ratio:.1%})",
        ),
        ("goodput", f"{result.goodput_rps:.2f} requests/s"),
        ("node-hours", f"{result.node_hours:.2f}"),
        (
            "rejected before / after prefill",
            f"{requests.rejected_before_prefill} / {requests.rejected_after_prefill}",
        ),
        ("failed", str(requests.failed)),
        ("prefix hit rate", f"{cache.hit_rate:.1%} of prompt tokens ({tiers})"),
        (
            "utilisation prefill / decode",
            f"{result.prefill_utilisation:.1%} / {result.decode_utilisation:.1%}",
        ),
        ("prefill time a request", f"{result.prefill_s_per_request:.2f} s"),
        ("moved between nodes", f"{result.transfer_bytes / 1e12:.2f} TB"),
        ("fitted figures", result.fitted),
    ]


Tables = Sequence[tuple[str, Sequence[Sequence[str]], str]]
"""(heading, rows with the header first, remark)"""


def page(result: SimulationResult, tables: Tables = ()) -> str:
    """Return the report of one run, with `tables` at its end."""
    title = (
        f"{result.model} on {result.num_nodes} x {result.hardware}: "
        f"{result.num_prefill} prefill, {result.num_decode} decode"
    )
    cards = [
        (f"{result.ttft_s.mean:.2f} s", "mean TTFT"),
        (f"{result.tbt_slow10_ms.p90:.0f} ms", "p90 TBT"),
        (f"{result.effective_ratio:.1%}", "effective requests"),
        (f"{result.cache.hit_rate:.1%}", "prefix hit rate"),
        (str(result.requests.rejected), "rejected"),
        (f"{result.prefill_utilisation:.0%} / {result.decode_utilisation:.0%}", "busy P / D"),
    ]
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{result.requests.total} requests in {result.duration_s:.0f} s, engine '
        f"{result.engine}, policy {result.policy}, seed {result.seed}</p>",
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{v}</b><span>{n}</span></div>' for v, n in cards)
        + "</div>",
        '<div class="plots">' + "".join(_figures(result)) + "</div>",
        "<table>"
        + "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
            for name, value in rows_of(result)
        )
        + "</table>",
        *_tables(tables),
    ]
    return _document(title, body)


def comparison_page(
    title: str,
    tables: Tables,
    plots: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a page of tables below plots (heading, SVG)."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    if plots:
        figures = "".join(_figure(heading, plot) for heading, plot in plots)
        body.append(f'<div class="plots">{figures}</div>')
    return _document(title, [*body, *_tables(tables)])


def _tables(tables: Tables) -> list[str]:
    parts = []
    for heading, rows, remark in tables:
        head, *rest = rows
        parts.append(
            f"<h2>{html.escape(heading)}</h2><table><tr>"
            + "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
            + "</tr>"
            + "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in rest
            )
            + f'</table><p class="sub">{html.escape(remark)}</p>'
        )
    return parts


def _figures(result: SimulationResult) -> list[str]:
    ttft, tbt = result.ttft_histogram_s, result.tbt_histogram_ms
    ttft_mark = (f"limit {result.ttft_slo_s:g} s", result.ttft_slo_s)
    tbt_mark = (f"limit {result.tbt_slo_ms:g} ms", result.tbt_slo_ms)
    xs = [moment.at_s / 60 for moment in result.timeline]
    return [
        _figure(
            "Time to first token", histogram_plot(ttft.edges, ttft.counts, "seconds", [ttft_mark])
        ),
        _figure(
            "Gaps between tokens", histogram_plot(tbt.edges, tbt.counts, "milliseconds", [tbt_mark])
        ),
        *(
            _figure(heading, lines_plot(xs, lines, "minutes", y_label))
            for heading, y_label, lines in _over_time(result.timeline)
        ),
    ]


def _over_time(moments: Sequence[Moment]) -> list[tuple[str, str, list[Line]]]:
    """Return (heading, label of the y axis, lines) of each plot over time."""

    def line(name: str, value: Callable[[Moment], float]) -> Line:
        return Line(name=name, values=[value(moment) for moment in moments])

    rejected = [0.0, *(float(m.num_rejected) for m in moments)]
    fresh = Line(name="rejected", values=[after - before for before, after in pairwise(rejected)])
    return [
        (
            "Load of both pools (1 = at the limit)",
            "predicted time / limit",
            [
                line("prefill: queue / TTFT limit", lambda m: m.prefill_load),
                line("decode: gap / TBT limit", lambda m: m.decode_load),
            ],
        ),
        (
            "Busy instances",
            "share of time",
            [line("prefill", lambda m: m.prefill_busy), line("decode", lambda m: m.decode_busy)],
        ),
        ("Prefix hit rate", "share of prompt tokens", [line("hit rate", lambda m: m.hit_rate)]),
        (
            "Replicas of hot blocks",
            "copies in the pools",
            [
                Line(name=f"block ranked {rank}", values=[m.replicas[i] for m in moments])
                for i, rank in enumerate(RANKS)
            ],
        ),
        (
            "Nodes that hold hot blocks, in HBM or pool",
            "nodes",
            [
                Line(name=f"block ranked {rank}", values=[m.holders[i] for m in moments])
                for i, rank in enumerate(RANKS)
            ],
        ),
        ("Requests decoding", "requests", [line("decoding", lambda m: float(m.num_decoding))]),
        ("Rejections", "requests between two looks", [fresh]),
    ]


def _figure(heading: str, content: str) -> str:
    return f"<figure><h2>{html.escape(heading)}</h2>{content}</figure>"


def _document(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        + "".join(body)
        + "</body></html>\n"
    )


def _four(*values: float) -> str:
    return " / ".join(f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in values)
