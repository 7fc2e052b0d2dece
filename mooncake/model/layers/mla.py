"""Multi-head latent attention of one layer (DeepSeek-V2, arXiv 2405.04434 section 2.1).

Writes the latent KV of the step's rows into their pages, then attends: absorbed for few new tokens
over a long context, expanded for long chunks. `inputs` decides which form a row takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mooncake_kernels.dispatch import NATIVE, REFERENCE, kernel
from mooncake_kernels.native import build
from mooncake_kernels.native import mla_decode as native
from mooncake_kernels.native.glue import prepare_queries
from mooncake_kernels.native.mla_layer import LayerWeights, MlaLayer
from mooncake_kernels.onednn import mla as onednn_mla
from mooncake_kernels.reference.paged_batch import PagedBatch

from mooncake.base import ModelSpec
from mooncake.model.backends import Backends
from mooncake.model.inputs import PrefersAbsorbed, Queries
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.linear import Fp8Linear, Linear, Product, SummedProduct
from mooncake.model.layers.rows import RmsNorm, Rope
from mooncake.model.parallel.group import Group

LATENT_NORM_EPS = 1e-6
"""The epsilon of the two inner norms. DeepSeek-V3's code fixes it; `rms_norm_eps` is for the outer
norms.
"""

_FLOPS_PER_HEAD_CALL = 1.5e7
"""The cost of the expanded form's separate calls for each head, in the FLOPs of a busy CPU core."""


@dataclass(frozen=True)
class MlaWeights:
    """Weights of one layer, all in the model's dtype.

    query_kv_a: [q rank (or heads * qk width) + kv_width, hidden], the query's rows first. query_b
    and query_norm: None when queries are not compressed. key_up: [heads, kv_lora_rank, nope],
    value_up: [heads, value width, kv_lora_rank]: `kv_b_proj` in its two parts. They are contiguous,
    in the layout that both forms multiply fastest (a strided batch is copied in every call, which
    cost a fifth of a decode step).
    """

    query_kv_a: Product
    query_norm: RmsNorm | None
    query_b: Product | None
    kv_norm: RmsNorm
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Product


