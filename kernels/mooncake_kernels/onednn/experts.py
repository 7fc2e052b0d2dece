"""Routed experts of bfloat16 on the CPU: one packed product for each expert that has tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.experts import gated
from torch.nn import functional


class PackedExperts:
    """Like `reference.experts.StackedExperts`, for bfloat16 only. Keeps packed copies of the
    weights.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = [onednn.pack(weight) for weight in gate_up]
        self._down = [onednn.pack(weight) for weight in down]

    @property
    def packed(self) -> list[torch.Tensor]:
        """Gate and up of each expert, then down of each."""
        return [*self._gate_up, *self._down]

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""
        return [onednn.memory_of(part[number]) for part in (self._gate_up, self._down)]

    def by_library(self, most_tokens: int) -> PackedExperts:
        """Return the implementation for the experts of any number of tokens: this one."""
        del most_tokens
        return self

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see the reference."""
        return by_expert(x, experts, weights, len(self._down), self._first, self._second)

    def _first(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return onednn.linear(x, self._gate_up[expert], None)

    def _second(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return onednn.linear(x, self._down[expert], None)


ExpertProduct = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, rows [rows, in]) -> [rows, out]"""


def by_expert(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    gate_up: ExpertProduct,
    down: ExpertProduct,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, with two products for each expert that has
    tokens.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    tokens, places, used, sizes = grouped(experts, num_experts)
    if not used:
        return torch.zeros_like(x)
    rows = torch.split(x.index_select(0, tokens), sizes)
    first = [gate_up(expert, part) for expert, part in zip(used, rows, strict=True)]
    inner = torch.split(gated(torch.cat(first)), sizes)
    second = [down(expert, part) for expert, part in zip(used, inner, strict=True)]
    second.append(x.new_zeros(1, x.shape[1]))
    return functional.embedding_bag(
        places, torch.cat(second), mode="sum", per_sample_weights=weights.to(x.dtype)
    )


def grouped(
    experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Return (tokens, places, used, sizes) of `experts` [tokens, k]: rows grouped by expert.

    Piece i holds `sizes[i]` rows, a number on oneDNN's ladder, of expert `used[i]`. tokens [rows]:
    the token of each row, 0 in padding rows. places [tokens, k]: the row of each choice; for an
    expert below 0, which another rank has, the row after all others. These are plain numbers,
    because for a decode step that takes less time than tensor operations.
    """
    num_choices = experts.shape[1]
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    for pair, expert in enumerate(experts.flatten().tolist()):
        if expert >= 0:
            groups[expert].append(pair)
    tokens: list[int] = []
    places = [-1] * experts.numel()
    used: list[int] = []
    sizes: list[int] = []
    for expert, pairs in enumerate(groups):
        for row, pair in enumerate(pairs, start=len(tokens)):
            places[pair] = row
        tokens += [pair // num_choices for pair in pairs]
        cut = onednn.pieces(len(pairs))
        tokens += [0] * (sum(cut) - len(pairs))
        used += [expert] * len(cut)
        sizes += cut
    places = [len(tokens) if place < 0 else place for place in places]
    return (
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(places).view_as(experts),
        used,
        sizes,
    )
