"""Registered memory that holds blocks, packed or in any regular shape, and places in it.

Values: the registrations are the transfer engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from mooncake.base import BlockPlaces, KvLayout, SegmentRef
from mooncake.base.kv_layout import packed_places
from mooncake.kvstore.block_checksum import added, checksum_of
from mooncake.transfer.engine import (
    MAX_ANSWER_BYTES,
    MAX_ANSWER_PIECES,
    Ended,
    Op,
    Region,
    Transfer,
    TransferBatch,
    TransferDone,
    TransferOp,
)


@dataclass(frozen=True)
class BlockMemory:
    """Registered memory that holds blocks, or some layers of them. The `n`-th slice of the block at
    `offset` begins `offset` bytes after the n-th of `layers`, which are (region, byte offset).
    """

    layers: tuple[tuple[Region, int], ...]
    layout: KvLayout
    first_layer: int = 0

    @classmethod
    def packed(cls, region: Region, layout: KvLayout) -> BlockMemory:
        """Return memory where all layers of a block lie together, as in the pool."""
        return cls.strided(region, layout, layout.slice_bytes)

    @classmethod
    def strided(
        cls, region: Region, layout: KvLayout, layer_stride: int, held: range | None = None
    ) -> BlockMemory:
        """Return memory where the slices of a block lie `layer_stride` bytes apart, such as an
        engine's pages `[layers, pages, block_tokens, width]`. It has the layers `held`, or all.
        Raises ValueError when the stride is smaller than a slice.
        """
        if layer_stride < layout.slice_bytes:
            raise ValueError(
                f"layers {layer_stride} bytes apart overlap: a slice has {layout.slice_bytes}"
            )
        held = held or range(layout.num_layers)
        layers = tuple((region, number * layer_stride) for number in range(len(held)))
        return cls(layers, layout, held.start)

    @classmethod
    def layered(cls, regions: Sequence[Region], layout: KvLayout) -> BlockMemory:
        """Return memory with one region for each layer. Raises ValueError when the number
        differs.
        """
        if len(regions) != layout.num_layers:
            raise ValueError(f"{len(regions)} regions for {layout.num_layers} layers")
        return cls(tuple((region, 0) for region in regions), layout)

    @property
    def slice_bytes(self) -> int:
        return self.layout.slice_bytes

    @property
    def regions(self) -> list[Region]:
        """The regions, each once."""
        return list({region.region_id: region for region, _ in self.layers}.values())

    def at(self, offsets: Sequence[int]) -> Places:
        """Return the places of blocks that begin at these byte offsets. Raises ValueError when a
        block would not lie inside.
        """
        for offset in offsets:
            if not 0 <= offset <= self._last:
                raise ValueError(f"no block at byte {offset}: the last may begin at {self._last}")
        return Places(self, tuple(offsets))

    def ops(self, offsets: Sequence[int], there: BlockPlaces) -> list[TransferOp]:
        """Return the transfers between blocks here, at byte `offsets`, and blocks at a peer: one
        for each block if blocks are one piece on both sides, otherwise one for each slice.
        """
        size, stride = self.slice_bytes, there.layer_stride
        layers = self.layers
        if stride == size and self._is_packed:
            size, layers = size * len(layers), layers[:1]
        return [
            TransferOp(region.region_id, base + here, there.region, remote + layer * stride, size)
            for here, remote in zip(offsets, there.offsets, strict=False)
            for layer, (region, base) in enumerate(layers)
        ]

    def checksum(self, offset: int) -> int:
        """Return the checksum of a block, or the part of it that the layers here contribute.
        Reading a device takes about 0.1 ms for a MiB. Raises TransferError when it fails.
        """
        size, first, found = self.slice_bytes, self.first_layer, list[int]()
        if self._is_packed:
            region, base = self.layers[0]
            whole = region.read([(base + offset, size * len(self.layers))])
            return added(checksum_of(part, self.layout, first) for part in whole)
        for _, run in groupby(self.layers, key=lambda layer: layer[0].region_id):
            slices = list(run)
            for part in slices[0][0].read([(base + offset, size) for _, base in slices]):
                found.append(checksum_of(part, self.layout, first))
                first += len(part) // size
        return added(found)

    @cached_property
    def _last(self) -> int:
        """The last byte offset at which a block may begin."""
        return min(region.num_bytes - base for region, base in self.layers) - self.slice_bytes

    @cached_property
    def _is_packed(self) -> bool:
        """True if each block is one piece of memory."""
        [first, *_] = self.layers
        step = self.slice_bytes
        return all(
            region is first[0] and base == first[1] + number * step
            for number, (region, base) in enumerate(self.layers)
        )


@dataclass(frozen=True)
class Places:
    """Places of some blocks in registered memory."""

    memory: BlockMemory
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, some: slice) -> Places:
        return Places(self.memory, self.offsets[some])


class MemoryTransfers:
    """Moves blocks between registered memory of this process and peers: a `block_reader.ReadPort`.
    Owns the callback for the end of each transfer.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._ended: dict[int, Ended] = {}
        """Callbacks by the number of their transfer."""

    def read(self, places: Places, there: BlockPlaces, deadline_s: float, ended: Ended) -> int:
        return self._start(Op.READ, places, there, deadline_s, ended)

    def ask(
        self, places: Places, peer: SegmentRef, question: bytes, deadline_s: float, ended: Ended
    ) -> tuple[int, int] | None:
        """Begin to ask a peer for blocks, which come into `places` behind its answer. Return a
        number for `cancel` and the bytes of a block, or None if the bytes have to go by another
        way.
        """
        memory, count = places.memory, len(places)
        block_bytes = memory.layout.block_bytes
        if (
            count * block_bytes > MAX_ANSWER_BYTES
            or len(memory.layers) != memory.layout.num_layers
            or any(region.device != "host" for region in memory.regions)
            or not self._transfer.takes_questions(peer)
        ):
            return None
        ops = memory.ops(places.offsets, packed_places(memory.layout, peer, 0, [0] * count))
        if len(ops) > MAX_ANSWER_PIECES:
            return None
        number = self._transfer.submit(TransferBatch(
            op=Op.READ, peer=peer, ops=ops, deadline_s=deadline_s, question=question
        ))  # fmt: skip
        self._ended[number] = ended
        return number, block_bytes

    def ask_alone(self, peer: SegmentRef, question: bytes, deadline_s: float, ended: Ended) -> bool:
        """Begin to ask a peer something to which no bytes come. Return False if it cannot be asked.
        `ended` is called once.
        """
        if not self._transfer.takes_questions(peer):
            return False
        number = self._transfer.submit(TransferBatch(
            op=Op.READ, peer=peer, ops=[], deadline_s=deadline_s, question=question
        ))  # fmt: skip
        self._ended[number] = ended
        return True

    def write(self, places: Places, there: BlockPlaces, deadline_s: float, ended: Ended) -> int:
        """Begin to write blocks to places that a peer has granted; return a number for `cancel`.
        `ended` is called once.
        """
        return self._start(Op.WRITE, places, there, deadline_s, ended)

    def on_done(self, done: TransferDone, now: float) -> None:
        """Call the callback of a transfer that has ended."""
        ended = self._ended.pop(done.batch_id, None)
        if ended is not None:
            ended(done, now)

    def cancel(self, number: int) -> None:
        """Ask a transfer to stop. Its end is still reported."""
        self._transfer.cancel(number)

    def _start(
        self, op: Op, places: Places, there: BlockPlaces, deadline_s: float, ended: Ended
    ) -> int:
        number = self._transfer.submit(TransferBatch(
            op=op, peer=there.segment, ops=places.memory.ops(places.offsets, there),
            deadline_s=deadline_s, grant=there.grant if op is Op.WRITE else 0,
        ))  # fmt: skip
        self._ended[number] = ended
        return number

    def checksum(self, places: Places, index: int) -> int:
        return places.memory.checksum(places.offsets[index])


Where = Sequence[int] | Places
"""The places of blocks: byte offsets in a client's own memory, or places in registered memory."""
