"""The checksum of a block. With it, everything that moves or keeps a block can detect that its
bytes changed.

It is the sum of the slices' xxh3-64, each seeded with its layer, modulo 2^64. So memories that hold
some layers of a block each compute a part of its checksum, wherever the cuts are, and the parts are
added. It protects against accidents, not attackers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from mooncake.base import KvLayout

_MODULUS = 1 << 64


def checksum_of(data: memoryview | bytes, layout: KvLayout, first_layer: int = 0) -> int:
    """Return the part of a block's checksum that its slices in `data` contribute. The slices lie
    one after another, from `first_layer` on. The result is the block's checksum if `data` has all
    slices.
    """
    view, size, total = memoryview(data), layout.slice_bytes, 0
    for layer, start in enumerate(range(0, len(view), size), first_layer):
        total += xxhash.xxh3_64_intdigest(view[start : start + size], layer)
    return total % _MODULUS


def added(parts: Iterable[int]) -> int:
    """Return the checksum of a block from parts that together have every layer once."""
    return sum(parts) % _MODULUS
