"""Checksums of blocks in this instance's pages, for comparing with what a pool promised.

Reads the pages' memory, also that of a device (some 0.1 ms a MiB, about what hashing it takes);
decides nothing.
"""

from __future__ import annotations

import xxhash

from mooncake.base.kv_layout import KvLayout
from mooncake.transfer.engine import Region


class PageChecksums:
    """Hashes pages of a `[layers, pages, block_tokens, width]` region."""

    def __init__(self, layout: KvLayout, pages: Region, num_pages: int) -> None:
        self._pages = pages
        self._slice_bytes = layout.slice_bytes
        self._layer_stride = num_pages * layout.slice_bytes
        self._num_layers = layout.num_layers

    def checksum(self, page: int) -> int:
        """Return the xxh3-64 of a page's slices, layer after layer: that of the pool's block."""
        digest = xxhash.xxh3_64()
        start = page * self._slice_bytes
        slices = [
            (start + layer * self._layer_stride, self._slice_bytes)
            for layer in range(self._num_layers)
        ]
        for part in self._pages.read(slices):
            digest.update(part)
        return digest.intdigest()
