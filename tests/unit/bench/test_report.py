"""The table to the column and the JSON to the name: scripts read both."""

from __future__ import annotations

import json
import math

import pytest

from mooncake.base import ConfigError
from mooncake.bench.endpoint import Output
from mooncake.bench.metrics import metrics_of
from mooncake.bench.report import DETAILS, document, table
from mooncake.bench.serve import file_name, rendered, shown_errors

OUTPUTS = [
    Output(
        num_prompt_tokens=1024,
        num_output_tokens=3,
        start_s=5.0,
        ttft_s=0.5,
        latency_s=0.75,
        itls_s=[0.125, 0.125],
        text="abc",
    ),
    Output(num_prompt_tokens=7, error="500 no: {}"),
]

WHOLE = """\
============ Serving Benchmark Result ============
Successful requests:                     1
Failed requests:                         1
Maximum request concurrency:             8
Request rate configured (RPS):           2.00
Benchmark duration (s):                  2.00
Total input tokens:                      1024
Total generated tokens:                  3
Request throughput (req/s):              0.50
Request goodput (req/s):                 0.50
Output token throughput (tok/s):         1.50
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                1.00
Total token throughput (tok/s):          513.50
---------------Time to First Token----------------
Mean TTFT (ms):                          500.00
Median TTFT (ms):                        500.00
P50 TTFT (ms):                           500.00
P99.9 TTFT (ms):                         500.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          125.00
Median TPOT (ms):                        125.00
P50 TPOT (ms):                           125.00
P99.9 TPOT (ms):                         125.00
=================================================="""
"""Without the spaces that pad each value to ten characters."""


def bare(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_table_is_the_one_that_scripts_know() -> None:
    metrics = metrics_of(OUTPUTS, 2.0, [50, 99.9], {"ttft": 600})
    text = table(metrics, ["ttft", "tpot"], max_concurrency=8, rate=2)
    assert bare(text) == WHOLE
    rows = [line for line in text.splitlines() if ":" in line]
    assert {len(line) for line in rows} == {51}
    assert {len(line) for line in text.splitlines() if ":" not in line} == {50}


def test_rows_of_what_was_not_asked_for_are_left_out() -> None:
    text = table(metrics_of(OUTPUTS, 2.0, [99], {}), ["e2el"], max_concurrency=None, rate=math.inf)
    assert "concurrency:" not in text
    assert "configured" not in text
    assert "goodput" not in text
    assert "----------------End-to-end Latency----------------" in text
    assert "P99 E2EL (ms):" in text


def test_document_has_the_names_that_dashboards_know() -> None:
    fields = document(metrics_of(OUTPUTS, 2.0, [99, 99.9], {}), OUTPUTS, ["ttft", "itl"])
    for name in ("mean_ttft_ms", "median_ttft_ms", "std_itl_ms", "p99_ttft_ms", "p99.9_itl_ms"):
        assert name in fields
    assert fields["completed"] == fields["failed"] == 1
    assert fields["total_output_tokens"] == 3
    assert fields["request_goodput"] is None
    assert [len(fields[name]) for name in DETAILS] == [2] * len(DETAILS)
    assert fields["errors"] == ["", "500 no: {}"]
    json.dumps(fields)


def test_default_file_name() -> None:
    assert (
        file_name("openai", "org/k2", math.inf, 8, "20260101-000000")
        == "openai-infqps-concurrency8-k2-20260101-000000.json"
    )
    assert file_name("x", "k2", 2.0, None, "d") == "x-2.0qps-k2-d.json"


def test_results_are_appended_to_what_is_there() -> None:
    one = rendered({"run": 1}, None)
    assert json.loads(one) == {"run": 1}
    two = rendered({"run": 2}, one)
    assert json.loads(rendered({"run": 3}, two)) == [{"run": 1}, {"run": 2}, {"run": 3}]
    assert json.loads(rendered({"run": 1}, "")) == [{"run": 1}]
    with pytest.raises(ConfigError, match="append-result"):
        rendered({}, "not json")


def test_only_the_first_errors_are_shown() -> None:
    failed = [Output(num_prompt_tokens=1, error=f"no {number}") for number in range(12)]
    lines = shown_errors([*OUTPUTS[:1], *failed]).splitlines()
    assert lines[0] == "Error 0: no 0"
    assert lines[-1] == "… and 2 more"
    assert shown_errors(OUTPUTS[:1]) == ""
