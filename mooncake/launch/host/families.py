"""Makes Prometheus' text of tables of figures, for the ports of a worker's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Source = TypeVar("Source")


def families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    prefix: str,
    figures: Mapping[str, tuple[str, Callable[[Source], float]]],
    labels: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Source]],
) -> Iterator[Metric]:
    """Yield the family of each figure, with a series for each row: the values of its labels, and
    what the figure is read from.

    figures: name -> help text, and how its value is read.
    """
    for name, (text, value_of) in figures.items():
        family = kind(f"mooncake_{prefix}{name}", text, labels=labels)
        for values, source in rows:
            family.add_metric(values, value_of(source))
        yield family


class _Made(Collector):
    def __init__(self, made: Iterable[Metric]) -> None:
        self._made = list(made)

    def collect(self) -> Iterable[Metric]:
        return self._made


def render(made: Iterable[Metric]) -> bytes:
    """Return the families, and those of this process, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Made(made))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
