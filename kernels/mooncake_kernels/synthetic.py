"""Random, seeded inputs of the kernels' shapes, for checks, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake_kernels.reference.paged_batch import PagedBatch

Tensors = tuple[torch.Tensor, ...]

_FP8_SCALE = 40.0
"""Above 464 a number becomes NaN in e4m3. Of the 700 million weights of a rank some are six times
as large as this.
"""


class Maker:
    """Makes seeded tensors on one device; the same calls give the same tensors."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> torch.Tensor:
        """Return normally distributed numbers times `scale`."""
        made = torch.empty(shape, dtype=torch.float32, device=self._device)
        return made.normal_(generator=self._generator).mul_(scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int64 from `low` to `high - 1`."""
        return torch.randint(low, high, shape, generator=self._generator, device=self._device)

    def routing(self, tokens: int, num_experts: int, top_k: int) -> Tensors:
        """Return (experts [tokens, top_k] int64, distinct in a row; weights float32)."""
        scores = self.normal(tokens, num_experts, dtype=torch.float32)
        best = scores.topk(top_k, dim=-1)
        return best.indices, torch.softmax(best.values, dim=-1)

    def experts(self, kind: str, num_experts: int, inner: int, hidden: int) -> Tensors:
        """Return the tensors from which the experts of `kind` ("plain", "fp8", "int4") are made."""
        if kind == "plain":
            gate_up = self._stack(num_experts, 2 * inner, hidden, hidden**-0.5)
            return gate_up, self._stack(num_experts, hidden, inner, inner**-0.5)
        if kind == "fp8":
            first = self._fp8((num_experts, 2, inner, hidden))
            return *first, *self._fp8((num_experts, hidden, inner))
        first = self._int4((num_experts, 2, inner, hidden))
        return *first, *self._int4((num_experts, hidden, inner))

    def _stack(self, count: int, rows: int, columns: int, scale: float) -> torch.Tensor:
        out = torch.empty(count, rows, columns, dtype=torch.bfloat16, device=self._device)
        for matrix in out:  # one at a time: the float32 of all of them would not fit
            matrix.copy_(self.normal(rows, columns, scale=scale))
        return out

    def _fp8(self, shape: tuple[int, ...]) -> Tensors:
        *lead, rows, columns = shape
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self._device)
        for matrix in values.flatten(0, -3):
            matrix.copy_(self.normal(rows, columns, dtype=torch.float32, scale=_FP8_SCALE))
        grid = *lead, -(-rows // 128), -(-columns // 128)
        factors = self.normal(*grid, dtype=torch.float32).abs_().mul_(0.2).add_(1.0)
        return values, factors.mul_(columns**-0.5 / _FP8_SCALE)

    def _int4(self, shape: tuple[int, ...]) -> Tensors:
        *lead, columns = shape
        words = self.integers(-(2**31), 2**31, *lead, columns // 8).to(torch.int32)
        scales = self.normal(*lead, columns // 32).abs_().mul_(0.2).add_(1.0)
        return words, scales.mul_(columns**-0.5 / 5)

    def paged(
        self, lengths: list[int], rows: int, width: int, block_tokens: int
    ) -> tuple[torch.Tensor, PagedBatch]:
        """Return (kv [pages, block_tokens, width], the batch), each sequence with `rows` rows."""
        needed = [-(-length // block_tokens) for length in lengths]
        order = torch.randperm(sum(needed), generator=self._generator, device=self._device)
        table = torch.zeros(len(lengths), max(needed), dtype=torch.int32, device=self._device)
        begin = 0
        for sequence, count in enumerate(needed):
            table[sequence, :count] = order[begin : begin + count]
            begin += count
        kv = torch.empty(
            sum(needed), block_tokens, width, dtype=torch.bfloat16, device=self._device
        )
        for page in torch.split(kv, 4096):
            page.copy_(self.normal(*page.shape))
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self._device) * rows
        held = torch.tensor(lengths, dtype=torch.int32, device=self._device)
        return kv, PagedBatch(starts, held, table, rows)


@dataclass(frozen=True)
class ModelShape:
    """The widths of a model that kernels see. `heads` and `inner` are those of one rank."""

    hidden: int
    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    experts: int
    top_k: int
    inner: int
    vocab: int
    block_tokens: int

    @property
    def kv_width(self) -> int:
        return self.rank + self.rope


KIMI_K2_TP8 = ModelShape(7168, 8, 512, 64, 128, 128, 384, 8, 256, 163840, 64)
"""The shape of one of eight ranks that split heads and every expert."""
TINY = ModelShape(96, 2, 32, 16, 24, 24, 6, 2, 32, 200, 16)
"""A shape that is small enough for the interpreter."""
TINY_BLOCKED = ModelShape(128, 8, 32, 32, 24, 24, 6, 2, 64, 200, 16)
"""The shape for compiled CPU code, which needs widths in whole blocks."""
