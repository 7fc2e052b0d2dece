"""The states of the model that a layer that drafts reads, of the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ReadStates:
    """The inputs of some layers of the model, [rows, hidden] each. A forward pass gives them; where
    stages share the layers, they go on to the next stage with the activations.
    """

    def __init__(self, layers: tuple[int, ...], into: torch.Tensor | None = None) -> None:
        """layers: the layers whose inputs are read, in order; the number of layers stands for the
        output of the last one. into: [layers, rows, hidden], where they are written; None: they
        are kept as they come.
        """
        self.layers = layers
        self._into = into
        self.found: list[torch.Tensor] = []
        """What has come so far, in order."""

    def __call__(self, layer: int, states: torch.Tensor) -> None:
        """Keep the input of one of `layers`. It comes in order, and is not overwritten."""
        if self._into is None:
            self.found.append(states)
        else:
            self._into[self.layers.index(layer)].copy_(states)

    def take(self, states: Sequence[torch.Tensor]) -> None:
        """Keep what the stage before has found."""
        self.found += states

    def num_before(self, layer: int) -> int:
        """Return how many of the layers come before `layer`."""
        return sum(each < layer for each in self.layers)

    @property
    def rows(self) -> torch.Tensor:
        """The states [rows, read width], in the order of the step's rows."""
        return self.found[0] if len(self.found) == 1 else torch.cat(self.found, dim=-1)
