"""How tests drive a transfer engine: wait on its descriptor alone, as a driver's loop does."""

from __future__ import annotations

import os
import select

import pytest

from mooncake.base.clock import Clock, MonotonicClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, TransferBatch, TransferDone, TransferEvent, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.topology import has_rdma_devices
from tests.support.waiting import LONG_S

NEEDS_RDMA = pytest.mark.skipif(
    not has_rdma_devices(),
    reason="needs an RDMA device; 'make test-rdma' boots a machine with two",
)
WIRED = ["tcp", "shm", pytest.param("rdma", marks=NEEDS_RDMA)]
"""The protocols between processes."""
EMULATED = os.environ.get("MOONCAKE_RDMA_GUEST") == "1"
"""Whether this is the machine that `make test-rdma` boots: bytes move a hundred times slower."""
WAIT_S = max(LONG_S, 20.0 * float(os.environ.get("MOONCAKE_GUEST_SLOWNESS", "1")))
"""How long tests wait for what must happen. They never wait so long if it does. Emulated machines
are slow."""


def open_engine(
    protocols: list[str],
    engine_id: str = "us",
    *,
    secret: str = "secret",
    clock: Clock | None = None,
) -> RoutedTransfer:
    """Return an engine on the same "host" as the peer processes."""
    config = TransferConfig(secret=secret, host="host", protocols=protocols)
    return open_transfer(config, engine_id, clock or MonotonicClock())


def wait_for(transfer: RoutedTransfer, batch_ids: list[int]) -> dict[int, TransferDone]:
    """Return how these batches ended; every ending must be one of them and come once."""
    done: dict[int, TransferDone] = {}
    while len(done) < len(batch_ids):
        assert select.select([transfer], [], [], WAIT_S)[0], (
            f"{len(done)} of {len(batch_ids)} batches ended"
        )
        for event in transfer.poll():
            assert event.batch_id in batch_ids
            assert event.batch_id not in done, "a batch ended twice"
            done[event.batch_id] = event
    return done


def move(
    transfer: RoutedTransfer,
    op: Op,
    peer: SegmentRef,
    ops: list[TransferOp],
    deadline_s: float | None = None,
    grant: int = 0,
) -> TransferDone:
    """Do one batch to its end."""
    batch = TransferBatch(op=op, peer=peer, ops=ops, deadline_s=deadline_s, grant=grant)
    batch_id = transfer.submit(batch)
    return wait_for(transfer, [batch_id])[batch_id]


def events(engine: RoutedTransfer) -> list[TransferEvent]:
    """Wait for events; return them."""
    found: list[TransferEvent] = []
    while not found:
        assert select.select([engine], [], [], WAIT_S)[0], "nothing came"
        found += engine.events()
    return found
