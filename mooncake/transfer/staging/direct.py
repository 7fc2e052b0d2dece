"""Moves batches that hardware carries between devices by itself (GPUDirect), without slots or
windows.

This module adds order to the protocol. A NIC writes only when work that the device had begun can no
longer write there. Its writes are then made visible to the device's later work.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mooncake.base.errors import TransferError
from mooncake.transfer.batches import Job
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.engine import Op
from mooncake.transfer.regions import DeviceRegion
from mooncake.transfer.staging import wire
from mooncake.transfer.staging.flow import Flow

if TYPE_CHECKING:  # it imports this package
    from mooncake.transfer.router import RoutedTransfer

_LOG = logging.getLogger(__name__)
DIRECT = "rdma"
"""The protocol whose hardware may reach devices by itself."""

Post = Callable[[Callable[[], None]], None]
"""Runs a call in the staging loop; from any thread."""


def settle_all(memories: Sequence[DeviceMemory], post: Post, then: Callable[[], None]) -> None:
    """Call `then` when nothing that devices have begun can still write to `memories`."""
    left = len(memories)

    def settled() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    for memory in memories:
        memory.settle(lambda _error: post(settled))
    if not memories:
        then()


def _flush_all(regions: Iterable[DeviceRegion]) -> str | None:
    """Make what NICs wrote visible to the devices. Return why that failed, or None."""
    try:
        for region in regions:
            region.memory.flush()
    except TransferError as error:
        return error.message
    return None


class DirectMoves:
    """The batches of one engine that hardware moves. Lives in the staging loop."""

    def __init__(
        self,
        carrier: RoutedTransfer,
        post: Post,
        stage: Callable[[Flow, Iterable[int]], None],
        ended: Callable[[Flow], None],
    ) -> None:
        """`stage` is called with a flow whose hardware failed, `ended` with a flow that is over."""
        self._carrier = carrier
        self._post = post
        self._stage = stage
        self._ended = ended

    def takes(
        self, job: Job, ours: Iterable[DeviceRegion], theirs: Iterable[wire.RegionFacts]
    ) -> bool:
        """Return whether hardware reaches every device at both ends."""
        return (
            all(DIRECT in region.protocols for region in ours)
            and all(DIRECT in facts.protocols for facts in theirs)
            and self._carrier.reaches(job.peer, DIRECT)
        )

    def start(self, flow: Flow, ours: Sequence[DeviceRegion], theirs: Sequence[int]) -> None:
        """Move the whole batch; `theirs` are the peer's regions that lie on a device."""
        job = flow.job
        job.expect(1)
        if not job.begin():
            self._ended(flow)
            return
        flow.is_direct = True
        go = functools.partial(self._go, flow, ours, theirs)
        if job.op is Op.READ:
            settle_all([region.memory for region in ours], self._post, lambda: go(None))
        else:
            self._sync(flow, theirs, wire.Settle, go)

    def _sync(
        self,
        flow: Flow,
        theirs: Sequence[int],
        message: type[wire.Settle] | type[wire.Flush],
        then: Callable[[str | None], None],
    ) -> None:
        """Have the peer settle or flush regions one after another, then call `then(error)`."""
        if not theirs or flow.peer is None:
            then(None)
            return

        def answered(answer: wire.Answer) -> None:
            if isinstance(answer, wire.Refused):
                then(f"{flow.job.peer.engine_id} refused: {answer.reason}")
            else:
                self._sync(flow, theirs[1:], message, then)

        flow.peer.ask(lambda ticket: message(ticket, theirs[0]), answered)

    def _go(
        self,
        flow: Flow,
        ours: Sequence[DeviceRegion],
        theirs: Sequence[int],
        error: str | None,
    ) -> None:
        job = flow.job
        if error is not None or job.stopped:
            self._end(flow, error)
            return
        moved = functools.partial(self._on_moved, flow, ours, theirs)
        flow.direct = self._carrier.carry(
            job.op, job.peer, job.ops, lambda inner: self._post(lambda: moved(inner)),
            only=DIRECT, grant=job.grant,
        )  # fmt: skip

    def _on_moved(
        self, flow: Flow, ours: Sequence[DeviceRegion], theirs: Sequence[int], inner: Job
    ) -> None:
        job, flow.direct = flow.job, None
        job.nics |= inner.nics
        if job.stopped:
            self._end(flow, None)
        elif inner.error is not None:
            _LOG.info("batch %d goes by staging: %s", job.batch_id, inner.error)
            flow.is_direct = False
            job.give_back()
            self._stage(flow, theirs)
        elif job.op is Op.WRITE:
            self._sync(flow, theirs, wire.Flush, functools.partial(self._end, flow))
        else:
            self._end(flow, _flush_all(ours))

    def _end(self, flow: Flow, error: str | None) -> None:
        flow.is_direct = False
        flow.job.finish(error)
        self._ended(flow)
