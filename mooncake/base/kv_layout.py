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
    """Names model revision, weights and this layout. It is the root of every block key, and
    compared at every handshake.
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

        with_mtp: behind the model's layers lies the KV of its first MTP layer.
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
    """Two processes with equal hosts may use same-host protocols."""


class BlockPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Blocks in one region: the slice of the layer `n` layers after the first that lies there of
    block `i` starts at `offsets[i] + n * layer_stride`.
    """

    segment: SegmentRef
    region: int
    layer_stride: int
    offsets: list[int]
    grant: int = 0
    """By which they may be written to; 0: they are to be read."""


class PageArray(msgspec.Struct, frozen=True):
    """The pages of an engine that lie in one region: `[homes, layers, pages of a home, tokens,
    width]`.

    A page's *home* says which ranks hold it where ranks share the pages out: the first
    `num_pages / num_homes` pages lie with the first, and so on. Pages keep their numbers wherever
    they lie: of an array that holds one home the first page need not be 0.
    """

    layout: KvLayout
    num_pages: int
    """Of the engine, in all homes."""
    num_homes: int = 1
    home: int | None = None
    """The only one that this region holds; None: it holds all."""
    first_layer: int = 0
    stop_layer: int | None = None
    """Layers from `first_layer` to the one before this lie here; None: to the last."""

    @property
    def layers(self) -> range:
        """The layers of the model that lie here."""
        stop = self.layout.num_layers if self.stop_layer is None else self.stop_layer
        return range(self.first_layer, stop)

    @property
    def num_bytes(self) -> int:
        return self.num_homes_here * self.home_bytes

    @property
    def home_bytes(self) -> int:
        """Bytes of the pages of one home."""
        return len(self.layers) * self.layer_stride

    @property
    def num_homes_here(self) -> int:
        return self.num_homes if self.home is None else 1

    @property
    def pages_of_home(self) -> int:
        return self.num_pages // self.num_homes

    @property
    def layer_stride(self) -> int:
        """Bytes from a page's slice to that of the next layer."""
        return self.pages_of_home * self.layout.slice_bytes

    def of_rank(self, rank: int, layers: range | None = None) -> PageArray:
        """Return what `rank` holds in a memory of its own, where this is what all ranks hold:
        neighbours are at different homes. `layers`: those of its stage; None: all.
        """
        layers = layers or self.layers
        return msgspec.structs.replace(
            self, home=rank % self.num_homes, first_layer=layers.start, stop_layer=layers.stop
        )

    def holds(self, page: int) -> bool:
        """Whether a page of the engine lies here."""
        return self.home is None or page // self.pages_of_home == self.home

    def offset(self, page: int) -> int:
        """Return the byte at which the first slice of a page begins that lies here."""
        home, within = divmod(page, self.pages_of_home)
        before = home if self.home is None else 0
        return before * self.home_bytes + within * self.layout.slice_bytes

    def places(
        self, segment: SegmentRef, region: int, pages: Sequence[int], grant: int = 0
    ) -> BlockPlaces:
        """Return the places of `pages` for peers."""
        offsets = [self.offset(page) for page in pages]
        return BlockPlaces(segment, region, self.layer_stride, offsets, grant)


class Home(msgspec.Struct, frozen=True):
    """Which pages of an engine a rank holds: of `num_homes` equal shares, in order, the share
    `home`.
    """

    home: int
    num_homes: int


ALL_PAGES = Home(0, 1)


def packed_places(
    layout: KvLayout, segment: SegmentRef, region: int, offsets: list[int], grant: int = 0
) -> BlockPlaces:
    """Return the places of whole blocks that start at the byte `offsets` of a pool region."""
    return BlockPlaces(segment, region, layout.slice_bytes, offsets, grant)
