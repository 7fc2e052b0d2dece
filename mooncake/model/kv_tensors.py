"""The engine's KV pages as tensors: a view of registered memory, never a copy of it.

The engine decides which page belongs to whom. A row is `[normed latent | rotated key part]`. The
key part keeps the order of `kv_a_proj_with_mqa`'s output (see `mooncake_kernels.reference.rope`),
so blocks may travel between engines.
"""

from __future__ import annotations

import torch

from mooncake.base import DTYPE_BYTES, ConfigError, KvLayout, PageArray
from mooncake.base.kv_layout import ALL_PAGES, Home
from mooncake.model.checkpoint.quant import FP8_MAX

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
"""e4m3 pages hold the numbers themselves, clamped to +-448. A normed latent is far below that."""


class KvTensors:
    """Latent KV of `num_pages` pages: one `[num_pages, block_tokens, kv_width]` tensor for each
    layer.

    Where ranks share out the pages of an engine, these are one rank's pages, and `home` says which.
    In a stage's own memory they begin with its first layer.
    """

    def __init__(
        self, layout: KvLayout, pages: torch.Tensor, home: Home = ALL_PAGES, first_layer: int = 0
    ) -> None:
        """Use `view` or `allocate`."""
        self.layout = layout
        self.home = home
        self.first_layer = first_layer
        self.pages = pages
        self.layers = list(pages.unbind(0))
        self._rows = [layer.view(-1, layout.kv_width) for layer in self.layers]

    @classmethod
    def view(cls, pages: PageArray, buffer: memoryview, home: int = 0) -> KvTensors:
        """Return the pages of `home` among `pages`, which lie at the start of `buffer` (a transfer
        region's memory). When `pages` has only one home, return those.

        Raises:
            ConfigError: the buffer is too small, or KV cannot be kept in the dtype.
        """
        layout, each = pages.layout, pages.pages_of_home
        dtype = _dtype(layout)
        shape = (len(pages.layers), each, layout.block_tokens, layout.kv_width)
        if buffer.nbytes < pages.num_bytes:
            raise ConfigError(
                f"{pages.num_pages} KV pages need {pages.num_bytes} bytes, have {buffer.nbytes}"
            )
        before = home * pages.home_bytes
        if pages.home is not None:
            home, before = pages.home, 0
        count = pages.home_bytes // DTYPE_BYTES[layout.dtype]
        found = torch.frombuffer(buffer, dtype=dtype, count=count, offset=before)
        return cls(layout, found.view(shape), Home(home, pages.num_homes), pages.first_layer)

    @classmethod
    def allocate(
        cls,
        layout: KvLayout,
        num_pages: int,
        device: torch.device,
        home: Home = ALL_PAGES,
        layers: range | None = None,
    ) -> KvTensors:
        """Return zeroed pages of `home` and of `layers` (None: all) in `device` memory."""
        layers = layers or range(layout.num_layers)
        shape = (len(layers), num_pages, layout.block_tokens, layout.kv_width)
        dtype = _dtype(layout)
        zeros = torch.zeros(*shape[:3], shape[3] * dtype.itemsize, dtype=torch.uint8, device=device)
        return cls(layout, zeros.view(dtype), home, layers.start)

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    @property
    def page_shape(self) -> torch.Size:
        """The shape of one layer's pages, `[num_pages, block_tokens, kv_width]`."""
        return self.layers[0].shape

    def of_layer(self, layer: int) -> torch.Tensor:
        """Return the pages of a layer of the model, in `page_shape`."""
        return self.layers[layer - self.first_layer]

    def write(self, layer: int, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows` [tokens, kv_width] at `places` [tokens] (page * block_tokens + offset). Rows
        with a negative place are skipped.
        """
        held, used = self._rows[layer - self.first_layer], places >= 0
        if not bool(used.all()):
            places, rows = places[used], rows[used]
        if self.pages.dtype == torch.float8_e4m3fn:
            written = rows.float().clamp_(-FP8_MAX, FP8_MAX).to(self.pages.dtype)
            held.view(torch.uint8).index_copy_(0, places, written.view(torch.uint8))
        else:
            held.index_copy_(0, places, rows.to(self.pages.dtype))


def _dtype(layout: KvLayout) -> torch.dtype:
    if layout.dtype not in _DTYPES:
        raise ConfigError(f"kv dtype {layout.dtype!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[layout.dtype]
