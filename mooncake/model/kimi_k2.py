"""Kimi-K2 (DeepSeek-V3's architecture) as a forward pass over paged latent KV.

State is the weights only; KV and sequences are passed in. `loading` makes one of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mooncake.base import ModelSpec
from mooncake.model.inputs import PrefersAbsorbed, Queries, StepInputs
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.embedding import Embedding, Head
from mooncake.model.layers.linear import GatedMlp
from mooncake.model.layers.mla import Mla
from mooncake.model.layers.moe import Moe
from mooncake.model.layers.norm import RmsNorm
from mooncake.model.layers.rope import Rope
from mooncake.model.parallel.group import Group


class Layer:
    """One decoder layer: attention and a dense or expert layer, each normed first and added."""

    def __init__(self, attention: Mla, output_norm: RmsNorm, mlp: GatedMlp | Moe) -> None:
        self._attention = attention
        self._output_norm = output_norm
        self._mlp = mlp
        self.takes = attention.takes
        self.prepare_context = attention.prepare_context
        self.write_kv = attention.write_kv

    def prepare(self, rows: int, most_rows: int) -> None:
        """Have a library build what steps of `rows` rows need, `most_rows` at most."""
        self._attention.prepare(rows)
        if isinstance(self._mlp, Moe):
            self._mlp.prepare(rows, most_rows)
        else:
            self._mlp.prepare(rows)

    def in_one(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        places: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
    ) -> torch.Tensor:
        """Return the layer's output for all rows, whose KV is written; needs `takes`."""
        x = self._attention.in_one(x, rotation, places, queries, kv)
        return self._mlp.add(self._output_norm(x), x)

    def finish(
        self,
        x: torch.Tensor,
        query: torch.Tensor,
        rotation: torch.Tensor,
        queries: Queries,
        kv: KvTensors,
    ) -> torch.Tensor:
        """Return the layer's output for the rows of `queries`; the other arguments are theirs."""
        x = self._attention.attend(query, rotation, queries, kv, x)
        return self._mlp.add(self._output_norm(x), x)


class KimiK2:
    """The model. Not safe for two threads at once on the same KV pages."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Embedding,
        layers: list[Layer],
        norm: RmsNorm,
        head: Head,
        rope: Rope,
        prefers_absorbed: PrefersAbsorbed,
        context: Group | None = None,
    ) -> None:
        """`prefers_absorbed`: which form of attention new tokens take. `context`: the ranks that
        share the KV of every context out; None: each has all.
        """
        self.spec = spec
        self.prefers_absorbed = prefers_absorbed
        self.device = embedding.weight.device
        self.dtype = embedding.weight.dtype
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = rope
        self._context = context
        self.prepare_head = head.prepare

    def forward(
        self, inputs: StepInputs, kv: KvTensors, after_write: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Return the final hidden states of the output rows, [rows, hidden], before the last norm.

        Writes the KV of all rows; `after_write(layer)` is called as soon as a layer's is written,
        by all ranks that have a share of it. The last layer attends only for rows whose output is
        used.
        """
        x = self._embedding(inputs.tokens)
        rotation = self._rope.rotation(inputs.positions)
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            queries = inputs.queries if number < last else inputs.outputs
            if queries.rows is None and layer.takes(queries, kv):
                x = layer.in_one(x, rotation, inputs.places, queries, kv)
                if after_write is not None:
                    after_write(number)
                continue
            query = layer.write_kv(x, rotation, inputs.places, kv)
            if after_write is not None and self._context is None:
                after_write(number)
            if queries.rows is not None:
                x, query, rotation = (
                    part.index_select(0, queries.rows) for part in (x, query, rotation)
                )
            if queries.num_rows:
                x = layer.finish(x, query, rotation, queries, kv)
            elif self._context is not None:
                self._context.meet()
            if after_write is not None and self._context is not None:
                after_write(number)  # all ranks wrote theirs before they met in this layer
        return x

    def kinds_of_layers(self) -> list[Layer]:
        """Return a layer of each kind: dense ones come first, then those with experts."""
        return list(dict.fromkeys((self._layers[0], self._layers[-1])))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [rows, vocab] float32 for `forward`'s result, or some of its rows; in `out` where
        it is given.
        """
        return self._head(self._norm(hidden), out)
