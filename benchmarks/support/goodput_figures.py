"""What requests under an open loop came to, and the highest rate that keeps limits. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

PERCENT = 100


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Times in seconds."""

    end: Literal["whole", "refused", "failed", "late"]
    """late: its client went away, or did not send it, as the turn before had not ended well."""
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    """Mean of the slowest tenth of the gaps between its tokens; 0 where there is one token."""
    party: str = ""
    """Who sent it: one of `sessions.PARTIES`, or nobody in particular."""
    num_said: int = 0
    """Tokens of its prompt that were said in earlier turns, answers included."""
    num_cached: int = 0
    """Tokens of its prompt that came from a cache."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a request good."""

    ttft_s: float
    tbt_s: float

    def are_met(self, one: Outcome) -> bool:
        """Return whether a request ended whole and within both limits."""
        return one.end == "whole" and one.ttft_s <= self.ttft_s and one.tbt_s <= self.tbt_s


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one load, from its fresh start."""

    load: str
    server: str
    rate: float
    """Requests a second."""
    seed: int
    outcomes: list[Outcome]
    idle_ttft_s: float
    idle_tbt_s: float
    """The gaps of single requests before the load."""
    load_average: float

    def share(self, limits: Limits) -> float:
        """Return the share of good requests."""
        return sum(map(limits.are_met, self.outcomes)) / len(self.outcomes)

    def num(self, end: str) -> int:
        """Return how many ended so."""
        return sum(one.end == end for one in self.outcomes)

    def median(self, field: Literal["ttft_s", "tbt_s"]) -> float | None:
        """Return the median over requests that ended whole; None where none did."""
        values = [getattr(one, field) for one in self.outcomes if one.end == "whole"]
        return statistics.median(values) if values else None


def relative(trials: Sequence[Trial], ttft: float, tbt: float) -> Limits:
    """Return limits as multiples of what the fastest idle server needs (FAST'25, section 5.2)."""
    return Limits(
        ttft_s=ttft * min(trial.idle_ttft_s for trial in trials),
        tbt_s=tbt * min(trial.idle_tbt_s for trial in trials),
    )


class Highest(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which a wanted share of requests is good, as far as it was tried."""

    rate: float
    bound: Literal["", "<", ">="] = ""
    """"<": even the lowest rate tried has too few; ">=": the highest has enough."""

    def __str__(self) -> str:
        return f"{self.bound}{' ' if self.bound else ''}{self.rate:.2f}"


def highest_rate(points: Sequence[tuple[float, float]], wanted: float) -> Highest:
    """Return where the share of good requests first falls below `wanted`.

    points: (rate, share), in any order. Between two rates the share is taken to fall evenly.

    Raises:
        ValueError: there is no point.
    """
    before: tuple[float, float] | None = None
    for rate, share in sorted(points):
        if share < wanted:
            if before is None:
                return Highest(rate=rate, bound="<")
            fallen = (before[1] - wanted) / (before[1] - share)
            return Highest(rate=before[0] + fallen * (rate - before[0]))
        before = rate, share
    if before is None:
        raise ValueError("a highest rate needs at least one point")
    return Highest(rate=before[0], bound=">=")


def table(trials: Sequence[Trial], limits: Limits) -> list[str]:
    """Return a table in Markdown, a row for each load, server and rate; seeds taken together."""
    lines = [
        "| load | requests/s | server | good (by seed) | refused | late or failed "
        "| median TTFT s | median TBT ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load, rate, server in sorted({(one.load, one.rate, one.server) for one in trials}):
        own = [one for one in trials if (one.load, one.rate, one.server) == (load, rate, server)]
        shares = [PERCENT * one.share(limits) for one in own]
        by_seed = ", ".join(f"{share:.0f}" for share in shares)
        total = sum(len(one.outcomes) for one in own)
        refused = PERCENT * sum(one.num("refused") for one in own) / total
        lost = PERCENT * sum(one.num("late") + one.num("failed") for one in own) / total
        ttfts = [value for one in own if (value := one.median("ttft_s")) is not None]
        tbts = [value for one in own if (value := one.median("tbt_s")) is not None]
        lines.append(
            f"| {load} | {rate:g} | {server} | {statistics.mean(shares):.0f} % ({by_seed}) "
            f"| {refused:.0f} % | {lost:.0f} % | {_median(ttfts, 1, 2)} | {_median(tbts, 1e3, 0)} |"
        )
    return lines


def by_party(trials: Sequence[Trial], limits: Limits) -> list[str]:
    """Return a table in Markdown, a row for each party of each load, server and rate; seeds taken
    together. Empty: no load has parties.
    """
    rows = []
    for load, rate, server in sorted({(one.load, one.rate, one.server) for one in trials}):
        outcomes = [
            outcome
            for one in trials
            if (one.load, one.rate, one.server) == (load, rate, server)
            for outcome in one.outcomes
        ]
        for party in sorted({one.party for one in outcomes} - {""}):
            own = [one for one in outcomes if one.party == party]
            whole = [one for one in own if one.end == "whole"]
            num_refused = sum(one.end == "refused" for one in own)
            rows.append(
                f"| {load} | {rate:g} | {server} | {party} "
                f"| {PERCENT * sum(map(limits.are_met, own)) / len(own):.0f} % "
                f"| {PERCENT * num_refused / len(own):.0f} % "
                f"| {PERCENT * len(whole) / len(own):.0f} % "
                f"| {_median([one.ttft_s for one in whole], 1, 2)} "
                f"| {_median([one.tbt_s for one in whole], 1e3, 0)} |"
            )
    if not rows:
        return []
    return [
        "| load | requests/s | server | tenant and class | good | refused | ended whole "
        "| median TTFT s | median TBT ms |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def next_turns(trials: Sequence[Trial]) -> list[str]:
    """Return a table in Markdown, a row for each load, rate and server: the turns of conversations
    after the first, and how much of what was said before came from a cache. Seeds are taken
    together. Empty: no load has such turns.
    """
    rows = []
    for load, rate, server in sorted({(one.load, one.rate, one.server) for one in trials}):
        own = [
            outcome
            for one in trials
            if (one.load, one.rate, one.server) == (load, rate, server)
            for outcome in one.outcomes
            if outcome.num_said and outcome.end == "whole"
        ]
        if own:
            said = sum(one.num_said for one in own)
            found = sum(min(one.num_said, one.num_cached) for one in own)
            rows.append(
                f"| {load} | {rate:g} | {server} | {len(own)} | {said / len(own):.0f} "
                f"| {PERCENT * found / said:.1f} % | {(said - found) / len(own):.0f} "
                f"| {_median([one.ttft_s for one in own], 1, 2)} |"
            )
    if not rows:
        return []
    return [
        "| load | requests/s | server | next turns | tokens said before | of these from a cache "
        "| not from it | median TTFT s |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def summary(trials: Sequence[Trial], limits: Limits, wanted: Sequence[float]) -> list[str]:
    """Return a table in Markdown: the highest rate of each server at each wanted share, with its
    range over seeds.
    """
    head = " | ".join(f"highest rate at {share:.0%} good (by seed)" for share in wanted)
    lines = [f"| load | server | {head} |", "|---" * (2 + len(wanted)) + "|"]
    for load, server in sorted({(one.load, one.server) for one in trials}):
        own = [one for one in trials if (one.load, one.server) == (load, server)]
        cells = []
        for share in wanted:
            whole = highest_rate(_points(own, limits), share)
            by_seed = [
                str(highest_rate(_points([one for one in own if one.seed == seed], limits), share))
                for seed in sorted({one.seed for one in own})
            ]
            cells.append(f"{whole} ({', '.join(by_seed)})")
        lines.append(f"| {load} | {server} | {' | '.join(cells)} |")
    return lines


def _points(trials: Sequence[Trial], limits: Limits) -> list[tuple[float, float]]:
    """Return (rate, share of good requests over all trials at that rate)."""
    points = []
    for rate in {one.rate for one in trials}:
        outcomes = [each for one in trials if one.rate == rate for each in one.outcomes]
        points.append((rate, sum(map(limits.are_met, outcomes)) / len(outcomes)))
    return points


def _median(values: Sequence[float], factor: float, digits: int) -> str:
    return f"{factor * statistics.median(values):.{digits}f}" if values else "-"
