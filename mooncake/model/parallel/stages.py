"""One rank's place in a pipeline: its layers, what it gets from the stage before and gives to the
stage behind, and how long the slowest of them computed.

Ranks of a stage have the same activations: each sends its columns only, to the rank of the next
stage that has the same part of every layer, and there they are gathered.
"""

from __future__ import annotations

import time

import torch

from mooncake.base import Shape
from mooncake.base.parallel import stage_layers
from mooncake.model.parallel.group import Group


class Stage:
    """The stage of one rank, among all layers of a model."""

    def __init__(self, group: Group, shape: Shape, num_layers: int) -> None:
        """group: all ranks of the instance, from which those of each stage are taken."""
        number = shape.stage_of(group.rank)
        self.layers = stage_layers(num_layers, shape.pp)[number]
        self.is_first = number == 0
        self.is_last = number == shape.pp - 1
        self.ranks = group.part(shape.tp)
        """Those that share these layers."""
        self._all = group
        self._began_s = 0.0
        self._waited_s = 0.0
        self._slowest_s = 0.0

    def begin(self) -> None:
        """A step begins here, whose times are taken from now on."""
        self._began_s = time.perf_counter()
        self._waited_s = self._slowest_s = 0.0

    @property
    def slowest_s(self) -> float:
        """For how long the slowest of the stages so far computed this step, without waiting."""
        return max(self._slowest_s, time.perf_counter() - self._began_s - self._waited_s)

    def go_on(self) -> None:
        """Say that this rank has come to its next layer."""
        self._all.go_on()

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Return the activations of the next step, [rows, hidden] as `like`, from the stage before.

        Raises:
            GroupError: another rank failed.
        """
        width = self._columns(like)
        part = like.new_empty(like.shape[0], width)
        slowest_s = torch.empty(1, dtype=torch.float64)
        asked_s = time.perf_counter()
        self._all.receive(part, self._all.rank + self.ranks.size)
        self._all.receive(slowest_s, self._all.rank + self.ranks.size)
        self._waited_s = time.perf_counter() - asked_s
        self._slowest_s = slowest_s.item()
        return part if width == like.shape[1] else self.ranks.gather(part)

    def send(self, x: torch.Tensor) -> None:
        """Give activations, [rows, hidden], to the stage behind.

        Raises:
            GroupError: another rank failed.
        """
        width = self._columns(x)
        first = 0 if width == x.shape[1] else self.ranks.rank * width
        part = x[:, first : first + width].contiguous()
        self._all.send(part, self._all.rank - self.ranks.size)
        slowest_s = torch.tensor([self.slowest_s], dtype=torch.float64)
        self._all.send(slowest_s, self._all.rank - self.ranks.size)

    def _columns(self, x: torch.Tensor) -> int:
        """Return how many columns each rank sends: where they do not divide, all."""
        each, rest = divmod(x.shape[1], self.ranks.size)
        return x.shape[1] if rest else each
