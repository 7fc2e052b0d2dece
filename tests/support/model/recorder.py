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

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        out = step().clone()
        size = out.shape[0]
        self.captured.append(size)
        out.fill_(float("nan"))

        def replay() -> torch.Tensor:
            self.replayed.append(size)
            return out.copy_(step())

        return replay
