"""Traced calls for tests: what a tracer exports, and its tree as text."""

from __future__ import annotations

import threading

from mooncake.telemetry.traces import Caller, Span, Tracer

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"


class Exported:
    """Keeps the trees that a tracer exports. `tracer` traces every call, or the share `ratio`."""

    def __init__(self, ratio: float = 1.0, draw: float = 0.0) -> None:
        self.trees: list[tuple[Span, Caller | None]] = []
        self.tracer = Tracer(self._take, ratio, lambda: draw)

    def _take(self, root: Span, caller: Caller | None) -> None:
        self.trees.append((root, caller))

    @property
    def root(self) -> Span:
        [(root, _)] = self.trees
        return root


def outline(span: Span, depth: int = 0) -> list[str]:
    """Return the names in a tree, each as far to the right as it is deep; "!": it failed."""
    lines = [". " * depth + span.name + ("!" if span.error else "")]
    for child in span.children:
        lines += outline(child, depth + 1)
    return lines


def named(span: Span, name: str) -> list[Span]:
    """Return the spans of a name, in the order of the tree."""
    own = [span] if span.name == name else []
    return own + [found for child in span.children for found in named(child, name)]


def wait_until_closed() -> None:
    """Wait until what was being sent when `OtlpTraces.close` gave up is over."""
    for thread in threading.enumerate():
        if thread.name == "traces":
            thread.join()


def is_whole(span: Span) -> bool:
    """Whether each part lies within the whole, and its events within it."""
    inside = all(span.start_s <= event.at_s <= span.end_s for event in span.events)
    return inside and all(
        span.start_s <= child.start_s <= child.end_s <= span.end_s and is_whole(child)
        for child in span.children
    )
