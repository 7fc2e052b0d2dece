"""The saves of one step. Only the thread that runs the model calls this."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.integrations.vllm.mover import Mover
from mooncake.integrations.vllm.pages import StagedPages
from mooncake.integrations.vllm.plan import Save


class StepSaves:
    """Copies the chunks that a step completes, layer by layer or at the step's end. What is whole
    goes to the pool while later layers are computed.
    """

    def __init__(self, mover: Mover, pages: StagedPages, saves: Sequence[Save]) -> None:
        self._mover = mover
        self._pages = pages
        self._begun = [begun for save in saves if (begun := mover.begin_save(save)) is not None]
        self._left = list(pages.layers)
        """Layers that were not copied yet."""

    def copy(self, layer: int) -> None:
        """Copy a layer, after the step has computed it."""
        if layer in self._left:
            self._copy([layer])

    def end(self) -> None:
        """Copy the layers that were not copied yet: the step is over."""
        self._copy(list(self._left))

    def _copy(self, layers: Sequence[int]) -> None:
        self._left = [layer for layer in self._left if layer not in layers]
        num_bytes = self._pages.whole_before[min(self._left, default=len(self._pages.layers))]
        for save in self._begun:
            self._pages.read(save.block_ids, save.slots, layers)
            self._mover.give(save, num_bytes)
