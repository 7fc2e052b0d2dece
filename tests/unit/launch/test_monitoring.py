"""Dashboard and alert rules ask for series, and labels of them, that /metrics really has."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.base import FinishReason, Role, WorkerLoad, WorkerRef
from mooncake.base.pool_messages import PoolState
from mooncake.launch.host.families import render
from mooncake.launch.pool_node.metrics import node_families
from mooncake.launch.worker.metrics import (
    EngineFigures,
    engine_families,
    health_families,
    link_families,
)
from mooncake.telemetry.events import (
    Accepted,
    Finished,
    FirstToken,
    Refused,
    ReplicasWanted,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from mooncake.telemetry.health import Vitals
from mooncake.telemetry.metrics import Metrics
from mooncake.transfer.link_stats import LATENCY_BOUNDS_S, LinkSnapshot
from tests.support.monitoring import MONITORING, SERIES, check, labels_of, panels, rules

SEVERITIES = {"critical", "warning"}
DESIRED = {Role.PREFILL: 3, Role.DECODE: 2}
"""The replicas that the gateway of `gateway_text` wants."""


def gateway_text() -> str:
    """Return /metrics of a gateway that has seen a little of everything."""
    metrics = Metrics("k2")
    for role in (Role.GATEWAY, Role.PREFILL, Role.DECODE, Role.KVSTORE):
        metrics.record(WorkerJoined(worker_id=role.value, at_s=0.0, role=role, num_blocks=8))
        load = WorkerLoad(counters={"preemptions": 1, "fetches_failed": 1})
        metrics.record(
            WorkerReported(
                worker_id=role.value, at_s=1.0, role=role, load=load, cost_error_ratio=0.1
            )
        )
    for role, wanted in DESIRED.items():
        metrics.record(ReplicasWanted(at_s=1.0, role=role, now=1, wanted=wanted))
    metrics.record(WorkerLeft(worker_id="prefill", at_s=2.0, role=Role.PREFILL, reason="died"))
    metrics.record(Refused(request_id="r", at_s=1.0, status=429, reason="ttft_limit"))
    for name, status in (("a", 200), ("b", 503)):
        metrics.record(
            Accepted(
                request_id=name, at_s=1.0, num_prompt_tokens=4, max_tokens=4, ttft_slo_s=1,
                tbt_slo_s=1,
            )
        )  # fmt: skip
        metrics.record(
            FirstToken(request_id=name, at_s=2.0, worker_id="prefill", num_cached_tokens=2)
        )
        reason = FinishReason.STOP if status == 200 else FinishReason.ERROR
        metrics.record(
            Finished(
                request_id=name, at_s=3.0, reason=reason, num_prompt_tokens=4,
                num_output_tokens=1, num_cached_tokens=2, status=status,
            )
        )  # fmt: skip
    return metrics.render().decode()


def worker_text() -> str:
    """Return /metrics of a worker with a link; it is an engine's and a pool node's in one."""
    node = WorkerRef("kv-0", "e", "tcp://h:1")
    state = PoolState(
        asker=node, ticket=0, store=node, load=WorkerLoad(), layout_fingerprint="f", block_bytes=1,
    )  # fmt: skip
    link = LinkSnapshot(
        protocol="tcp", nic="", peer="p", num_bytes=1, num_slices=1, busy_s=1, num_retries=0,
        num_failures=0, latency_s=1, latency_buckets=[0] * (len(LATENCY_BOUNDS_S) + 1),
    )  # fmt: skip
    figures = EngineFigures(WorkerLoad(counters={"preemptions": 1}), 0.0)
    families = (
        *health_families("w", Role.DECODE, [Vitals()]),
        *engine_families("w", Role.DECODE, figures),
        *node_families(state),
        *link_families("w", [link]),
    )
    return render(families).decode()


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Return the labels of every sample there is, by its full name."""
    return labels_of(gateway_text(), worker_text())


@pytest.mark.parametrize("rule", rules(), ids=[rule["alert"] for rule in rules()])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(
    rule: dict[str, Any], series: dict[str, set[str]]
) -> None:
    expression = rule["expr"]
    common = check(expression, series)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    kept = {label.strip() for label in grouped[0].split(",")} if grouped else common
    texts = rule["annotations"]
    assert set(texts) == {"summary", "description"}
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
    assert shown <= kept, f"{shown - kept} are summed away"
    assert rule["labels"]["severity"] in SEVERITIES
    for name in SERIES.findall(" ".join(texts.values())):
        assert {name, f"{name}_bucket"} & series.keys(), name


@pytest.mark.parametrize("panel", panels(), ids=[panel["title"] for panel in panels()])
def test_a_panel_shows_what_there_is(panel: dict[str, Any], series: dict[str, set[str]]) -> None:
    assert panel["description"]
    for target in panel["targets"]:
        check(target["expr"], series)
        grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
        kept = {label.strip() for label in ", ".join(grouped).split(",")}
        names = SERIES.findall(target["expr"])
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= (kept if grouped else series[names[0]])


def test_the_limit_of_an_alert_lies_between_fine_buckets() -> None:
    """A quantile is guessed inside its bucket: near the limit it is wrong by a fifth at most."""
    looked_at = 0
    for rule in rules():
        found = re.search(
            r"histogram_quantile\(.*?(mooncake[:_]\w+)_bucket.*> ([\d.]+)", rule["expr"], re.S
        )
        if found is None:
            continue
        limit, looked_at = float(found[2]), looked_at + 1
        bounds = {
            float(sample.labels["le"])
            for family in text_string_to_metric_families(gateway_text())
            for sample in family.samples
            if sample.name == f"{found[1]}_bucket"
        }
        assert limit in bounds, rule["alert"]
        assert max(bound for bound in bounds if bound < limit) >= 0.8 * limit, rule["alert"]
        assert min(bound for bound in bounds if bound > limit) <= 1.2 * limit, rule["alert"]
    assert looked_at


def test_the_page_of_alerts_has_a_row_of_each() -> None:
    page = (MONITORING.parents[2] / "docs" / "alerts.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| Mooncake")]
    described = [name.strip() for names, _ in rows for name in names.split(",")]
    assert sorted(described) == sorted(rule["alert"] for rule in rules())
    assert all(what.strip() for _, what in rows)


def test_names_are_unique() -> None:
    alerts = [rule["alert"] for rule in rules()]
    titles = [panel["title"] for panel in panels()]
    assert len(set(alerts)) == len(alerts)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    "expression",
    [
        "rate(mooncake:no_such_total[5m])",
        'mooncake:workers_up{colour="red"}',
        "sum by (colour) (mooncake:workers_up)",
    ],
)
def test_the_check_finds_mistakes(expression: str, series: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError):
        check(expression, series)
