"""The memory layout of a block's KV in every tier: the only place that computes byte offsets.

A block has one *slice* per layer; a slice is `[block_tokens, kv_width]`, contiguous. Engine pages
keep all blocks of a layer together (`[layers, pages, block_tokens, width]`, once for each rank that
has pages of its own), the pool keeps all layers of a block together (`[layers, block_tokens,
width]`). One offset and one layer stride describe both, so a copy works the same for both.

The ranks of an instance may each hold all pages (latent KV has one head, which cannot be cut), only
the pages of one home (decode context parallel), or only some layers (pipelines). The ranks of the
peer may do this in another way. The two lists of parts (`KvPart`) are enough to copy every slice
once (`reshard`). Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from mooncake.base.models.model_spec import ModelSpec

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the latent KV (MLA) of one model on one rank."""

    num_layers: int
    block_tokens: int
    kv_width: int
    dtype: str
    fingerprint: str
    """The hash of the model revision, the weights and this layout. It is the root of every block
    key, and peers compare it at every handshake.
    """

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.block_tokens * self.kv_width * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.slice_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.block_bytes // self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens (the last may be partial)."""
        return -(-num_tokens // self.block_tokens)

    @classmethod
    def for_model(
        cls,
        spec: ModelSpec,
        *,
        block_tokens: int,
        dtype: str,
        weights_revision: str,
        with_mtp: bool = False,
    ) -> KvLayout:
        """Return the layout of `spec` with KV in `dtype`; `weights_revision` names the weights.

        with_mtp: the KV of the first MTP layer follows that of the model's layers.
        """
        num_layers = spec.num_hidden_layers + with_mtp
        parts = [
            "v1", weights_revision, dtype, str(block_tokens), str(num_layers),
            str(spec.kv_lora_rank), str(spec.qk_rope_head_dim), str(spec.rope_interleave),
        ]  # fmt: skip
        fingerprint = hashlib.blake2b("|".join(parts).encode(), digest_size=12).hexdigest()
        return cls(
            num_layers=num_layers,
            block_tokens=block_tokens,
            kv_width=spec.kv_width,
            dtype=dtype,
            fingerprint=fingerprint,
        )


class SegmentRef(msgspec.Struct, frozen=True, array_like=True):
    """The registered memory of one process *and boot*: a restart gets a new `engine_id`."""

    engine_id: str
    endpoints: dict[str, str]
    """Protocol -> address, e.g. {"tcp": "127.0.0.1:4301"}; the reader chooses."""
    host: str
    """Two processes with the same host may use same-host protocols."""


class BlockPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks lie in one region. In the n-th layer stored there (from 0), the slice of block
    `i` starts at byte `offsets[i] + n * layer_stride`.
    """

    segment: SegmentRef
    region: int
    layer_stride: int
    offsets: list[int]
    grant: int = 0
    """The grant that allows peers to write to these blocks; 0: peers only read them."""


class PageArray(msgspec.Struct, frozen=True):
    """The pages of an engine that lie in one region: `[homes, layers, pages of a home, tokens,
    width]`.

    Ranks may share out the pages among them. A page's *home* says which ranks hold it: the first
    `num_pages / num_homes` pages have home 0, and so on. A page keeps its number wherever it lies,
    so the first page of an array with one home may have a number other than 0.
    """

    layout: KvLayout
    num_pages: int
    """The number of pages of the engine, in all homes."""
    num_homes: int = 1
    home: int | None = None
    """The only home whose pages this region holds; None: it holds all homes."""
    first_layer: int = 0
    stop_layer: int | None = None
    """This region holds the layers from `first_layer` up to but without this one; None: all the
    rest.
    """

    @property
    def layers(self) -> range:
        """The layers of the model that this region holds."""
        stop = self.layout.num_layers if self.stop_layer is None else self.stop_layer
        return range(self.first_layer, stop)

    @property
    def num_bytes(self) -> int:
        return self.num_homes_here * self.home_bytes

    @property
    def home_bytes(self) -> int:
        """The size in bytes of the pages of one home."""
        return len(self.layers) * self.layer_stride

    @property
    def num_homes_here(self) -> int:
        return self.num_homes if self.home is None else 1

    @property
    def pages_of_home(self) -> int:
        return self.num_pages // self.num_homes

    @property
    def layer_stride(self) -> int:
        """The number of bytes from a page's slice to its slice in the next layer."""
        return self.pages_of_home * self.layout.slice_bytes

    def of_rank(self, rank: int, layers: range | None = None) -> PageArray:
        """Return the part of this array that `rank` holds in a memory of its own. This array
        describes the pages of all ranks; neighbouring ranks hold different homes.

        layers: the layers of the rank's stage; None: all.
        """
        layers = layers or self.layers
        return msgspec.structs.replace(
            self, home=rank % self.num_homes, first_layer=layers.start, stop_layer=layers.stop
        )

    def holds(self, page: int) -> bool:
        """Whether this region holds a page of the engine."""
        return self.home is None or page // self.pages_of_home == self.home

    def offset(self, page: int) -> int:
        """Return the byte at which the first slice of a page begins. This region must hold the
        page.
        """
        home, within = divmod(page, self.pages_of_home)
        before = home if self.home is None else 0
        return before * self.home_bytes + within * self.layout.slice_bytes

    def places(
        self, segment: SegmentRef, region: int, pages: Sequence[int], grant: int = 0
    ) -> BlockPlaces:
        """Return where `pages` lie, for peers that read or write them."""
        offsets = [self.offset(page) for page in pages]
        return BlockPlaces(segment, region, self.layer_stride, offsets, grant)


class Home(msgspec.Struct, frozen=True):
    """Which pages of an engine a rank holds. The pages are cut in order into `num_homes` equal
    shares; the rank holds the share with the number `home`.
    """

    home: int
    num_homes: int


ALL_PAGES = Home(0, 1)


def packed_places(
    layout: KvLayout, segment: SegmentRef, region: int, offsets: list[int], grant: int = 0
) -> BlockPlaces:
    """Return the places of whole blocks that start at the byte `offsets` of a pool region."""
    return BlockPlaces(segment, region, layout.slice_bytes, offsets, grant)


class KvPart(msgspec.Struct, frozen=True, array_like=True):
    """Some layers of some blocks of a sequence, in the memory of one process.

    Raises:
        ValueError: there is not one place for each block, or no layer.
    """

    places: BlockPlaces
    indexes: list[int]
    """Positions in the sequence of the blocks in `places`."""
    first_layer: int
    """The first layer that lies at `places`; the offsets there are those of its slices."""
    stop_layer: int

    def __post_init__(self) -> None:
        if len(self.indexes) != len(self.places.offsets):
            raise ValueError(f"{len(self.places.offsets)} places for {len(self.indexes)} blocks")
        if not 0 <= self.first_layer < self.stop_layer:
            raise ValueError(f"no layers from {self.first_layer} to {self.stop_layer}")


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Slices that one rank copies between pages of its own and a peer's memory."""

    rank: int
    pages: list[int]
    there: BlockPlaces
    """Where the slices of `first_layer` begin, page by page."""
    first_layer: int
    stop_layer: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.stop_layer)


