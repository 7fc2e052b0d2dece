"""The attention of an EAGLE-3 head over windows of earlier rows: grouped heads as Llama's, or MLA
as the model's. Both read a row that is twice as wide as the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.nn import functional

from mooncake.model.backends import Backends
from mooncake.model.checkpoint.eagle3 import GroupedHeads, LatentHeads
from mooncake.model.layers.linear import Linear
from mooncake.model.layers.rows import RmsNorm, Rope

Part = tuple[torch.Tensor, torch.Tensor | None]
"""What some rows may attend to, [rows, count, kv_width], and which of it they do, bool
[rows, count]; None: all.
"""


class Weights(Protocol):
    """Gives the tensors of `self_attn` by their names, in the head's dtype and on its device."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def norm(self, name: str) -> RmsNorm: ...

    def linear(self, *names: str) -> Linear:
        """Return one of several products with the same input, with outputs in this order."""
        ...


class HeadAttention(Protocol):
    """What an attention makes of the rows of a step; `joined` is [rows, 2 * hidden]."""

    rope: Rope

    def keys_values(self, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return what later rows attend to, [rows, kv_width]."""
        ...

    def attended(
        self, joined: torch.Tensor, rotation: torch.Tensor, seen: Iterable[Part]
    ) -> torch.Tensor:
        """Return [rows, hidden]. seen: what each row attends to, in their order."""
        ...


class GroupedAttention:
    """Implements `HeadAttention` with keys and values of groups of heads."""

    def __init__(
        self, spec: GroupedHeads, weights: Weights, backends: Backends, device: torch.device
    ) -> None:
        self._width = spec.head_dim
        self._groups = spec.kv_width // (2 * spec.head_dim)
        self._query = weights.linear("q_proj")
        self._key_value = weights.linear("k_proj", "v_proj")
        self._output = weights.linear("o_proj")
        self.rope = Rope(spec, device, backends)

    def keys_values(self, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """See `HeadAttention`: keys, then values, of all groups."""
        made = self._key_value(joined).view(len(joined), 2, -1, self._width)
        return torch.stack((self.rope(made[:, 0], rotation), made[:, 1]), dim=1).flatten(1)

    def attended(
        self, joined: torch.Tensor, rotation: torch.Tensor, seen: Iterable[Part]
    ) -> torch.Tensor:
        """See `HeadAttention`."""
        shape = len(joined), self._groups, -1, self._width
        queries = self.rope(self._query(joined).view(len(joined), -1, self._width), rotation)

        def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            pairs = rows.view(*rows.shape[:2], 2, self._groups, self._width)
            keys, values = pairs.permute(2, 0, 3, 1, 4)
            return keys, values

        return self._output(_attended(queries.view(shape), seen, split).flatten(1))


class LatentAttention:
    """Implements `HeadAttention` with MLA in its absorbed form: rows hold the normed latent and the
    rotated key, which all heads share.
    """

    def __init__(
        self,
        spec: LatentHeads,
        num_heads: int,
        weights: Weights,
        backends: Backends,
        device: torch.device,
    ) -> None:
        self._spec, self._num_heads = spec, num_heads
        compressed = spec.q_lora_rank is not None
        self._query_a = weights.linear("q_a_proj") if compressed else None
        self._query_norm = weights.norm("q_a_layernorm") if compressed else None
        self._query = weights.linear("q_b_proj" if compressed else "q_proj")
        self._latent_key = weights.linear("kv_a_proj_with_mqa")
        self._latent_norm = weights.norm("kv_a_layernorm")
        of_heads = weights.tensor("kv_b_proj").view(num_heads, -1, spec.kv_lora_rank)
        key_up, value_up = torch.split(of_heads, [spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        self._key_up = key_up.transpose(1, 2).contiguous()
        self._value_up = value_up.contiguous()
        self._output = weights.linear("o_proj")
        self._linear_heads: Callable[..., torch.Tensor] = backends.op("linear_heads")
        self.rope = Rope(spec, device, backends)

    def keys_values(self, joined: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """See `HeadAttention`."""
        made = self._latent_key(joined)
        rank = self._spec.kv_lora_rank
        key = self.rope(made[:, None, rank:], rotation)[:, 0]
        return torch.cat((self._latent_norm(made[:, :rank].contiguous()), key), dim=-1)

    def attended(
        self, joined: torch.Tensor, rotation: torch.Tensor, seen: Iterable[Part]
    ) -> torch.Tensor:
        """See `HeadAttention`."""
        spec = self._spec
        if self._query_a is not None and self._query_norm is not None:
            joined = self._query_norm(self._query_a(joined))
        queries = self._query(joined).view(len(joined), self._num_heads, -1)
        turned = self.rope(queries[..., spec.qk_nope_head_dim :], rotation)
        plain = queries[..., : spec.qk_nope_head_dim].contiguous()
        whole = torch.cat((self._linear_heads(plain, self._key_up), turned), dim=-1)

        def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shared = rows[:, None]
            return shared, shared[..., : spec.kv_lora_rank]

        found = _attended(whole[:, None], seen, split, spec.softmax_scale)
        values = self._linear_heads(found[:, 0], self._value_up)
        return self._output(values.flatten(1))


def _attended(
    queries: torch.Tensor,
    seen: Iterable[Part],
    split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of queries [rows, groups, heads of each, width] in this form. split:
    returns keys and values [some rows, groups, count, width] of what these see.
    """
    found: list[torch.Tensor] = []
    first = 0
    for rows, mask in seen:
        keys, values = split(rows)
        part = queries[first : first + len(rows)]
        which = None if mask is None else mask[:, None, None]
        found.append(
            functional.scaled_dot_product_attention(
                part, keys, values, attn_mask=which, scale=scale
            )
        )
        first += len(rows)
    return torch.cat(found)
