"""The memory layout of a block's KV in every tier: the only place that computes byte offsets.

A block has one *slice* per layer; a slice is `[block_tokens, kv_width]`, contiguous. Engine pages
keep all blocks of a layer together (`[layers, pages, block_tokens, width]`, once for each rank that
has pages of its own), the pool keeps all layers of a block together (`[layers, block_tokens,
width]`). One offset and one layer stride describe both, so a copy works the same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from mooncake.base.model_spec import ModelSpec

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
