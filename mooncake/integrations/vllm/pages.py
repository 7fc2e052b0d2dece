"""The KV of a vLLM worker as bytes: blocks are copied between its tensors and staging memory.

Only the thread that runs the model calls this, so copies are in order with its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from mooncake.base import ConfigError


class Pages:
    """The tensors of all layers, each `[blocks, ...]`."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Use these tensors. Raises ConfigError if a tensor does not have one row for each
        block.
        """
        self._layers: list[torch.Tensor] = []
        said = []
        for name, tensor in kv_caches.items():
            if any(tensor.data_ptr() == known.data_ptr() for known in self._layers):
                continue  # a layer that shares another's KV
            if tensor.shape[0] % num_blocks:
                raise ConfigError(
                    f"KV of {name} has the shape {tuple(tensor.shape)}, which is not one row for "
                    f"each of {num_blocks} blocks: this connector cannot share it"
                )
            self._layers.append(tensor.view(num_blocks, -1, *tensor.shape[1:]))
            said.append(f"{name} {tuple(self._layers[-1].shape[1:])} {tensor.dtype}")
        if not self._layers:
            raise ConfigError(
                "this engine has no KV to share; serve this model without --kv-transfer-config"
            )
        self.described = "; ".join(said)
        """What the bytes of a block mean, as far as the tensors tell."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(_row_bytes(layer) for layer in self._layers)

    def staged(self, memory: memoryview, slot_bytes: int, blocks: int) -> StagedPages:
        """Return these pages with staging memory: slots of `slot_bytes`, for `blocks` blocks each.
        Raises ConfigError when the slots do not hold whole elements.
        """
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(-1, slot_bytes)
        whole = slots[:, : blocks * self.block_bytes].view(-1, blocks, self.block_bytes)
        views, start = [], 0
        for layer in self._layers:
            stop = start + _row_bytes(layer)
            if any(number % layer.element_size() for number in (start, slot_bytes)):
                raise ConfigError(
                    f"pool blocks of {slot_bytes} bytes do not hold whole elements of {layer.dtype}"
                )
            part = whole[:, :, start:stop].view(layer.dtype)
            views.append(part.view(-1, blocks, *layer.shape[1:]))
            start = stop
        return StagedPages(self._layers, views)


class StagedPages:
    """Copies blocks between pages and slots of staging memory."""

    def __init__(self, layers: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """`slots`: for each layer `[slots, blocks of a slot, ...]`."""
        self._pairs = list(zip(layers, slots, strict=True))

    def read(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks out of the pages, slot after slot."""
        blocks = torch.tensor(block_ids, dtype=torch.long).view(len(slots), -1)
        into = torch.tensor(slots, dtype=torch.long)
        for layer, staging in self._pairs:
            staging[into] = layer[blocks.to(layer.device)].to(staging.device)

    def write(self, block_ids: Sequence[int], slots: Sequence[int], num_skipped: int = 0) -> None:
        """Copy blocks of these slots into the pages; the first `num_skipped` are left out."""
        blocks = torch.tensor(block_ids, dtype=torch.long)
        source = torch.tensor(slots, dtype=torch.long)
        for layer, staging in self._pairs:
            found = staging[source].flatten(0, 1)[num_skipped:]
            layer[blocks.to(layer.device)] = found.to(layer.device)


def _row_bytes(layer: torch.Tensor) -> int:
    return prod(layer.shape[1:]) * layer.element_size()
