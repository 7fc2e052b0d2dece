"""Blocks hashed in threads have the checksums of the plain way, one block after the other."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import msgspec
import pytest

from mooncake.base import KvLayout, PageArray
from mooncake.engine.ranks.kv_moves import Hashed
from mooncake.kvstore.block_checksum import added
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.launch.worker.page_hasher import PageHasher
from mooncake.transfer.device import write_now
from mooncake.transfer.engine import Region
from mooncake.transfer.regions import DeviceRegion, Gates, RegionTable
from tests.support.transfer.fake_device import FakeDeviceMemory

LAYOUT = KvLayout(num_layers=3, block_tokens=4, kv_width=9, dtype="float16", fingerprint="a")
NUM_PAGES = 16
PAGES = PageArray(LAYOUT, NUM_PAGES, num_homes=2)
WAIT_MS = 20_000


@pytest.fixture(params=["host", "device"])
def region(request: pytest.FixtureRequest) -> Region:
    num_bytes = NUM_PAGES * LAYOUT.block_bytes
    table = RegionTable(Gates())
    if request.param == "host":
        host = table.allocate(num_bytes, "pages")
        host.buffer[:] = os.urandom(num_bytes)
        return host
    memory = FakeDeviceMemory(num_bytes)
    memory.is_strict = False
    write_now(memory, [(0, num_bytes)], memoryview(bytearray(os.urandom(num_bytes))))
    return DeviceRegion(1, "pages", memory)


@pytest.fixture
def hasher(region: Region) -> Iterator[PageHasher]:
    made = PageHasher(region, PAGES)
    yield made
    made.close()


def ended(hasher: PageHasher, count: int) -> dict[int, list[int]]:
    """Wait for so many operations."""
    found: dict[int, list[int]] = {}
    poller = select.poll()
    poller.register(hasher.fileno(), select.POLLIN)
    while len(found) < count:
        assert poller.poll(WAIT_MS), "no operation ended"
        for event in hasher.poll():
            assert isinstance(event, Hashed)
            found[event.number] = event.checksums
    assert not poller.poll(0)
    return found


def test_checksums_are_those_of_the_plain_way_in_the_order_asked_for(
    region: Region, hasher: PageHasher
) -> None:
    plain = BlockMemory.strided(region, LAYOUT, PAGES.layer_stride)
    wanted = [[5], [], list(range(NUM_PAGES)), [15, 0, 7], [3, 3]]
    numbers = [hasher.start(pages) for pages in wanted]
    found = ended(hasher, len(wanted))
    for number, pages in zip(numbers, wanted, strict=True):
        assert found[number] == [plain.checksum(PAGES.offset(page)) for page in pages]
    assert len(set(found[numbers[2]])) == NUM_PAGES


def test_stages_find_parts_of_what_the_whole_has(region: Region, hasher: PageHasher) -> None:
    """Of the same bytes, which here lie in one memory and there in one of each stage."""
    layers = LAYOUT.num_layers
    parts = []
    for held in (range(1), range(1, layers)):
        array = PAGES.of_rank(0, held)
        array = msgspec.structs.replace(array, home=None)
        memory = RegionTable(Gates()).allocate(array.num_bytes, "stage")
        for page in range(NUM_PAGES):
            here, there = PAGES.offset(page), array.offset(page)
            ranges = [(here + layer * PAGES.layer_stride, LAYOUT.slice_bytes) for layer in held]
            data = b"".join(region.read(ranges))
            for number in range(len(held)):
                begin = there + number * array.layer_stride
                piece = data[number * LAYOUT.slice_bytes :][: LAYOUT.slice_bytes]
                memory.buffer[begin : begin + LAYOUT.slice_bytes] = piece
        stage = PageHasher(memory, array)
        parts.append([stage.checksum(page) for page in range(NUM_PAGES)])
        stage.close()
    whole = [hasher.checksum(page) for page in range(NUM_PAGES)]
    assert [added(found) for found in zip(*parts, strict=True)] == whole


def test_a_hasher_that_is_closed_has_ended_its_threads(region: Region) -> None:
    hasher = PageHasher(region, PAGES)
    for _ in range(100):
        hasher.start(range(NUM_PAGES))
    hasher.close()
    hasher.close()
    assert not [name for name in os.listdir("/proc/self/task") if _thread_name(name) == "page-hash"]


def _thread_name(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()[:9]
    except (FileNotFoundError, ProcessLookupError):
        return ""  # a thread of another test, which has ended since it was listed
