"""The shipped dashboard and alert rules, and what their expressions ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

MONITORING = Path(__file__).parents[2] / "charts" / "mooncake" / "monitoring"
OF_PROMETHEUS = {"up": {"job", "instance"}}
SERIES = re.compile(r"\b(?:mooncake[:_][a-z_]+|up(?=\{))")


def labels_of(*texts: str) -> dict[str, set[str]]:
    """Return the labels of every sample in texts of /metrics, by its full name."""
    found = dict(OF_PROMETHEUS)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    loaded = json.loads((MONITORING / "dashboard.json").read_text())
    return [panel for panel in loaded["panels"] if panel["type"] != "row"]


def check(expression: str, series: dict[str, set[str]]) -> set[str]:
    """Return the labels that all series of an expression have, which has only those there are."""
    names = SERIES.findall(expression)
    assert names, f"no series in {expression!r}"
    for name in names:
        assert name in series, f"{name} is not in /metrics"
    common = set.intersection(*(series[name] for name in names))
    for name, matchers in re.findall(rf"({SERIES.pattern})\{{([^}}]*)\}}", expression):
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert asked <= series[name], f"{name} has no {asked - series[name]}"
    for grouping in re.findall(r"\bby \(([^)]*)\)", expression):
        asked = {label.strip() for label in grouping.split(",")}
        assert any(asked <= series[name] for name in names), f"{names} by {asked}"
    assert expression.count("(") == expression.count(")")
    return common
