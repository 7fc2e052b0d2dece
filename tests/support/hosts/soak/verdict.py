"""What is wrong with the answers and the processes of a soak. Nothing is started or read here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.hosts.soak.faults import Fault

SETTLE_S = 15.0
"""After a fault, clients may learn of it for so long."""
YOUNG_S = 120.0
"""A process that is younger still starts, and grows into its work."""
WINDOW_S = 60.0
"""The lowest figures of the first and of the last so many seconds of a process are compared."""
GROWTH_BYTES = 32 * 2**20
GROWTH_FDS = 24


@dataclass(frozen=True)
class Span:
    """A fault, and when it was."""

    fault: Fault
    from_s: float
    to_s: float
    whole_s: float | None = None
    """When all gateways knew of all processes again."""

    def touches(self, from_s: float, to_s: float) -> bool:
        """Whether it was at some moment of this time, or just before."""
        return self.from_s <= to_s and from_s <= self.to_s + SETTLE_S

    def lames(self, from_s: float, to_s: float) -> bool:
        """Whether processes were missing for it at some moment of this time, or just before."""
        whole_s = float("inf") if self.whole_s is None else self.whole_s
        return self.from_s <= to_s and from_s <= whole_s + SETTLE_S


def problems_of(
    answer: Mapping[str, Any], right: Sequence[int], spans: Sequence[Span]
) -> list[str]:
    """Return what is wrong with a request: it did not end exactly once with the `right` tokens, a
    try had others, it was refused by a cluster that was whole, or a try broke although nothing had
    happened to its gateway.
    """
    found = []
    last = answer["tries"][-1]
    for one in answer["tries"]:
        ids, ends = one.get("ids", []), one.get("ends", [])
        lame = [span.fault.host for span in spans if span.lames(one["from_s"], one["to_s"])]
        usage = one.get("usage") or {}
        near = [
            span.fault
            for span in spans
            if span.fault.host == one["host"] and span.touches(one["from_s"], one["to_s"])
        ]
        if ids != right[: len(ids)]:
            found.append(f"wrong tokens {ids}, not {right[: len(ids)]}")
        match one["how"]:
            case "whole" if (ids, ends) != (list(right), ["length"]):
                found.append(f"{len(ids)} of {len(right)} tokens, ended by {ends}")
            case "whole" if answer["stream"] and (one["num_done"], one["after_done"]) != (1, 0):
                found.append("its stream goes on after its end")
            case "whole" if usage.get("completion_tokens", len(right)) != len(right):
                found.append(f"its usage is {usage}")
            case "away" if one["host"] not in lame:
                found.append(f"its gateway took no connection without a fault: {one['why']}")
            case "refused" if not lame:
                found.append(f"refused by a whole cluster: {one['why']}")
            case "cut" if not any(fault.cuts for fault in near):
                found.append(f"cut without a fault of its gateway: {one['why']}")
            case "silent" if not any(fault.silences for fault in near):
                found.append("no word without a fault of its gateway")
            case "failed":
                found.append(f"failed: {one['why']}")
    if last["how"] not in ("whole", "left"):
        found.append(f"no answer after {len(answer['tries'])} tries")
    return [f"request {answer['answer']}: {each}" for each in found]


@dataclass(frozen=True)
class Sample:
    """What a process holds at a moment."""

    at_s: float
    num_bytes: int
    """Bytes of memory that is neither a file's nor shared: pages and pools of blocks are shared.
    Of a whole host: what its file systems in memory hold, to which those belong.
    """
    num_fds: int
    """Of a whole host: its processes."""


def lowest(samples: Iterable[Sample], from_s: float, to_s: float) -> tuple[int, int] | None:
    """Return the least memory and descriptors in a time; None where nobody looked."""
    seen = [each for each in samples if from_s <= each.at_s <= to_s]
    if not seen:
        return None
    return min(each.num_bytes for each in seen), min(each.num_fds for each in seen)


def growth(samples: Sequence[Sample]) -> tuple[int, int] | None:
    """Return by how many bytes and descriptors a process has grown; None where it did not live long
    enough to say.
    """
    first_s, last_s = samples[0].at_s + YOUNG_S, samples[-1].at_s
    if last_s - first_s < 2 * WINDOW_S:
        return None
    before = lowest(samples, first_s, first_s + WINDOW_S)
    after = lowest(samples, last_s - WINDOW_S, last_s)
    if before is None or after is None:
        return None
    return after[0] - before[0], after[1] - before[1]


def leaks(name: str, samples: Sequence[Sample]) -> list[str]:
    """Return whether a process holds more and more memory or descriptors."""
    if (grown := growth(samples)) is None:
        return []
    found = []
    if grown[0] > GROWTH_BYTES:
        found.append(f"{name} has grown by {grown[0] / 2**20:.0f} MiB")
    what, most = ("processes", 6) if name.startswith("host ") else ("descriptors", GROWTH_FDS)
    if grown[1] > most:
        found.append(f"{name} has {grown[1]} {what} more")
    return found


def pauses_by_kind(
    spans: Sequence[Span], pauses: Sequence[tuple[float, float]]
) -> dict[str, dict[str, float | int | None]]:
    """Return for each kind of fault: how often it was, the longest time that a streamed answer
    stood still meanwhile or just after, and how long the cluster took to be whole again (median and
    longest). `pauses`: when each began, and its length.
    """
    table: dict[str, dict[str, float | int | None]] = {}
    for kind in dict.fromkeys(span.fault.kind for span in spans):
        own = [span for span in spans if span.fault.kind == kind]
        longest = [
            length
            for at_s, length in pauses
            if any(span.touches(at_s, at_s + length) for span in own)
        ]
        whole = [span.whole_s - span.to_s for span in own if span.whole_s is not None]
        table[kind] = {
            "times": len(own),
            "longest_pause_s": max(longest, default=0.0),
            "whole_median_s": statistics.median(whole) if whole else None,
            "whole_longest_s": max(whole, default=None),
        }
    return table
