"""Blocks in memory of every shape: the copies name each byte once, the checksum is the pool's."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import BlockPlaces, KvLayout, SegmentRef, TransferError
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.transfer.engine import Region
from mooncake.transfer.regions import Gates, RegionTable
from tests.support.transfer.fake_device import FakeDeviceMemory

LAYOUT = KvLayout(num_layers=3, block_tokens=2, kv_width=4, dtype="float16", fingerprint="f")
SLICE, BLOCK, PAGES = LAYOUT.slice_bytes, LAYOUT.block_bytes, 5
SEGMENT = SegmentRef("peer", {}, "h")


def host(num_bytes: int, table: RegionTable) -> Region:
    return table.register(memoryview(bytearray(Random(num_bytes).randbytes(num_bytes))), "mine")


def shapes() -> dict[str, BlockMemory]:
    table = RegionTable(Gates())
    return {
        "packed": BlockMemory.packed(host(PAGES * BLOCK, table), LAYOUT),
        "paged": BlockMemory.strided(host(PAGES * BLOCK, table), LAYOUT, PAGES * SLICE),
        "with gaps": BlockMemory.strided(host(400, table), LAYOUT, SLICE + 3),
        "layered": BlockMemory.layered([host(PAGES * SLICE + n, table) for n in range(3)], LAYOUT),
    }


def slices(memory: BlockMemory, offset: int) -> list[bytes]:
    """The plain way to a block's bytes."""
    return [
        bytes(region.buffer[base + offset : base + offset + SLICE])
        for region, base in memory.layers
    ]


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("there_packed", [True, False])
def test_copies_bring_every_slice_to_its_place(shape: str, there_packed: bool) -> None:
    memory = shapes()[shape]
    stride = SLICE if there_packed else 7 * SLICE
    offsets, remote = [SLICE, 0], [1000, 3 * SLICE]
    ops = memory.ops(offsets, BlockPlaces(SEGMENT, 9, stride, remote))
    assert len(ops) == (2 if shape == "packed" and there_packed else 6)
    arena = bytearray(1000 + 21 * SLICE)
    regions = {region.region_id: region for region in memory.regions}
    for op in ops:
        assert op.remote_region == 9
        piece = regions[op.local_region].buffer[op.local_offset : op.local_offset + op.num_bytes]
        arena[op.remote_offset : op.remote_offset + op.num_bytes] = piece
    for here, there in zip(offsets, remote, strict=True):
        found = [bytes(arena[there + n * stride : there + n * stride + SLICE]) for n in range(3)]
        assert found == slices(memory, here)


@pytest.mark.parametrize("shape", shapes())
def test_the_checksum_is_that_of_the_pools_block(shape: str) -> None:
    memory = shapes()[shape]
    assert memory.checksum(SLICE) == checksum_of(b"".join(slices(memory, SLICE)), LAYOUT)


def test_a_device_is_read_or_says_why_not() -> None:
    device = FakeDeviceMemory(PAGES * BLOCK)
    device.is_strict = False
    region = RegionTable(Gates()).register_device(device, "mine")
    memory = BlockMemory.strided(region, LAYOUT, PAGES * SLICE)
    pages = device._read(0, device.num_bytes)
    block = b"".join(pages[n * PAGES * SLICE :][SLICE : 2 * SLICE] for n in range(3))
    assert memory.checksum(SLICE) == checksum_of(block, LAYOUT)
    device.fails = lambda _kind: "broken"
    with pytest.raises(TransferError, match="broken"):
        memory.checksum(0)


def test_places_lie_inside() -> None:
    memory = shapes()["paged"]
    assert memory.at([0, (PAGES - 1) * SLICE])[1:].offsets == ((PAGES - 1) * SLICE,)
    for wrong in (-1, (PAGES - 1) * SLICE + 1):
        with pytest.raises(ValueError, match="the last may begin at"):
            memory.at([0, wrong])


def test_shapes_that_hold_no_blocks_are_refused() -> None:
    region = host(BLOCK, RegionTable(Gates()))
    with pytest.raises(ValueError, match="overlap"):
        BlockMemory.strided(region, LAYOUT, SLICE - 1)
    with pytest.raises(ValueError, match="2 regions for 3 layers"):
        BlockMemory.layered([region, region], LAYOUT)
