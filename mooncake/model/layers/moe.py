"""The mixture-of-experts layer: router, routed experts, shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from mooncake_kernels.native.fixed import added, pieces
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.router import Routing

from mooncake.base import ModelSpec
from mooncake.model.backends import Backends
from mooncake.model.copies import Arriving, Copies
from mooncake.model.layers.expert_slots import ExpertSlots
from mooncake.model.layers.linear import GatedMlp
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.group import Group, Solo

BESIDE_ROWS = 256
"""Up to this many rows the shared expert runs beside the routed ones. Kernels with so few rows wait
for memory and for each other more than they compute; kernels with more rows fill a GPU alone.
"""


@dataclass(frozen=True)
class MoeWeights:
    """Weights of one layer.

    router: [experts, hidden], float32, or bfloat16 where `Backends.keeps_router`. router_bias:
    [experts], float32. experts: the tensors of the op `experts_op` ("experts", "experts_fp8",
    "experts_int4"), see its reference. Plain ones have the model's dtype. shared: None when the
    model has no shared expert.
    """

    router: torch.Tensor
    router_bias: torch.Tensor
    experts_op: str
    experts: tuple[torch.Tensor, ...]
    """When ranks share out the experts: those in this rank's slots, in order."""
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
    ) -> None:
        """group: the ranks that each have columns of every expert; None: this one has all. sharing:
        the ranks that each have some whole routed experts instead of columns. host: computes the
        routed experts; None: `backends` does, where the rest of the model is. slabs: how many slabs
        of an expert's inner columns this rank has, when sums are made of slabs; 0: they are not.
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
        self._experts, self.experts_by = computing.experts(weights.experts_op, *weights.experts)
        self._slabs = slabs
        self._routed = partial(self._experts.choices, slabs=slabs) if slabs else self._experts
        self.slots: ExpertSlots | None = None
        if sharing is not None:
            num_slots = sharing.all.size * len(weights.experts[0])
            self.slots = self._routed = ExpertSlots(
                sharing, spec.n_routed_experts, num_slots, self._experts, self._routed,
                weights.experts[0].device,
            )  # fmt: skip
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
