"""Evaluates the expressions of the shipped dashboard over texts of /metrics that were recorded, as
Prometheus does: the functions and operators that are used there, no others.

Unlike Prometheus, `rate` and `increase` do not guess what lies between the first and the last
sample of a window and its ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_WORD = re.compile(
    r'\s*(\d+(?:\.\d+)?(?![\w:])|[a-zA-Z_][\w:]*|"[^"]*"|=~|!=|=|[(){}\[\],/+]|\d+[smh])'
)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
STALE_S = 300.0


@dataclass
class Recording:
    """Samples of one or several processes over time."""

    samples: dict[str, dict[Labels, list[tuple[float, float]]]] = field(default_factory=dict)

    def add(self, text: str, at_s: float, **of_target: str) -> None:
        """Add what /metrics said at a time. `of_target`: labels that Prometheus adds."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = self.samples.setdefault(sample.name, {})
                labels = frozenset((sample.labels | of_target).items())
                series.setdefault(labels, []).append((at_s, sample.value))


class Query:
    """One expression. `variables` are put in for `$NAME` before it is read."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            text = text.replace(f"${name}", value)
        self._words: list[str] = []
        end = 0
        while text[end:].strip():
            found = _WORD.match(text, end)
            assert found is not None, f"not understood: {text[end:]!r}"
            self._words.append(found[1])
            end = found.end()
        self._at = 0

    def at(self, recording: Recording, now: float) -> Vector:
        """Return the value of each series at a time."""
        self._recording, self._now, self._at = recording, now, 0
        found = self._sum()
        assert self._at == len(self._words), f"left over: {self._words[self._at :]}"
        return found

    # ------------------------------------------------------------ reading

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _next(self, *wanted: str) -> str:
        word = self._peek()
        assert not wanted or word in wanted, f"{word!r} instead of {wanted}"
        self._at += 1
        return word

    def _sum(self) -> Vector:
        left = self._quotient()
        while self._peek() == "+":
            self._next()
            left = _joined(left, self._quotient(), lambda a, b: a + b)
        return left

    def _quotient(self) -> Vector:
        left = self._term()
        while self._peek() == "/":
            self._next()
            left = _joined(left, self._term(), lambda a, b: a / b if b else math.nan)
        return left

    def _term(self) -> Vector:
        word = self._next()
        match word:
            case "(":
                found = self._sum()
                self._next(")")
                return found
            case "sum" | "max":
                return self._grouped(sum if word == "sum" else max)
            case "rate" | "increase":
                return self._grown(per_second=word == "rate")
            case "histogram_quantile":
                self._next("(")
                share = float(self._next())
                self._next(",")
                found = self._sum()
                self._next(")")
                return _quantile(share, found)
        return {labels: values[-1][1] for labels, values in self._selected(word, STALE_S).items()}

    def _grouped(self, join: Callable[[Iterable[float]], float]) -> Vector:
        names: list[str] = []
        if self._peek() == "by":
            self._next()
            self._next("(")
            while (word := self._next()) != ")":
                names += [] if word == "," else [word]
        self._next("(")
        inner = self._sum()
        self._next(")")
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            kept = frozenset(each for each in labels if each[0] in names)
            groups.setdefault(kept, []).append(value)
        return {labels: join(values) for labels, values in groups.items()}

    def _grown(self, *, per_second: bool) -> Vector:
        self._next("(")
        name = self._next()
        start = self._at
        self._matchers()
        self._next("[")
        window = self._next()
        end = self._at
        self._at = start
        found = self._selected(name, float(window[:-1]) * _SECONDS[window[-1]])
        self._at = end
        self._next("]")
        self._next(")")
        return {
            labels: _growth(values) / ((values[-1][0] - values[0][0]) if per_second else 1.0)
            for labels, values in found.items()
            if len(values) > 1
        }

    def _matchers(self) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = []
        if self._peek() == "{":
            self._next()
            while (word := self._next()) != "}":
                if word != ",":
                    found.append((word, self._next("=", "!=", "=~"), self._next()[1:-1]))
        return found

    def _selected(self, name: str, window_s: float) -> dict[Labels, list[tuple[float, float]]]:
        """Return the samples of the last `window_s` of each series that is meant."""
        matchers = self._matchers()
        found: dict[Labels, list[tuple[float, float]]] = {}
        for labels, values in self._recording.samples.get(name, {}).items():
            known = dict(labels)
            if not all(
                _matches(known.get(label, ""), sign, text) for label, sign, text in matchers
            ):
                continue
            inside = [each for each in values if self._now - window_s < each[0] <= self._now]
            if inside:
                found[labels] = inside
        return found


def _matches(value: str, sign: str, text: str) -> bool:
    if sign == "=~":
        return re.fullmatch(text, value) is not None
    return (value == text) == (sign == "=")


def _growth(values: list[tuple[float, float]]) -> float:
    """Return how much a counter grew; a smaller value is one that began anew."""
    total = 0.0
    for (_, before), (_, after) in pairwise(values):
        total += after - before if after >= before else after
    return total


def _joined(left: Vector, right: Vector, join: Callable[[float, float], float]) -> Vector:
    return {labels: join(left[labels], right[labels]) for labels in left if labels in right}


def _quantile(share: float, buckets: Vector) -> Vector:
    """Return the quantile of each histogram, by straight lines within buckets."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        rest = frozenset(each for each in labels if each[0] != "le")
        groups.setdefault(rest, []).append((bound, value))
    found: Vector = {}
    for labels, each in groups.items():
        each.sort()
        total = each[-1][1]
        if not total:
            continue
        low, below = 0.0, 0.0
        for bound, count in each:
            if count >= share * total:
                part = (share * total - below) / ((count - below) or 1.0)
                found[labels] = low if math.isinf(bound) else low + (bound - low) * part
                break
            low, below = bound, count
    return found
