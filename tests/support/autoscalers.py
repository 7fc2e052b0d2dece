"""What Kubernetes makes of an external metric, as prometheus-adapter and HorizontalPodAutoscalers
are documented: a query to Prometheus by the adapter's rules, and a number of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tests.support.promql import Query, Recording

TOLERANCE = 0.1
"""A ratio this near to 1 changes nothing."""


def adapter_query(rule: Mapping[str, Any], namespace: str, labels: Mapping[str, str]) -> str:
    """Return the query for a rule of `externalRules`, asked for a namespace with these labels."""
    [of_namespace] = [
        name for name, of in rule["resources"]["overrides"].items() if of["resource"] == "namespace"
    ]
    wanted = {of_namespace: namespace, **labels}
    matchers = ",".join(f'{name}="{value}"' for name, value in wanted.items())
    series = rule["seriesQuery"].partition("{")[0]
    query = rule["metricsQuery"].replace("<<.Series>>", series)
    return str(query.replace("<<.LabelMatchers>>", matchers))


def value_of(query: str, recording: Recording, at_s: float) -> float:
    """Return the one value of a query, as both adapter and KEDA want it."""
    [value] = Query(query, {}).at(recording, at_s).values()
    return value


def replicas(current: int, value: float, average: float) -> int:
    """Return how many replicas are wanted by an external metric whose target is an average of so
    much for each replica.
    """
    if abs(1.0 - value / (average * current)) <= TOLERANCE:
        return current
    return math.ceil(value / average)
