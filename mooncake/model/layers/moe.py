"""The mixture-of-experts layer: router, routed experts, shared experts. The routed experts lie in
slots of the ranks that share them out, and a table says which rank has which expert. When an expert
has several slots, rows take them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from mooncake_kernels.native.fixed import added, pieces
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.router import Routing

from mooncake.base import ModelSpec
from mooncake.engine.expert_placement import Placement, first_placement
from mooncake.model.backends import Backends
from mooncake.model.copies import Arriving, Copies
from mooncake.model.layers.linear import GatedMlp
from mooncake.model.parallel.exchange import NOBODY, ExpertRanks, Rows
from mooncake.model.parallel.group import Group, Solo

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
    """Return the experts in the slots of one rank. There are none below rank 0."""
    each = len(placement) // num_ranks
    return placement[rank * each : (rank + 1) * each] if rank >= 0 else ()


class NoExperts:
    """Stands for the experts of a rank that holds none. Adds nothing to any row."""

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        del experts, weights
        return torch.zeros_like(x)

    def choices(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *, slabs: int
    ) -> torch.Tensor:
        """Return -0.0, [rows, k, hidden] float32, which changes no bit of a sum."""
        del weights, slabs
        return x.new_full((*experts.shape, x.shape[1]), -0.0, dtype=torch.float32)

    def slot(self, number: int) -> list[torch.Tensor]:
        raise AssertionError(f"this rank holds no experts, and has no slot {number}")


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
        rank = self._ranks.place
        each = len(self.placement) // self._ranks.num_holders
        slots: list[list[int]] = [[] for _ in range(self._num_experts)]
        for slot, expert in enumerate(self.placement):
            slots[expert].append(slot % each if slot // each == rank else NOBODY)
        most = self._slots.shape[1]
        filled = [[*mine, *[NOBODY] * (most - len(mine))] for mine in (*slots, [NOBODY])]
        self._slots.copy_(torch.tensor(filled))
        self._num_slots.copy_(torch.tensor([*map(len, slots), 1]))


BESIDE_ROWS = 256
"""Up to this many rows the shared expert runs beside the routed ones. Kernels with so few rows wait
for memory and for each other more than they compute; kernels with more rows fill a GPU alone.
"""


@dataclass(frozen=True)
class MoeWeights:
    """Weights of one layer.

    router: [experts, hidden], float32, or bfloat16 where `Backends.keeps_router`. router_bias:
    [experts], float32. A rank that has nothing but routed experts routes no rows: there both have
    no experts. experts: the tensors of the op `experts_op` ("experts", "experts_fp8",
    "experts_int4"), see its reference. Plain ones have the model's dtype. shared: None when the
    model has no shared expert, or this rank does not have it.
    """

    router: torch.Tensor
    router_bias: torch.Tensor
    experts_op: str
    experts: tuple[torch.Tensor, ...]
    """The experts in this rank's slots, in order; all experts if ranks do not share them out. No
    tensors: this rank holds none.
    """
    shared: GatedMlp | None


@dataclass(frozen=True)
class HostExperts:
    """Computes routed experts that lie in the host's memory, beside a model on a device."""

    backends: Backends
    copies: Copies
    """The copies between the host and the device."""


