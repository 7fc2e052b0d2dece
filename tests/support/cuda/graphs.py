"""Captured graphs: the tasks that a thread queued on its capturing streams, queued anew by each
replay. Their memory comes from a pool that no one else gets.
"""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any

from tests.support.cuda.streams import Forbidden, Machine, Stream, Task, the_machine

_pools = itertools.count(1)


def graph_pool_handle() -> int:
    """Return a pool that graphs may share."""
    return next(_pools)


class Capture:
    """The recording of one graph."""

    def __init__(self, machine: Machine, origin: Stream, pool: int) -> None:
        self.machine, self.pool, self.ended = machine, pool, False
        self.nodes: list[tuple[int, Task, list[tuple[int, int]]]] = []
        """(stream, task, (stream, tick) of nodes that come first)."""
        self.streams = [origin]
        self._ticks: dict[int, int] = {origin.number: 0}
        self._behind: dict[int, dict[int, int]] = {origin.number: {}}
        """Stream -> the ticks of the others behind which its next task comes."""
        self._clocks: dict[tuple[int, int], dict[int, int]] = {}
        origin.capture = self

    def add(self, stream: int, task: Task, waits: list[tuple[int, int]]) -> None:
        self._ticks[stream] += 1
        task.stream, task.tick = stream, self._ticks[stream]
        behind = self._behind[stream]
        for number, tick in waits:
            merged = {number: tick} | self._clocks[number, tick]
            for other, at in merged.items():
                behind[other] = max(behind.get(other, 0), at)
        behind[stream] = task.tick
        self._clocks[stream, task.tick] = dict(behind)
        self.nodes.append((stream, task, waits))

    def join(self, stream: Stream) -> None:
        """Capture what comes on `stream` too: it waits for an event of this capture."""
        if stream.capture is None:
            stream.capture = self
            self.streams.append(stream)
            self._ticks[stream.number], self._behind[stream.number] = 0, {}

    def end(self, failed: bool) -> None:
        """Stop recording. Forbidden: a stream that took part was not waited for."""
        self.ended = True
        origin = self.streams[0]
        behind = self._behind[origin.number]
        for stream in self.streams:
            stream.capture = None
        for stream in self.streams[1:]:
            if not failed and behind.get(stream.number, 0) < self._ticks[stream.number]:
                raise Forbidden("the capture ends with unjoined work on a forked stream")


class CUDAGraph:
    """What a capture recorded."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.capture: Capture | None = None
        self._streams: dict[int, Stream] = {}

    def replay(self) -> None:
        """Queue all tasks again, the origin's on the current stream."""
        machine, capture = the_machine(), self.capture
        if capture is None or not capture.ended:
            raise Forbidden("CUDAGraph.replay: nothing has been captured")
        machine.refuse_in_capture("CUDAGraph.replay")
        current, origin = machine.current(capture.streams[0].device_index), capture.streams[0]
        queued: dict[tuple[int, int], Task] = {}
        for number, task, waits in capture.nodes:
            stream = current
            if number != origin.number:
                if number not in self._streams:
                    self._streams[number] = Stream.of(machine, origin.device_index)
                stream = self._streams[number]
            queued[number, task.tick] = machine.queue(
                stream, task.name, task.body, task.accesses, [queued[at] for at in waits],
                task.stack, task.meeting,
            )  # fmt: skip

    def pool(self) -> int:
        assert self.capture is not None
        return self.capture.pool

    def reset(self) -> None:
        self.capture = None


class graph:  # noqa: N801 - torch's name
    """`torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: int | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool, self._stream = cuda_graph, pool or graph_pool_handle(), stream
        self._mode = capture_error_mode

    def __enter__(self) -> None:
        machine = the_machine()
        machine.refuse_in_capture("a capture within a capture")
        machine.finish_all()
        self._before = machine.current()
        origin = self._stream or Stream()
        machine.choose(origin)
        self._graph.capture = machine.capture = Capture(machine, origin, self._pool)

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        machine = the_machine()
        machine.choose(self._before)
        capture, machine.capture = machine.capture, None
        assert capture is not None
        capture.end(failed=error is not None)
