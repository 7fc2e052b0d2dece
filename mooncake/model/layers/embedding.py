"""Token embedding and the vocabulary head, which share one weight when they are tied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from mooncake.model.layers.linear import Linear
from mooncake.model.parallel.group import Group, Solo


class Embedding:
    """Rows of a table. weight: [vocab, hidden], or one rank's columns when a `group` has all of
    them.
    """

    def __init__(self, weight: torch.Tensor, group: Group | None = None) -> None:
        self.weight = weight
        self._group = group or Solo()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [rows, hidden] for `tokens` [rows] int64. Raises IndexError for an
        unknown token.
        """
        return self._group.gather(functional.embedding(tokens, self.weight))


class Head:
    """Logits over the vocabulary. weight: [vocab, hidden], or one rank's words of it when a `group`
    has all of them.

    A head tied to the embedding reads the embedding's own tensor, because packing would keep it
    twice.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        tied: bool,
        multiply: Callable[..., torch.Tensor] | None = None,
        group: Group | None = None,
        compiled: bool = False,
    ) -> None:
        """multiply, compiled: see `Linear`."""
        self._group = group or Solo()
        self._linear = None if tied else Linear(weight, multiply=multiply, compiled=compiled)
        self._tied_weight = weight if tied else None
        self._multiply = multiply or functional.linear

    def prepare(self, rows: int) -> None:
        """Let a library build its code for `rows` rows; see `layers.linear.Product`."""
        if self._linear is not None:
            self._linear.prepare(rows)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, vocab] float32 for `hidden` [rows, hidden], in `out` if it is given."""
        if self._linear is not None:
            sole = self._group.size == 1
            made = self._linear.wide(hidden) if sole else self._group.gather(self._linear(hidden))
        else:
            assert self._tied_weight is not None
            made = self._multiply(hidden, self._tied_weight)
        return made.float() if out is None else out.copy_(made)