class Moe:
    """`x + shared(h) + sum of the chosen experts of h`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: MoeWeights,
        backends: Backends,
        group: Group | None = None,
        host: HostExperts | None = None,
        slabs: int = 0,
        sharing: ExpertRanks | None = None,
        num_slots: int = 0,
    ) -> None:
        """group: the ranks that each have columns of every expert; None: this one has all. sharing:
        the ranks that each have some whole routed experts instead of columns, in `num_slots` slots
        on all of them together. host: computes the routed experts; None: `backends` computes them
        on the model's device. slabs: the number of slabs of an expert's inner columns on this rank;
        0: sums are not made of slabs.
        """
        self._group = group or Solo()
        self._routing = Routing(
            top_k=spec.num_experts_per_tok,
            num_groups=spec.n_group,
            top_groups=spec.topk_group,
            normalize=spec.norm_topk_prob,
            scale=spec.routed_scaling_factor,
        )
        self._router = weights.router
        self._router_bias = weights.router_bias
        self._shared = weights.shared
        self._copies = None if host is None else host.copies
        computing = backends if host is None else host.backends
        self._experts, self.experts_by = NoExperts(), "other ranks"
        if weights.experts:
            self._experts, self.experts_by = computing.experts(weights.experts_op, *weights.experts)
        self._slabs = slabs
        self._routed: Computing = self._experts
        if slabs:
            self._routed = partial(self._experts.choices, slabs=slabs)
        self.slots: ExpertSlots | None = None
        if sharing is not None:
            where = weights.experts[0].device if weights.experts else weights.router.device
            self.slots = self._routed = ExpertSlots(
                sharing, spec.n_routed_experts, num_slots, self._experts, self._routed, where
            )
        self._route = backends.route
        self._side = backends.side

    def add(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return `to + moe(x)`; x and to: [rows, hidden]."""
        return self(x).add_(to)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `moe(x)`, [rows, hidden], the same on all ranks."""
        if self._slabs:
            return self._slabbed(x, self._chosen(x))
        if self._copies is not None:
            return self._apart(self._copies, x)
        if self._shared is None:
            return self._group.sum(self._chosen(x))
        if self._side is None or x.shape[0] > BESIDE_ROWS:
            return self._group.sum(self._shared.add(x, self._chosen(x)))
        # The same sums in the same order: `down` adds the shared expert's to the routed ones'.
        with self._side.beside(partial(self._shared.inner, x)) as inner:
            routed = self._chosen(x)
        return self._group.sum(self._shared.add_inner(inner, routed))

    def _chosen(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the chosen experts, or, with slabs, the result of each choice."""
        experts, weights = self._route(x, self._router, self._router_bias, self._routing)
        routed: torch.Tensor = self._routed(x, experts, weights)
        return routed

    def serve(self, x: torch.Tensor) -> None:
        """Compute experts for other ranks' rows, when this rank has none; x: [0, hidden]."""
        if self.slots is not None:
            none = torch.empty(0, self._routing.top_k, dtype=torch.int64, device=x.device)
            self._routed(x, none, none.float())

    def _slabbed(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return `moe(x)`, where `routed` is the result of each choice of a row, [rows, k, hidden].
        The ranks' parts of each choice are summed first, then the choices of a row, the shared
        expert last. So no sum depends on which rank has which expert.
        """
        sums = []
        for rows, parts in pieces(x, routed):
            own = parts
            if self._shared is not None:
                own = torch.cat((parts, added(self._shared.parts(rows))[:, None]), dim=1)
            sums.append(added(self._group.sum(own).unbind(1)))
        return torch.cat(sums).to(x.dtype)

    def prepare(self, rows: int, most_rows: int) -> None:
        """Let a library build its code for `add` with `rows` rows of an expert, and for the shared
        expert, in steps of at most `most_rows` rows; see `layers.linear.Product`.
        """
        if self._shared is not None:
            self._shared.prepare(rows)
        by_library = getattr(self._experts, "by_library", lambda _: None)(most_rows)
        if by_library is not None and rows <= onednn.MOST_ROWS_OF_PIECE:
            x = torch.zeros(rows, self._router.shape[1], dtype=torch.bfloat16)
            by_library(x, torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1))

    def _apart(self, copies: Copies, x: torch.Tensor) -> torch.Tensor:
        """Return `moe(x)`. The host computes the routed experts while the device computes the
        shared one.
        """
        of_routed = x, *self._route(x, self._router, self._router_bias, self._routing)
        coming: list[Arriving] = [copies.fetch(part) for part in of_routed]
        shared = None if self._shared is None else self._shared(x)
        routed: torch.Tensor = copies.send(self._routed(*(part.wait() for part in coming)))
        return self._group.sum(routed if shared is None else shared.add_(routed))
