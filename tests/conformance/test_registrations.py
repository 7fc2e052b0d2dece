"""Registration of memory with NICs: it says how far it has come, and a prefill worker that is
replaced a hundred times leaves none, no queue pair and no descriptor. NICs are memory copies here.
"""

from __future__ import annotations

import gc
import os
import select
from pathlib import Path

import numpy as np
import pytest

from mooncake.transfer import memory
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import Fence
from tests.support.transfer.driving import move
from tests.support.transfer.fake_nics import FakeFabric
from tests.support.transfer.rdma_engines import KIB, MIB, engines_on, filled, until, whole

NUM_WARM, NUM_REPLACEMENTS = 5, 100


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def turn() -> None:
    select.select([], [], [], 0.001)


def test_a_hundred_replaced_writers_leave_nothing_on_the_nics() -> None:
    fabric, found = FakeFabric(), []
    with engines_on(fabric) as opened:
        decode = opened("decode")
        theirs = filled(decode, 64 * KIB, 1)
        decode.transfer.guard(theirs)
        for number in range(NUM_REPLACEMENTS):
            prefill = opened(f"prefill-{number}")
            ours, grant = filled(prefill, 64 * KIB, number), decode.transfer.grant()
            ops = whole(ours, theirs)
            done = move(prefill.transfer, Op.WRITE, decode.transfer.segment, ops, grant=grant)
            assert done.error is None
            assert theirs.buffer == ours.buffer
            decode.transfer.revoke(grant)
            until(lambda grant=grant: decode.transfer.fence(grant) is Fence.CLOSED, turn)
            assert decode.rdma.num_served_pairs == 0
            opened.engines.remove(prefill)
            prefill.transfer.close()
            prefill.transfer.check_integrity()
            del ours, ops, prefill
            if number in (NUM_WARM, NUM_REPLACEMENTS - 1):
                found.append((len(fabric.keys), len(fabric.pairs), descriptors()))
    assert found[0] == found[1]


def test_much_memory_tells_how_far_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RESIDENT_BYTES", MIB)
    told: list[tuple[str, int, int]] = []
    with engines_on(FakeFabric()) as opened:
        engine = opened("pool", num_nics=3)
        monkeypatch.setattr(
            engine.table, "progress", lambda what, done, of: told.append((what, done, of))
        )
        region = engine.transfer.allocate(8 * MIB + 5, "kv-pool")
        assert not any(region.buffer[:: os.sysconf("SC_PAGE_SIZE")])
    size = 8 * MIB + 5
    assert told[:9] == [
        ("clearing kv-pool", min((step + 1) * MIB, size), size) for step in range(9)
    ]
    assert told[9:] == [("registering memory with NICs", number, 3) for number in range(3)]


def test_memory_is_resident_before_a_nic_pins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RESIDENT_BYTES", MIB)
    mapped, fd = memory.allocate_shared(16 * MIB, "resident")
    before = os.fstat(fd).st_blocks
    whole_memory = np.frombuffer(mapped, dtype=np.uint8)
    memory.make_resident(whole_memory.ctypes.data, 16 * MIB, lambda *_: None)
    assert before == 0
    assert os.fstat(fd).st_blocks * 512 >= 16 * MIB
    del whole_memory
    mapped.close()
    os.close(fd)
