"""What stands for captured graphs, and keeps which were made and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mooncake.model.device.graphs import Replay


class Recorder:
    """Stands for CUDA graphs: one output tensor a graph, filled when it is replayed."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.guessed: list[int] = []
        """Replays of a layer that drafts: their output is tokens."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        out = step().clone()
        size = out.shape[0]
        self.captured.append(size)
        out.fill_(float("nan") if out.is_floating_point() else -1)
        replays = self.replayed if out.is_floating_point() else self.guessed

        def replay() -> torch.Tensor:
            replays.append(size)
            return out.copy_(step())

        return replay
