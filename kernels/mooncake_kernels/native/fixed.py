"""Ops whose bits depend only on their own row. They do not depend on the batch, on threads, on how
heads, columns and experts are cut among ranks, or on how a prompt was cut. All sums are float32.

Sums over columns that ranks share out are made of slabs of columns, added by one tree: `added`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from mooncake_kernels.native.packed import at, function
from mooncake_kernels.reference import router
from mooncake_kernels.reference.paged import PagedSpan
from mooncake_kernels.reference.paged_batch import batch_of_spans
from mooncake_kernels.reference.router import Routing

PIECE_ROWS = 256
"""How many rows have their slabs in memory at a time."""


def product(x: torch.Tensor, weight: torch.Tensor, slabs: int = 1) -> torch.Tensor:
    """Return `x @ weight.T` in float32, with each slab of the columns separate: [slabs, rows, out].

    x: [rows, in]; weight: [out, in], float32 or bfloat16 (other dtypes are widened). Both may be
    [num, ...]; then the result is too.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    weight, x = weight.contiguous(), x.float().contiguous()
    (*lead, rows, ins), outs = x.shape, weight.shape[-2]
    assert ins % slabs == 0
    to = x.new_empty(*lead, slabs, rows, outs)
    if to.numel():
        function("fixed_product")(
            at(x), rows, at(weight), int(weight.dtype == torch.bfloat16), outs, ins, slabs,
            lead[0] if lead else 1, at(to), torch.get_num_threads(),
        )  # fmt: skip
    return to


def pieces(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield the rows in pieces whose slabs may all be in memory. Without slabs there is
    one piece.
    """
    for first in range(0, max(1, tensors[0].shape[0]), PIECE_ROWS):
        yield [each[first : first + PIECE_ROWS] for each in tensors]


def added(parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return the sum of parts: neighbours first, then neighbouring sums. For 2, 4, 8 or 16 parts
    this equals the sums of both halves, added.
    """
    left: list[torch.Tensor] = list(parts)
    while len(left) > 1:
        pairs = [one + other for one, other in zip(left[::2], left[1::2], strict=False)]
        left = pairs + left[len(left) & ~1 :]
    [whole] = left
    return whole


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Like the reference, rounded once."""
    made = product(x, weight)[0]
    return (made if bias is None else made.add_(bias)).to(x.dtype)


def linear_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Like the reference."""
    return product(x.transpose(0, 1), weight)[:, 0].transpose(0, 1).to(x.dtype)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Like `reference.experts.gated`, rounded once."""
    gate, up = (half.float().contiguous() for half in gate_up.chunk(2, dim=-1))
    return (_sigmoid(gate, gate) * up).to(gate_up.dtype)


def choose(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like the reference."""
    return router.choose_scored(_sigmoid(logits.contiguous()), bias, routing)


def mla_absorbed(
    q: torch.Tensor, kv: torch.Tensor, spans: Sequence[PagedSpan], rank: int
) -> torch.Tensor:
    """Like the reference, rounded once."""
    rows, heads, width = q.shape
    batch = batch_of_spans(spans, q.device)
    table = batch.page_table
    if kv.dtype not in (torch.float32, torch.bfloat16):
        used, table = torch.unique(table, return_inverse=True)
        # Some versions of torch cannot move e4m3 by index.
        kv = kv.view(torch.uint8).index_select(0, used).view(kv.dtype).float()
        table = table.to(torch.int32)
    wide, kv, table = q.float().contiguous(), kv.contiguous(), table.contiguous()
    out = wide.new_empty(rows, heads, rank)
    function("fixed_attention")(
        at(wide), at(kv), int(kv.dtype == torch.bfloat16), at(batch.row_start), at(batch.lengths),
        at(table), batch.num_sequences, table.shape[1], heads, kv.shape[1], width, rank, at(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out.to(q.dtype)


class StackedExperts:
    """Like the reference, with weights that stay unchanged."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = gate_up
        self._down = down

    def slot(self, number: int) -> list[torch.Tensor]:
        """Like the reference."""
        return [self._gate_up[number], self._down[number]]

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Like the reference, rounded once."""
        made = [
            added(self.choices(*of_rows, slabs=1).unbind(1))
            for of_rows in pieces(x, experts, weights)
        ]
        return torch.cat(made).to(x.dtype)

    def choices(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *, slabs: int
    ) -> torch.Tensor:
        """Return each expert's contribution to a token, [tokens, k, hidden] float32: its output
        times its weight, summed by slabs of its inner columns. For an expert of another rank it is
        -0.0, which changes no bit of a sum.
        """
        sorted_experts, pairs = experts.flatten().sort(stable=True)
        chosen, counts = torch.unique_consecutive(sorted_experts, return_counts=True)
        made = torch.full((pairs.numel(), x.shape[1]), -0.0)
        share = weights.flatten()
        of_experts = zip(chosen.tolist(), torch.split(pairs, counts.tolist()), strict=True)
        for expert, own in of_experts:
            if expert >= 0:
                tokens = own // experts.shape[1]
                inner = gated(product(x.index_select(0, tokens), self._gate_up[expert])[0])
                made[own] = added(product(inner, self._down[expert], slabs).mul_(share[own, None]))
        return made.view(*experts.shape, x.shape[1])


def _sigmoid(x: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    """Return sigmoid(x) in float32, times `by`; both contiguous."""
    to = torch.empty_like(x)
    function("fixed_sigmoid")(
        at(x), None if by is None else at(by), ctypes.c_int64(x.numel()), at(to)
    )
    return to
