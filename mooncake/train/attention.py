"""Multi-head latent attention for training: whole sequences, expanded per head, differentiable.

This is the plain form of `model.layers.mla`; it holds weights and no cache. It also measures the
largest logit of each head, which QK-Clip needs and fused attention does not give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mooncake.base import ConfigError, ModelSpec
from mooncake.model.layers.mla import LATENT_NORM_EPS
from mooncake.train.batches import Batch
from mooncake.train.parts import Linear, Norm, gathered, spread

_LONG = 2048
"""A CPU keeps the probabilities of sequences that are not longer."""
_QUERIES = 128
"""How many queries are compared at once with all keys up to the last of them, on a CPU."""
_MAX_SCORES = 2**22
_MAX_SCORES_OF_GPU = 2**27
"""How many attention scores are compared at once to find the largest."""


@dataclass(frozen=True)
class Rows:
    """Where the vectors of a batch's tokens, one for each head, stand in the rows that attend.

    rotation: [tokens, 1, rope / 2] complex64. groups: as of the batch; a group's places are [rows,
    heads, longest]. sources: [places] int64; which vector stands there. places: [tokens * heads]
    int64; where each vector stands. A row that is shorter than its group's longest repeats its last
    token, which no other token sees, and which has no other logits.
    """

    rotation: torch.Tensor
    groups: tuple[tuple[int, int], ...]
    sources: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, heads: int, rotation: torch.Tensor) -> Rows:
        """Return the rows of a batch for attention of `heads` heads."""
        head = torch.arange(heads, device=batch.tokens.device)
        parts = torch.split(batch.sources, [rows * longest for rows, longest in batch.groups])
        sources = [
            (part.view(rows, 1, longest) * heads + head[:, None]).flatten()
            for (rows, longest), part in zip(batch.groups, parts, strict=True)
        ]
        first = (batch.padded - batch.positions) * heads + batch.positions
        places = first[:, None] + batch.spans[:, None] * head
        return cls(rotation, batch.groups, torch.cat(sources), places.flatten())


class Attention(nn.Module):
    """One layer's attention, with the tensors of the checkpoint under their names there."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.q_lora_rank is None or spec.attention_bias:
            raise ConfigError("training supports only compressed queries without biases")
        self.heads = spec.num_attention_heads
        self.nope = spec.qk_nope_head_dim
        self.rope = spec.qk_rope_head_dim
        self.value = spec.v_head_dim
        self._rank = spec.kv_lora_rank
        self._scale = spec.softmax_scale
        self._interleaved = spec.rope_interleave
        hidden = spec.hidden_size
        self.q_a_proj = Linear(hidden, spec.q_lora_rank)
        self.q_a_layernorm = Norm(spec.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = Linear(spec.q_lora_rank, self.heads * spec.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, spec.kv_width)
        self.kv_a_layernorm = Norm(spec.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(spec.kv_lora_rank, self.heads * (self.nope + self.value))
        self.o_proj = Linear(self.heads * self.value, hidden)
        self._counting = Lock()
        self.register_buffer("max_logits", torch.zeros(self.heads), persistent=False)
        self.max_logits: torch.Tensor
        """The largest logit of each head, if above zero, since the last clipping; float32
        [heads].
        """

    def forward(
        self, x: torch.Tensor, rows: Rows, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention of x [tokens, hidden], the states of the batch's tokens: of the
        tokens `wanted`, [number] int64, or of all.
        """
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, -1))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self._rank, self.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split((self.nope, self.value), dim=-1)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, rows.rotation, self._interleaved)), dim=-1)
        k_rope = rotate(k_rope[:, None], rows.rotation, self._interleaved)
        k = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1)), dim=-1)
        sizes = [number * self.heads * longest for number, longest in rows.groups]
        parts = [
            torch.split(spread(one.flatten(0, 1), rows.sources, rows.places), sizes)
            for one in (q, k, v)
        ]
        attended = []
        for (number, longest), *own in zip(rows.groups, *parts, strict=True):
            own_q, own_k, own_v = (one.view(number, self.heads, longest, -1) for one in own)
            out, found = attend(own_q, own_k, own_v, self._scale)
            attended.append(out.flatten(0, 2))
            if self.training:
                with self._counting:
                    self.max_logits = torch.maximum(self.max_logits, found)
        back = gathered(torch.cat(attended), rows.places).view(len(x), -1)
        joined: torch.Tensor = self.o_proj(back if wanted is None else back.index_select(0, wanted))
        return joined


def rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x [..., width] turned by rotation [..., width / 2] complex64, in x's dtype.

    interleaved: neighbours form pairs; otherwise the two halves do.
    """
    wide = x.float()
    if interleaved:
        pairs = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
    cos, sin = rotation.real, rotation.imag
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention [sequences, heads, tokens, value] and the largest logit of each head.

    q, k, v: contiguous. A CPU compares a block of queries with the keys up to the last of them, and
    keeps all probabilities. Other devices use the fused form, and so do long sequences, so that
    memory does not grow with the square of their length.
    """
    if q.shape[-2] > _LONG or q.device.type != "cpu":
        fused = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return fused, largest_logits(q.detach(), k.detach(), scale)
    out, largest = _Blocks.apply(*(one.flatten(0, 1) for one in (q * scale, k, v)))  # type: ignore[no-untyped-call]
    return out.view(v.shape), largest.view(q.shape[:2]).amax(dim=0).float()


class _Blocks(torch.autograd.Function):
    """Causal attention of q, k, v [heads of all sequences, tokens, width], in blocks of queries.
    Also returns the largest logit of each head.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made, kept, largest = [], [], []
        for first, stop in _blocks(q):
            scores = torch.bmm(q[:, first:stop], k[:, :stop].mT)
            later = torch.ones(stop - first, stop - first, dtype=torch.bool).triu_(1)
            scores[:, :, first:].masked_fill_(later, float("-inf"))
            largest.append(scores.flatten(1).amax(dim=1))
            kept.append(scores.softmax(dim=-1))
            made.append(torch.bmm(kept[-1], v[:, :stop]))
        ctx.save_for_backward(q, k, v, *kept)
        found = torch.stack(largest).amax(dim=0)
        ctx.mark_non_differentiable(found)
        return torch.cat(made, dim=1), found

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        q, k, v, *kept = ctx.saved_tensors
        of_q: list[torch.Tensor] = []
        of_k = of_v = None
        # The last block sees all keys: its sums begin those of the blocks before it.
        for (first, stop), chances in zip(reversed([*_blocks(q)]), reversed(kept), strict=True):
            own = gradient[:, first:stop]
            of_chances = torch.bmm(own, v[:, :stop].mT)
            of_scores = torch._softmax_backward_data(  # noqa: SLF001  (torch has no public name)
                of_chances, chances, -1, chances.dtype
            )
            of_q.append(torch.bmm(of_scores, k[:, :stop]))
            own_k = torch.bmm(of_scores.mT, q[:, first:stop])
            own_v = torch.bmm(chances.mT, own)
            if of_k is None or of_v is None:
                of_k, of_v = own_k, own_v
            else:
                of_k[:, :stop] += own_k
                of_v[:, :stop] += own_v
        return torch.cat(of_q[::-1], dim=1), of_k, of_v


def _blocks(q: torch.Tensor) -> Iterator[tuple[int, int]]:
    for first in range(0, q.shape[1], _QUERIES):
        yield first, min(first + _QUERIES, q.shape[1])


@torch.no_grad()
def largest_logits(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the largest causal attention logit of each head, [heads] float32.

    q, k: [sequences, heads, tokens, width]. Scores are made in pieces of rows to bound memory.
    """
    batch, heads, tokens, _ = q.shape
    most = _MAX_SCORES if q.device.type == "cpu" else _MAX_SCORES_OF_GPU
    rows = max(1, min(tokens, most // (batch * heads * tokens)))
    best = torch.full((heads,), float("-inf"), device=q.device)
    for first in range(0, tokens, rows):
        stop = min(first + rows, tokens)
        scores = q[:, :, first:stop] @ k[:, :, :stop].transpose(-1, -2)
        later = torch.ones(stop - first, stop, dtype=torch.bool, device=q.device).triu_(first + 1)
        found = scores.masked_fill_(later, float("-inf")).amax(dim=(0, 2, 3)).float()
        best = torch.maximum(best, found)
    return best * scale
