"""Multi-head latent attention for training: whole sequences, expanded per head, differentiable.

This is the plain form of `model.layers.mla`; it holds weights and no cache. It also measures the
largest logit of each head, which QK-Clip needs and fused attention does not give.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mooncake.base import ConfigError, ModelSpec
from mooncake.model.layers.mla import LATENT_NORM_EPS
from mooncake.train.batches import Batch
from mooncake.train.parts import Linear, Norm

_SHORT = 512
_MAX_SCORES = 2**22
_MAX_SCORES_OF_GPU = 2**27
"""How many attention scores are compared at once to find the largest."""


class Attention(nn.Module):
    """One layer's attention, with the tensors of the checkpoint under their names there."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.q_lora_rank is None or spec.attention_bias:
            raise ConfigError("training knows compressed queries without biases only")
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
        self.register_buffer("max_logits", torch.zeros(self.heads), persistent=False)
        self.max_logits: torch.Tensor
        """The largest logit of each head, if above zero, since the last clipping; float32
        [heads].
        """

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the attention of x [tokens, hidden], the states of the batch's tokens.

        rotation: one for each token, [tokens, 1, rope / 2] complex64.
        """
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, -1))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self._rank, self.rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split((self.nope, self.value), dim=-1)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, rotation, self._interleaved)), dim=-1)
        k_rope = rotate(k_rope[:, None], rotation, self._interleaved)
        k = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1)), dim=-1)
        # Rows are padded at their end with zeros: no token sees these, and their logits are zero.
        qkv = torch.cat((q, k, v), dim=-1)
        padded = qkv.new_zeros(batch.num_padded, *qkv.shape[1:]).index_copy(0, batch.padded, qkv)
        attended = []
        sizes = [rows * longest for rows, longest in batch.groups]
        for (rows, longest), part in zip(batch.groups, torch.split(padded, sizes), strict=True):
            of_heads = part.view(rows, longest, self.heads, -1).transpose(1, 2)
            own_q, own_k, own_v = torch.split(
                of_heads, [q.shape[-1], k.shape[-1], self.value], dim=-1
            )
            out, found = attend(own_q, own_k, own_v, self._scale)
            attended.append(out.transpose(1, 2).flatten(0, 1))
            if self.training:
                self.max_logits = torch.maximum(self.max_logits, found)
        joined: torch.Tensor = self.o_proj(
            torch.cat(attended).index_select(0, batch.padded).flatten(1)
        )
        return joined


def rotate(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x [..., width] turned by rotation [..., width / 2] complex64, in x's dtype.

    interleaved: neighbours form pairs; otherwise the two halves do.
    """
    cos, sin = rotation.real, rotation.imag
    wide = x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention [sequences, heads, tokens, value] and the largest logit of each head.

    On a CPU short sequences keep all scores, which takes half the time of the fused form. All
    others are fused, so that memory does not grow with the square of their length.
    """
    tokens = q.shape[-2]
    if tokens > _SHORT or q.device.type != "cpu":
        fused = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return fused, largest_logits(q.detach(), k.detach(), scale)
    scores = (q * scale) @ k.transpose(-1, -2)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu_(1)
    scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(dim=-1) @ v, scores.detach().amax(dim=(0, 2, 3)).float()


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
