"""Kimi-K2's forward pass for training: whole sequences, every token's logits, an MTP layer.

Its logits equal those of `model.kimi_k2` on the same checkpoint (a test compares them). It owns the
weights, in float32, under a checkpoint's names, with the experts of a layer stacked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from mooncake.base import ConfigError, ModelSpec
from mooncake.model.layers.rows import rope_frequencies, rope_scale
from mooncake.train.attention import Attention, Rows
from mooncake.train.batches import Batch
from mooncake.train.experts import Moe
from mooncake.train.parts import GatedMlp, Linear, Norm

INIT_STD = 0.02
_ANSWERS = 256
"""A CPU predicts a multiple of this many tokens, unless in float32: oneDNN compiles a product anew
for each number.
"""


class Layer(nn.Module):
    """Attention and a dense or expert layer. Each is normed first and added in float32."""

    def __init__(self, spec: ModelSpec, dense: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.input_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp: nn.Module = (
            GatedMlp(spec.hidden_size, spec.intermediate_size) if dense else Moe(spec)
        )

    def forward(
        self, x: torch.Tensor, rows: Rows, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the layer's output for x [tokens, hidden] float32: that of the tokens `wanted`,
        [number] int64, or of all.
        """
        attended = self.self_attn(self.input_layernorm(x, self._dtype), rows, wanted)
        x = (x if wanted is None else x.index_select(0, wanted)) + attended
        made: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x, self._dtype))
        return made


class PredictionLayer(Layer):
    """The MTP layer. From a token's hidden state and the next token it makes the state that
    predicts the token after that one (arXiv 2412.19437 section 2.2). Embedding and head are the
    model's.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dense=False, dtype=dtype)
        self.enorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.hnorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.eh_proj = Linear(2 * spec.hidden_size, spec.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": Norm(spec.hidden_size, spec.rms_norm_eps)})

    def join(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the layer's input. hidden: normed states; following: the next embeddings."""
        joined = torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1)
        made: torch.Tensor = self.eh_proj(joined.to(self._dtype)).float()
        return made


@dataclass(frozen=True)
class Losses:
    """Sums over the tokens that count."""

    main: torch.Tensor
    mtp: torch.Tensor


class TrainedK2(nn.Module):
    """The model. It computes in `dtype`, and adds and keeps weights in float32."""

    def __init__(
        self, spec: ModelSpec, num_mtp_layers: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Raises ConfigError when `spec` has features that training does not support."""
        super().__init__()
        if spec.tie_word_embeddings or num_mtp_layers > 1:
            raise ConfigError(
                "training supports only separate embeddings and at most one MTP layer"
            )
        self.spec = spec
        self._dtype = dtype
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            Layer(spec, number < spec.first_k_dense_replace, dtype)
            for number in range(spec.num_hidden_layers)
        )
        self.norm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)
        self.mtp = PredictionLayer(spec, dtype) if num_mtp_layers else None
        self.register_buffer("_frequencies", rope_frequencies(spec), persistent=False)
        self._frequencies: torch.Tensor
        self._rope_scale = rope_scale(spec.yarn)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fill all weights: matrices normal, and smaller those that write to the residual
        stream.
        """
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.spec.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                weight.fill_(1)
                continue
            std = INIT_STD if "embed" in name else weight.shape[-1] ** -0.5 / 2
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= depth
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def hidden(self, batch: Batch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return normed states [tokens, hidden] float32 of the tokens `wanted`, [number] int64, or
        of all.
        """
        rows = self.rows(batch)
        x = self.embed_tokens(batch.tokens)
        for layer in self.layers[:-1]:
            x = layer(x, rows)
        x = self.layers[-1](x, rows, wanted)
        normed: torch.Tensor = self.norm(x)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., vocab] float32 for normed states."""
        made: torch.Tensor = self.lm_head(hidden.to(self._dtype)).float()
        return made

    def mtp_hidden(
        self, hidden: torch.Tensor, batch: Batch, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the MTP layer's normed states of the tokens `wanted`, or of all. The state of
        token i predicts token i + 2.

        hidden: `hidden(batch)`. A sequence's last state is made with another sequence's first
        token, and is not used.
        """
        assert self.mtp is not None
        joined = self.mtp.join(hidden, self.embed_tokens(batch.tokens.roll(-1)))
        made: torch.Tensor = self.mtp.shared_head["norm"](
            self.mtp(joined, self.rows(batch), wanted)
        )
        return made

    def losses(self, batch: Batch, with_mtp: bool) -> Losses:
        """Return the cross entropy of the tokens that count."""
        near, far = (self._rounded(answers) for answers in batch.answers)
        numbers = tuple(map(len, batch.answers))
        if not with_mtp or self.mtp is None:
            main = self._loss(self.hidden(batch, near - 1), batch.tokens[near], numbers[0])
            return Losses(main, torch.zeros_like(main))
        hidden = self.hidden(batch)
        ahead = self.mtp_hidden(hidden, batch, far - 2)
        return Losses(
            self._loss(hidden.index_select(0, near - 1), batch.tokens[near], numbers[0]),
            self._loss(ahead, batch.tokens[far], numbers[1]),
        )

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of the first `number` states, which predict the tokens `targets`."""
        logits = self.logits(hidden)[:number]
        return functional.cross_entropy(logits, targets[:number], reduction="sum")

    def _rounded(self, places: torch.Tensor) -> torch.Tensor:
        """Return places [number], some of them again up to a multiple of `_ANSWERS`, where that
        saves compiling.
        """
        if places.device.type != "cpu" or self._dtype == torch.float32 or not len(places):
            return places
        return places[torch.arange(-(-len(places) // _ANSWERS) * _ANSWERS) % len(places)]

    def rows(self, batch: Batch) -> Rows:
        """Return where the batch's tokens stand in the rows that attend together."""
        angles = batch.positions.float()[:, None, None] * self._frequencies
        rotation = torch.polar(torch.full_like(angles, self._rope_scale), angles)
        return Rows.of(batch, self.spec.num_attention_heads, rotation)