class Mla:
    """The attention of layer `layer`."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        input_norm: RmsNorm,
        weights: MlaWeights,
        rope: Rope,
        backends: Backends,
        num_ranks: int = 1,
        context: Group | None = None,
    ) -> None:
        """num_ranks: how many ranks share out the heads; `weights` has one rank's. context: the
        ranks, including this one, that share out the KV of every context; None: each has all.
        """
        self._layer = layer
        self._input_norm = input_norm
        self._w = weights
        self._rope = rope
        self._heads = spec.num_attention_heads // num_ranks
        self._rank = spec.kv_lora_rank
        self._kv_width = spec.kv_width
        self._nope = spec.qk_nope_head_dim
        self._scale = spec.softmax_scale
        self._interleaved = spec.rope_interleave
        self._kv_write = backends.op("kv_write")
        self._query_and_kv = backends.op("query_and_kv")
        self._absorb_queries = backends.op("absorb_queries")
        self._fused = backends.fuses and self._interleaved
        self._mla_absorbed = backends.op("mla_absorbed")
        self._mla_decode = backends.op("mla_decode")
        self._mla_expanded = backends.op("mla_expanded")
        self._reads_pages = backends.attention == NATIVE
        self._few_shapes = backends.few_shapes
        self._linear_heads: Callable[..., torch.Tensor] = backends.op("linear_heads")
        self._context = context
        self._plain_decode = kernel("mla_decode", REFERENCE)
        self._merge = backends.op("merge_attention")
        compiled = self._reads_pages and self._interleaved and context is None
        self._few = self._few_rows(spec) if compiled else None

    def _few_rows(self, spec: ModelSpec) -> MlaLayer | None:
        """Return the whole layer as one call of compiled code for few rows, if it can be built."""
        w = self._w
        of_output = w.output.product if isinstance(w.output, SummedProduct) else w.output
        products = [
            part.few if isinstance(part, Linear | Fp8Linear) else None
            for part in (w.query_kv_a, w.query_b, of_output)
        ]
        query_kv_a, query_b, output = products
        if query_kv_a is None or output is None or (w.query_b is not None and query_b is None):
            return None
        with contextlib.suppress(build.CannotBuild):
            return MlaLayer(
                LayerWeights(
                    input_norm=(self._input_norm.weight, self._input_norm.eps),
                    query_kv_a=query_kv_a,
                    query_norm=(w.query_norm.weight, w.query_norm.eps) if w.query_norm else None,
                    query_b=query_b,
                    kv_norm=(w.kv_norm.weight, w.kv_norm.eps),
                    key_up=w.key_up,
                    value_up=w.value_up,
                    output=output,
                    scale=self._scale,
                    rope=spec.qk_rope_head_dim,
                )
            )
        return None

    def prepare(self, rows: int) -> None:
        """Let a library build its code for steps of `rows` rows; see `layers.linear.Product`."""
        self._w.query_kv_a.prepare(rows)
        if self._w.query_b is not None:
            self._w.query_b.prepare(rows)
        self._w.output.prepare(rows, adding=True)
        for weight in (self._w.key_up, self._w.value_up):
            self._linear_heads(weight.new_zeros(rows, self._heads, weight.shape[2]), weight)

    def prepare_context(self, num_keys: int) -> None:
        """Do the same for attention to `num_keys` keys, a rung of the ladder."""
        if not self._few_shapes:
            return
        rope = self._kv_width - self._rank
        onednn_mla.multiply_once(self._w.key_up, self._w.value_up, rope, num_keys)

    def takes(self, queries: Queries, kv: KvTensors) -> bool:
        """Whether `in_one` can compute these rows, which are all rows of their step."""
        alone = not queries.expanded and queries.batch is None and queries.few_rows
        few = self._few
        return alone and few is not None and few.takes(queries.num_rows, kv.of_layer(self._layer))

    def in_one(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        places: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
    ) -> torch.Tensor:
        """Return the result of `attend` after `write_kv`, for rows for which `takes` is true."""
        assert self._few is not None
        given = (x, rotation, places, kv.of_layer(self._layer), queries.span_batch)
        output = self._w.output
        if isinstance(output, SummedProduct):
            return output.group.sum(self._few(*given, None)).add_(x)
        return self._few(*given, x)

    def write_kv(
        self,
        x: torch.Tensor,
        update: torch.Tensor | None,
        rotation: torch.Tensor,
        places: torch.Tensor,
        kv: KvTensors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the KV of all rows of `x + update` [rows, hidden]. Return the normed first stage of
        the queries, and the sum. update: None adds nothing.
        """
        normed, x = self._input_norm.of_sum(x, update)
        joined = self._w.query_kv_a(normed)
        query = joined[:, : -self._kv_width]
        latent = joined[:, -self._kv_width : self._rank - self._kv_width]
        key = joined[:, self._rank - self._kv_width :]
        query_norm, pages = self._w.query_norm, kv.of_layer(self._layer)
        norm = self._w.kv_norm.weight, self._w.kv_norm.eps
        if self._fused and query_norm is not None:
            of_query = query_norm.weight, query_norm.eps
            query = self._query_and_kv(query, of_query, latent, key, rotation, places, norm, pages)
            return query, x
        if self._interleaved:
            self._kv_write(latent, key, rotation, places, norm, pages)
        else:
            turned = self._rope(key[:, None], rotation)[:, 0]
            kv.write(self._layer, places, torch.cat((self._w.kv_norm(latent), turned), dim=-1))
        return (query if query_norm is None else query_norm(query)), x

    def attend(
        self,
        query: torch.Tensor,
        rotation: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
    ) -> torch.Tensor:
        """Return the layer's attention, [rows, hidden].

        query: `write_kv`'s result for the rows of `queries`; may be overwritten. rotation: the
        rotation of these rows.
        """
        return self._w.output(self._attended(query, rotation, queries, kv))

    def attend_and_add(
        self,
        query: torch.Tensor,
        rotation: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
        to: torch.Tensor,
    ) -> torch.Tensor:
        """Return `to + attend(...)`."""
        return self._w.output.add(self._attended(query, rotation, queries, kv), to)

    def _attended(
        self, query: torch.Tensor, rotation: torch.Tensor, queries: Queries, kv: KvTensors
    ) -> torch.Tensor:
        """Return the results of all heads, [rows, heads * value width]."""
        if self._w.query_b is not None:
            query = self._w.query_b(query)
        q = query.view(query.shape[0], self._heads, -1)
        if not self._fused:
            q = self._turned(q, rotation)
        pages = kv.of_layer(self._layer)
        split = queries.split
        parts = []
        if queries.absorbed or queries.batch is not None:
            parts.append(self._absorbed(q[:split], rotation[:split], pages, queries))
        if queries.expanded:
            read = pages if queries.gathered is None else self._gathered(pages, queries.gathered)
            long = self._turned(q[split:], rotation[split:]) if self._fused else q[split:]
            parts.append(
                self._mla_expanded(long, read, queries.expanded, self._w.key_up, self._w.value_up)
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.flatten(1)

    def _turned(self, q: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return q [rows, heads, nope + rope] scaled and rotated; q may be overwritten."""
        if self._reads_pages and self._interleaved and q.is_contiguous():
            prepare_queries(q, rotation, self._scale)
            return q
        q = q.mul_(self._scale)
        q[..., self._nope :] = self._rope(q[..., self._nope :], rotation)
        return q

    def _absorbed(
        self, q: torch.Tensor, rotation: torch.Tensor, pages: torch.Tensor, queries: Queries
    ) -> torch.Tensor:
        """Return the results of all heads, [rows, heads, value width]. q is `_turned`'s result, or
        unchanged when one kernel does that too.
        """
        if self._fused:
            whole = self._absorb_queries(q, rotation, self._w.key_up, self._scale)
        else:
            latent_q = self._linear_heads(q[..., : self._nope], self._w.key_up)
            whole = torch.cat((latent_q, q[..., self._nope :]), dim=-1)
        if self._context is not None:
            described = queries.batch or queries.span_batch
            latent = self._attend_shared(whole, pages, described, self._context)
            return self._linear_heads(latent, self._w.value_up)
        batch = queries.batch
        few = batch is None and self._reads_pages and queries.few_rows
        if few and self._native_fits(pages, self._heads):
            batch = queries.span_batch
        if batch is not None:
            latent, _ = self._mla_decode(whole.contiguous(), pages, batch, self._rank)
        else:
            latent = self._mla_absorbed(whole, pages, queries.absorbed, self._rank)
        return self._linear_heads(latent, self._w.value_up)

    def _native_fits(self, pages: torch.Tensor, heads: int) -> bool:
        return native.fits(heads, self._kv_width, self._rank, pages.shape[1], pages.dtype)

    def _attend_shared(
        self, q: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, context: Group
    ) -> torch.Tensor:
        """Attend when each rank has a share of the pages. Every rank attends for the heads of all
        ranks over its own pages, then gets the results of the others for its heads. Nothing is
        rounded before the parts are merged.
        """
        rows, heads, width = q.shape
        every = context.gather(q.flatten(1)).view(rows, context.size * heads, width)
        attend = self._mla_decode
        if self._reads_pages and not self._native_fits(pages, every.shape[1]):
            attend = self._plain_decode
        out, lse = attend(every, pages, batch, self._rank, out_dtype=torch.float32)
        found = torch.cat((out, lse[..., None]), dim=-1)
        of_ranks = found.view(rows, context.size, heads, self._rank + 1).transpose(0, 1)
        parts = context.exchange(of_ranks.contiguous())
        merged: torch.Tensor = self._merge(
            parts[..., :-1].contiguous(), parts[..., -1].contiguous()
        )[0]
        return merged.to(q.dtype)

    def _gathered(self, pages: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """Return the pages `mine` of this rank among those of the others: page `i * ranks + r` is
        the i-th of rank r.
        """
        assert self._context is not None
        chosen = pages.view(torch.uint8).index_select(0, mine)  # not every torch sends e4m3
        every = self._context.gather(chosen.flatten(1))
        return every.view(-1, *chosen.shape[1:]).view(pages.dtype)


def flops_of_forms(spec: ModelSpec) -> Callable[[int, int], tuple[float, float]]:
    """Return (new tokens, context) -> the FLOPs per head of the absorbed and of the expanded form.

    Expanding costs each context token one product with kv_b. Absorbing costs each new token the
    same, and makes every score wider.
    """
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    nope, value = spec.qk_nope_head_dim, spec.v_head_dim
    made = 2 * rank * (nope + value)

    def flops(new: int, context: int) -> tuple[float, float]:
        pairs = new * context - new * (new - 1) // 2
        absorbed = made * new + 2 * (2 * rank + rope) * pairs
        return absorbed, made * context + 2 * (nope + rope + value) * pairs

    return flops


def absorbed_is_cheaper(spec: ModelSpec) -> PrefersAbsorbed:
    """Return the rule that picks a form for `new` tokens at the end of `context`. A single token is
    always absorbed, because single tokens batch best that way.
    """
    flops = flops_of_forms(spec)

    def rule(new: int, context: int) -> bool:
        absorbed, expanded = flops(new, context)
        return new == 1 or absorbed <= expanded + _FLOPS_PER_HEAD_CALL

    return rule
