"""The routed experts of one layer on one of the ranks that share them out: slots, and the table
that says which rank has which expert. When an expert has several slots, rows take them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mooncake.engine.expert_placement import Placement, first_placement
from mooncake.model.parallel.exchange import NOBODY, ExpertRanks, Rows

Computing = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes rows, given the slots of their experts and the weights of these."""


class Experts(Protocol):
    """Computes experts; see `mooncake_kernels.reference.experts`."""

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of an expert, to read and write."""


def slots_of(placement: Placement, rank: int, num_ranks: int) -> Sequence[int]:
    """Return the experts in the slots of one rank."""
    each = len(placement) // num_ranks
    return placement[rank * each : (rank + 1) * each]


class ExpertSlots:
    """The experts of a layer. This rank computes those in its slots."""

    def __init__(
        self,
        ranks: ExpertRanks,
        num_experts: int,
        num_slots: int,
        experts: Experts,
        computing: Computing | None = None,
        device: torch.device | None = None,
    ) -> None:
        """experts: those in this rank's slots, in order. computing: computes the value of these
        whose sum over ranks is wanted; None: `experts` itself. device: the device of the rows;
        None: the host.
        """
        self._ranks = ranks
        self._num_experts = num_experts
        self._experts = experts
        self._computing = computing or experts
        self.placement = first_placement(num_experts, num_slots)
        self._device = device
        self.counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        """The rows of each expert on all ranks since the counts were last set to zero. The last
        entry counts padding rows of exchanges, times choices. Padding rows of a captured step are
        computed like others, and counted like them.
        """
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        # Written anew where they lie: captured steps read them there.
        most = num_slots - num_experts + 1
        self._slots = torch.empty(num_experts + 1, most, dtype=torch.int64, device=device)
        self._num_slots = torch.empty(num_experts + 1, dtype=torch.int64, device=device)
        self._read()

    def place(self, placement: Placement) -> None:
        """Send rows by `placement` from now on. The slots must hold that placement on all ranks by
        now.
        """
        self.placement = placement
        self._read()

    def weights(self, slot: int) -> list[torch.Tensor]:
        """Return the tensors that hold the weights of one of this rank's slots, to read
        and write.
        """
        return self._experts.slot(slot)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return for each row what `computing` makes of its experts, [rows, ...]. When ranks with
        the same rows share the experts, this covers only this rank's experts. All ranks call this
        alike.
        """
        exchange, rows = self._ranks.exchange, Rows(x, experts, weights)
        if exchange is not None:
            rows = exchange.spread(rows)
        if not rows.x.shape[0]:
            return x
        known = rows.experts
        if exchange is not None:
            known = torch.where(known < 0, self._num_experts, known)
        self.counts.scatter_add_(0, known.flatten(), self._one.expand(known.numel()))
        made = self._computing(rows.x, self._slots_for(known), rows.weights)
        if exchange is None:
            return made
        return exchange.collect(made.flatten(1), len(x)).view(len(x), *made.shape[1:])

    def _slots_for(self, known: torch.Tensor) -> torch.Tensor:
        """Return this rank's slots of experts [rows, k], without reading any of their numbers on
        the host.
        """
        if self._slots.shape[1] == 1:
            return self._slots.view(-1)[known]
        turn = torch.arange(len(known), device=self._device)[:, None] % self._num_slots[known]
        return self._slots[known, turn]

    def _read(self) -> None:
        """Fill the tables: [experts + 1, most slots of one] -> slot of this rank, or `NOBODY`."""
        size, rank = self._ranks.all.size, self._ranks.all.rank
        each = len(self.placement) // size
        slots: list[list[int]] = [[] for _ in range(self._num_experts)]
        for slot, expert in enumerate(self.placement):
            slots[expert].append(slot % each if slot // each == rank else NOBODY)
        most = self._slots.shape[1]
        filled = [[*mine, *[NOBODY] * (most - len(mine))] for mine in (*slots, [NOBODY])]
        self._slots.copy_(torch.tensor(filled))
        self._num_slots.copy_(torch.tensor([*map(len, slots), 1]))