def part_of(
    array: PageArray,
    segment: SegmentRef,
    region: int,
    pages: Sequence[int],
    first_index: int,
    grant: int = 0,
) -> KvPart:
    """Return the part of a sequence's blocks that `array` holds in `region`.

    pages: the pages of the sequence's blocks, from the block `first_index` on. grant: allows peers
    to write to them.
    """
    held = [number for number, page in enumerate(pages) if array.holds(page)]
    places = array.places(segment, region, [pages[number] for number in held], grant)
    indexes = [first_index + number for number in held]
    return KvPart(places, indexes, array.layers.start, array.layers.stop)


def reshard(
    mine: Sequence[PageArray], theirs: Sequence[KvPart], pages: Mapping[int, int], layers: range
) -> list[Move]:
    """Return what each rank of an instance writes so that every part of `theirs` gets its share of
    `layers` of the blocks in `pages` (index -> page). Each slice is written once, by a rank that
    holds it; ranks that hold the same slices take turns by block.

    mine: what the memory of each rank holds.
    """
    holders: dict[tuple[int | None, int, int], list[int]] = {}
    for rank, array in enumerate(mine):
        span = array.layers
        holders.setdefault((array.home, span.start, span.stop), []).append(rank)
    moves: dict[tuple[int, int, int, int], Move] = {}
    for number, part in enumerate(theirs):
        stride = part.places.layer_stride
        for (_, start, stop), ranks in holders.items():
            first = max(start, part.first_layer, layers.start)
            last = min(stop, part.stop_layer, layers.stop)
            if first >= last:
                continue
            before = (first - part.first_layer) * stride
            of_home = mine[ranks[0]]
            for index, offset in zip(part.indexes, part.places.offsets, strict=True):
                page = pages.get(index)
                if page is None or not of_home.holds(page):
                    continue
                rank = ranks[index % len(ranks)]
                move = moves.get((rank, number, first, last))
                if move is None:
                    there = msgspec.structs.replace(part.places, offsets=[])
                    move = moves[rank, number, first, last] = Move(rank, [], there, first, last)
                move.pages.append(page)
                move.there.offsets.append(offset + before)
    return list(moves.values())


def copies(mine: Sequence[PageArray], pages: Sequence[int], there: BlockPlaces) -> list[Move]:
    """Return what each rank reads so that every memory gets its part of the blocks at `there`.
    These are whole blocks and go to `pages` in this order. When several ranks hold copies of a
    page, each of them reads it.
    """
    moves = []
    for rank, array in enumerate(mine):
        before = array.first_layer * there.layer_stride
        held = [
            (page, offset + before)
            for page, offset in zip(pages, there.offsets, strict=False)
            if array.holds(page)
        ]
        if held:
            offsets = [offset for _, offset in held]
            places = msgspec.structs.replace(there, offsets=offsets)
            span = array.layers
            moves.append(Move(rank, [page for page, _ in held], places, span.start, span.stop))
    return moves
