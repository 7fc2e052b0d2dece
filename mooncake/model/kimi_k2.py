"""Kimi-K2 (DeepSeek-V3's architecture) as a forward pass over paged latent KV, and its loading.

Everything is read from the spec. State is the weights only; KV and sequences are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from mooncake.base import ModelSpec
from mooncake.model.inputs import Queries, StepInputs
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.embedding import Embedding, Head
from mooncake.model.layers.linear import GatedMlp, Linear
from mooncake.model.layers.mla import LATENT_NORM_EPS, Mla, MlaWeights
from mooncake.model.layers.moe import Moe, MoeWeights
from mooncake.model.layers.norm import RmsNorm
from mooncake.model.layers.rope import Rope
from mooncake.model.tensor_shapes import tensor_shapes


class Layer:
    """One decoder layer: attention and a dense or expert layer, each normed first and added."""

    def __init__(
        self, input_norm: RmsNorm, attention: Mla, output_norm: RmsNorm, mlp: GatedMlp | Moe
    ) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._output_norm = output_norm
        self._mlp = mlp

    def write_kv(
        self, x: torch.Tensor, rotation: torch.Tensor, places: torch.Tensor, kv: KvTensors
    ) -> torch.Tensor:
        """Store the KV of all rows of `x` [rows, hidden]; return what `finish` wants of them."""
        return self._attention.write_kv(self._input_norm(x), rotation, places, kv)

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
    ) -> None:
        self.spec = spec
        self.device = embedding.weight.device
        self.dtype = embedding.weight.dtype
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = Rope(spec, self.device)

    def forward(
        self, inputs: StepInputs, kv: KvTensors, after_write: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Return the final hidden states of the output rows, [rows, hidden], before the last norm.

        Writes the KV of all rows; `after_write(layer)` is called as soon as a layer's is written.
        The last layer attends only for rows whose output somebody reads.
        """
        x = self._embedding(inputs.tokens)
        rotation = self._rope.rotation(inputs.positions)
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            query = layer.write_kv(x, rotation, inputs.places, kv)
            if after_write is not None:
                after_write(number)
            queries = inputs.queries
            if number == last:
                queries = inputs.outputs
                assert queries.rows is not None
                x, query, rotation = (
                    part.index_select(0, queries.rows) for part in (x, query, rotation)
                )
                if not queries.num_rows:
                    break
            x = layer.finish(x, query, rotation, queries, kv)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocab] float32 for `forward`'s result, or some of its rows."""
        return self._head(self._norm(hidden))


class WeightSource(Protocol):
    """What a model is loaded from: `weights.Checkpoint`, or tensors made in a test."""

    @property
    def spec(self) -> ModelSpec: ...

    def check_names(self, expected: Iterable[str]) -> None:
        """Raise CheckpointError unless exactly these tensors are there."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in a float dtype; CheckpointError if missing or of another shape."""


