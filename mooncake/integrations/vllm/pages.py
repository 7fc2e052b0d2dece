"""The KV of a vLLM worker as bytes: blocks are copied between its tensors and staging memory.

Only the thread that runs the model calls this, so copies are in order with its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        self._numbers: dict[str, int] = {}
        said = []
        for name, tensor in kv_caches.items():
            same = [known.data_ptr() == tensor.data_ptr() for known in self._layers]
            self._numbers[name] = same.index(True) if any(same) else len(same)
            if any(same):
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
    def on_host(self) -> bool:
        """Whether the CPU computes them, so that a copy waits for no other device."""
        return all(layer.device.type == "cpu" for layer in self._layers)

    def number(self, name: str) -> int | None:
        """Return which tensor holds a layer's KV, or None if that layer keeps none."""
        return self._numbers.get(name)

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
        views, starts, start = [], [], 0
        for layer in self._layers:
            stop = start + _row_bytes(layer)
            if any(number % layer.element_size() for number in (start, slot_bytes)):
                raise ConfigError(
                    f"pool blocks of {slot_bytes} bytes do not hold whole elements of {layer.dtype}"
                )
            part = whole[:, :, start:stop].view(layer.dtype)
            views.append(part.view(-1, blocks, *layer.shape[1:]))
            starts.append(start if blocks == 1 else 0)
            start = stop
        return StagedPages(self._layers, views, [*starts, slot_bytes])


class StagedPages:
    """Copies blocks between pages and slots of staging memory."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        whole_before: Sequence[int],
    ) -> None:
        """`slots`: for each layer `[slots, blocks of a slot, ...]`. `whole_before`: how many bytes
        of a slot are there once it has all layers before the n-th; for the number of layers, all.
        """
        self._pairs = list(zip(layers, slots, strict=True))
        self.whole_before = whole_before

    @property
    def layers(self) -> range:
        """The numbers of all layers, in the order in which a block has them."""
        return range(len(self._pairs))

    def read(
        self, block_ids: Sequence[int], slots: Sequence[int], layers: Iterable[int] | None = None
    ) -> None:
        """Copy blocks out of the pages, slot after slot: these layers of them, or all."""
        blocks = torch.tensor(block_ids, dtype=torch.long).view(len(slots), -1)
        into = torch.tensor(slots, dtype=torch.long)
        for number in self.layers if layers is None else layers:
            layer, staging = self._pairs[number]
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
