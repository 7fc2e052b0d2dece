"""Two simulated processes with real bytes between them: what the tests of pushes, puts and fetches
stand on.
"""

from __future__ import annotations

from random import Random

import msgspec

from mooncake.base import BlockPlaces, KvLayout, PageArray, packed_places
from mooncake.base.kv_layout import KvPart
from mooncake.engine.block_pool import BlockPool
from mooncake.instance.mover import OwnPages, SliceMover
from mooncake.kvstore.client.block_memory import MemoryTransfers
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import Endpoint, Network, NetworkConfig, SimChannel, SimTransfer
from mooncake.transfer.engine import Region, TransferDone

LAYOUT = KvLayout(num_layers=3, block_tokens=4, kv_width=8, dtype="bfloat16", fingerprint="test")
NUM_PAGES = 8
PAGES = PageArray(LAYOUT, NUM_PAGES, num_homes=2)
POOL_BLOCKS = 6


class EnginePair:
    """`here` has pages and a mover, `there` has a pool region; messages to either are kept."""

    def __init__(self, *, questions: bool = False) -> None:
        """`questions`: `there` takes questions."""
        self.heap = EventHeap()
        self.network = Network(self.heap, NetworkConfig(questions=questions), Random(1))
        self.inbox: list[msgspec.Struct] = []
        self.there_inbox: list[msgspec.Struct] = []
        here = Endpoint("here", "node-a", self._deliver)
        there = Endpoint("there", "node-b", self.there_inbox.append)
        for endpoint in (here, there):
            self.network.attach(endpoint)
        self.channel = SimChannel(self.network, here)
        transfer = SimTransfer(self.network, here, with_bytes=True)
        self.remote = SimTransfer(self.network, there, with_bytes=True)
        self.pages: Region = transfer.allocate(NUM_PAGES * LAYOUT.block_bytes, "pages")
        self.remote.hear_questions()
        self.arena: Region = self.remote.allocate(POOL_BLOCKS * LAYOUT.block_bytes, "arena")
        self.pool = BlockPool(NUM_PAGES)
        self.transfer = transfer
        self.transfers = MemoryTransfers(transfer)
        """What tests use to read into memory as a client of the pool does."""
        self.own_pages = OwnPages(PAGES, transfer, self.pages)
        self.mover = SliceMover(self.own_pages)

    def _deliver(self, event: msgspec.Struct) -> None:
        if not isinstance(event, TransferDone):
            self.inbox.append(event)
        else:
            self.transfers.on_done(event, self.heap.now())
            self.mover.on_done(event, self.heap.now())

    def run(self) -> None:
        """Let everything under way arrive."""
        while self.heap.step():
            pass

    def places(self, blocks: list[int]) -> BlockPlaces:
        """Where pool blocks lie."""
        offsets = [block * LAYOUT.block_bytes for block in blocks]
        return packed_places(LAYOUT, self.remote.segment, self.arena.region_id, offsets)

    def part(self, blocks: list[int], indexes: list[int]) -> KvPart:
        """Pool blocks as a destination of the blocks at `indexes`."""
        return KvPart(self.places(blocks), indexes, 0, LAYOUT.num_layers)

    def fill_page(self, page: int, num_layers: int = LAYOUT.num_layers) -> bytes:
        """Write recognisable bytes into the first layers of a page; return the whole block's
        bytes.
        """
        for layer in range(num_layers):
            self._slice(page, layer)[:] = bytes([16 * page + layer + 1]) * LAYOUT.slice_bytes
        return self.page_bytes(page)

    def page_bytes(self, page: int) -> bytes:
        """Return a page's slices, layer after layer."""
        return b"".join(bytes(self._slice(page, layer)) for layer in range(LAYOUT.num_layers))

    def pool_bytes(self, block: int) -> bytes:
        """Return a pool block."""
        start = block * LAYOUT.block_bytes
        return bytes(self.arena.buffer[start : start + LAYOUT.block_bytes])

    def fill_pool(self, block: int, byte: int) -> bytes:
        """Fill a pool block with one byte and return it."""
        start = block * LAYOUT.block_bytes
        self.arena.buffer[start : start + LAYOUT.block_bytes] = bytes([byte]) * LAYOUT.block_bytes
        return self.pool_bytes(block)

    def _slice(self, page: int, layer: int) -> memoryview:
        start = PAGES.offset(page) + layer * PAGES.layer_stride
        return self.pages.buffer[start : start + LAYOUT.slice_bytes]