def load_model(
    checkpoint: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> KimiK2:
    """Return the model of `checkpoint` with weights as `dtype` on `device`.

    Tensors are read one by one and packed layer by layer: beside the finished weights never more
    than one layer (or the head) is held. `progress(done, total)` counts tensors.

    Raises:
        CheckpointError: a tensor is missing, unknown or of the wrong shape.
    """
    return _Loader(checkpoint, dtype, device, progress).model()


class _Loader:
    """Reads tensors by name and builds layers of them."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._spec = source.spec
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._shapes = tensor_shapes(source.spec)
        self._done = 0

    def model(self) -> KimiK2:
        spec = self._spec
        self._source.check_names(self._shapes)
        embedding = Embedding(self._read("model.embed_tokens.weight"))
        rope = Rope(spec, self._device)
        layers = [self._layer(number, rope) for number in range(spec.num_hidden_layers)]
        norm = self._norm("model.norm.weight", spec.rms_norm_eps)
        tied = spec.tie_word_embeddings
        weight = embedding.weight if tied else self._read("lm_head.weight")
        return KimiK2(spec, embedding, layers, norm, Head(weight, tied=tied))

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._source.tensor(name, self._shapes[name])
        # A copy even where nothing changes: the source may hand out views of a mapped file.
        kept = tensor.to(device=self._device, dtype=dtype or self._dtype, copy=True)
        self._count()
        return kept

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._source.tensor(name, self._shapes[name]))
        self._count()

    def _count(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._shapes))

    def _norm(self, name: str, eps: float) -> RmsNorm:
        return RmsNorm(self._read(name), eps)

    def _layer(self, number: int, rope: Rope) -> Layer:
        spec, prefix = self._spec, f"model.layers.{number}."
        dense = number < spec.first_k_dense_replace
        return Layer(
            self._norm(prefix + "input_layernorm.weight", spec.rms_norm_eps),
            Mla(spec, number, self._attention(prefix + "self_attn."), rope),
            self._norm(prefix + "post_attention_layernorm.weight", spec.rms_norm_eps),
            self._mlp(prefix + "mlp.") if dense else self._moe(prefix + "mlp."),
        )

    def _attention(self, prefix: str) -> MlaWeights:
        spec = self._spec
        compressed = spec.q_lora_rank is not None
        query = prefix + ("q_a_proj" if compressed else "q_proj")
        kv_b = self._read(prefix + "kv_b_proj.weight").view(
            spec.num_attention_heads, -1, spec.kv_lora_rank
        )
        return MlaWeights(
            query_kv_a=self._joined_linear(query, prefix + "kv_a_proj_with_mqa"),
            query_norm=self._norm(prefix + "q_a_layernorm.weight", LATENT_NORM_EPS)
            if compressed
            else None,
            query_b=Linear(self._read(prefix + "q_b_proj.weight")) if compressed else None,
            kv_norm=self._norm(prefix + "kv_a_layernorm.weight", LATENT_NORM_EPS),
            key_up=kv_b[:, : spec.qk_nope_head_dim].transpose(1, 2).contiguous(),
            value_up=kv_b[:, spec.qk_nope_head_dim :].contiguous(),
            output=Linear(
                self._read(prefix + "o_proj.weight"), self._bias_or_none(prefix + "o_proj")
            ),
        )

    def _joined_linear(self, *names: str) -> Linear:
        """Return one linear layer of several with the same input, outputs in the order given."""
        weights = [self._read(name + ".weight") for name in names]
        biases = [self._bias_or_none(name) for name in names]
        if all(bias is None for bias in biases):
            return Linear(torch.cat(weights))
        filled = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return Linear(torch.cat(weights), torch.cat(filled))

    def _bias_or_none(self, name: str) -> torch.Tensor | None:
        return self._read(name + ".bias") if name + ".bias" in self._shapes else None

    def _mlp(self, prefix: str) -> GatedMlp:
        gate, up = (self._read(f"{prefix}{part}_proj.weight") for part in ("gate", "up"))
        return GatedMlp(torch.cat((gate, up)), self._read(prefix + "down_proj.weight"))

    def _moe(self, prefix: str) -> Moe:
        spec = self._spec
        count, hidden = spec.n_routed_experts, spec.hidden_size
        inner = spec.moe_intermediate_size
        router = self._read(prefix + "gate.weight", torch.float32)
        bias = self._read(prefix + "gate.e_score_correction_bias", torch.float32)
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(count, hidden, inner, dtype=self._dtype, device=self._device)
        for expert in range(count):
            name = f"{prefix}experts.{expert}."
            self._read_into(name + "gate_proj.weight", gate_up[expert, :inner])
            self._read_into(name + "up_proj.weight", gate_up[expert, inner:])
            self._read_into(name + "down_proj.weight", down[expert])
        shared = self._mlp(prefix + "shared_experts.") if spec.n_shared_experts else None
        return Moe(spec, MoeWeights(router, bias, gate_up, down, shared))
