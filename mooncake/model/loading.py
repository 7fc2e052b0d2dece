"""Makes a model from a source of named tensors: reads, packs and places weights layer by layer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from mooncake.base import CheckpointError, ConfigError, ModelSpec, Shape
from mooncake.engine.expert_placement import EplbConfig, first_placement
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.quant import QuantizedWeight
from mooncake.model.checkpoint.quant_format import FP8_BLOCK
from mooncake.model.checkpoint.tensor_cuts import (
    ROUTED,
    Part,
    cut_of,
    is_held,
    is_of_mtp,
    slabs_of,
    tensor_shapes,
)
from mooncake.model.copies import Copies
from mooncake.model.kimi_k2 import KimiK2, Layer, MtpLayer, Output
from mooncake.model.layers.linear import (
    Fp8Linear,
    GatedMlp,
    Linear,
    Product,
    SlabbedProduct,
    SummedProduct,
)
from mooncake.model.layers.mla import LATENT_NORM_EPS, Mla, MlaWeights, absorbed_is_cheaper
from mooncake.model.layers.moe import HostExperts, Moe, MoeWeights, slots_of
from mooncake.model.layers.rows import Embedding, Head, RmsNorm, Rope
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.group import Group, Solo
from mooncake.model.parallel.stages import Stage
from mooncake.model.placing import Placer

_log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """The source of a model's tensors: `checkpoint.weights.Checkpoint`, or a test's own."""

    @property
    def spec(self) -> ModelSpec: ...

    def check_names(self, expected: Iterable[str]) -> None:
        """Raise CheckpointError unless exactly these tensors are there."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        """Return a tensor of `shape`, or `part` of it, in a float dtype. Raises CheckpointError
        when it is missing or has another shape.
        """

    def quantized(
        self, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> QuantizedWeight | None:
        """Return the weight, or `part` of it, as stored, if it is quantized in a form that kernels
        support. Otherwise return None.
        """


def load_model(
    checkpoint: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    backends: Backends | None = None,
    group: Group | None = None,
    shape: Shape | None = None,
    sharing: ExpertRanks | None = None,
    eplb: EplbConfig | None = None,
    host: HostExperts | None = None,
    with_mtp: bool = False,
    drafts: bool = False,
    copies: Copies | None = None,
) -> KimiK2:
    """Return the model of `checkpoint` with weights as `dtype` on `device`; where a `group` of
    `shape` shares it, this rank's parts only (`tensor_cuts`), and no others are read.

    sharing: the ranks that share the routed experts, where they are more than those of `group`.
    eplb: how these place them anew while they are used; None: never.
    host: what keeps and computes the routed experts, in DRAM; None: they lie on `device`.
    with_mtp: load the first MTP layer too, which shares embedding and head with the model.
    drafts: this or another layer drafts, on the last stage.
    copies: to `device`, for stages; None: it is the host.

    Packed layer by layer, the experts of one by several threads: beside the finished weights never
    more than one layer (or the head) is held. `progress(done, total)` counts tensors. Quantized
    weights stay as they are where the backends' kernels multiply with them, else they are widened
    once.

    Raises:
        CheckpointError: a tensor is missing, unknown or of the wrong shape.
    """
    with Placer(staged=device.type == "cuda") as placer:
        ranks = group or Solo()
        shape = shape or Shape(tp=ranks.size)
        stage = Stage(ranks, shape, checkpoint.spec.num_hidden_layers, copies)
        context = stage.ranks.part(shape.dcp) if shape.dcp > 1 else None
        if shape.ep > 1 and sharing is None:
            sharing = ExpertRanks.of_instances(stage.ranks, 1)
        backends = backends or Backends()
        to = _Place(dtype, device, backends, stage, context, host, sharing, eplb, with_mtp, drafts)
        return _Loader(checkpoint, to, progress, placer).model()


@dataclass(frozen=True)
class _Routed:
    """How ranks hold the routed experts of a layer.

    sharing: the ranks that each have some of them whole; None: each rank has columns of all.
    num_slots: for how many experts they have room together. held: those in this rank's slots.
    """

    sharing: ExpertRanks | None
    num_slots: int
    held: Sequence[int]

    @classmethod
    def of(cls, sharing: ExpertRanks | None, num_experts: int, num_slots: int) -> _Routed:
        if sharing is None:
            return cls(None, num_experts, range(num_experts))
        placement = first_placement(num_experts, num_slots)
        return cls(sharing, num_slots, slots_of(placement, sharing.place, sharing.num_holders))


@dataclass(frozen=True)
class _Place:
    """The device, dtype and ranks for which a model is made."""

    dtype: torch.dtype
    device: torch.device
    backends: Backends
    stage: Stage
    context: Group | None
    host: HostExperts | None
    sharing: ExpertRanks | None
    eplb: EplbConfig | None
    with_mtp: bool
    drafts: bool


class _Loader:
    """Reads tensors by name and builds the layers from them."""

    def __init__(
        self,
        source: WeightSource,
        to: _Place,
        progress: Callable[[int, int], None] | None,
        placer: Placer,
    ) -> None:
        self._source = source
        self._placer = placer
        self._counting = threading.Lock()
        self._spec = source.spec
        self._dtype = to.dtype
        self._device = to.device
        self._progress = progress
        self._backends = to.backends
        self._host = to.host
        self._expert_device = to.device if to.host is None else torch.device("cpu")
        self._stage = to.stage
        self._group = to.stage.ranks
        self._context = to.context
        self._sharing = to.sharing
        self._eplb = to.eplb
        num_experts = source.spec.n_routed_experts
        num_slots = num_experts + (0 if to.eplb is None else to.eplb.num_redundant_experts)
        self._has_rest = to.sharing is None or to.sharing.has_rest
        self._routed = _Routed.of(to.sharing, num_experts, num_slots)
        # Instances draft at different times, so each has all experts of its MTP layer.
        alone = None if to.sharing is None else ExpertRanks.of_instances(to.stage.ranks, 1)
        self._routed_of_mtp = _Routed.of(alone, num_experts, num_experts)
        self._with_mtp = to.with_mtp and self._has_rest
        self._shapes = tensor_shapes(source.spec, with_mtp=self._with_mtp)
        self._is_held = partial(is_held, source.spec, layers=to.stage.layers, drafts=to.drafts)
        held = [name for name in self._shapes if self._is_held(name)]
        routed = [name for name in held if ROUTED in name]
        own = sum(len(self._routed_in(name).held) for name in routed) // max(1, num_experts)
        self._num_held = own + (len(held) - len(routed)) * self._has_rest
        self._done = 0
        self._told = False  # by what experts are computed: all layers are alike

    def model(self) -> KimiK2:
        spec = self._spec
        self._source.check_names(tensor_shapes(spec))
        table, stage = "model.embed_tokens.weight", self._stage
        embedding, output, moes = None, None, None
        rope, layers = Rope(spec, self._device, self._backends), list[Layer]()
        if self._has_rest:
            if self._is_held(table):
                embedding = Embedding(self._read(table), self._group if self._part(table) else None)
            layers = [self._layer(number, rope) for number in stage.layers]
            output = self._output(embedding) if stage.is_last else None
        else:
            moes = [self._moe_of(number) for number in stage.layers]
        # The one form whose results do not depend on how a prompt was cut.
        fixed = self._backends.deterministic
        rule = (lambda _new, _context: True) if fixed else absorbed_is_cheaper(spec)
        placed = torch.empty(0, dtype=self._dtype, device=self._device)
        mtp = None
        if self._with_mtp and stage.is_last:
            mtp = self._mtp(spec.num_hidden_layers, rope)
        return KimiK2(
            spec, placed, embedding, layers, output, rope, rule, stage, self._context,
            self._sharing, self._eplb, mtp, moes,
        )  # fmt: skip

    def _output(self, embedding: Embedding | None) -> Output:
        """Return the part that makes logits. A tied head uses the weight of `embedding`."""
        norm = self._norm("model.norm.weight", self._spec.rms_norm_eps)
        tied = self._spec.tie_word_embeddings
        if tied:
            assert embedding is not None
            weight = embedding.weight
        else:
            weight = self._read("lm_head.weight")
        cut = not tied and self._part("lm_head.weight") is not None
        head = Head(
            weight,
            tied=tied,
            multiply=self._backends.linear,
            group=self._group if cut else None,
            compiled=self._backends.compiled,
        )
        return Output(norm, head)

    def _mtp(self, number: int, rope: Rope) -> MtpLayer:
        prefix, eps = f"model.layers.{number}.", self._spec.rms_norm_eps
        return MtpLayer(
            self._norm(prefix + "enorm.weight", eps),
            self._norm(prefix + "hnorm.weight", eps),
            self._linear(prefix + "eh_proj"),
            self._layer(number, rope),
            self._norm(prefix + "shared_head.norm.weight", eps),
        )

    def _part(self, name: str) -> Part | None:
        """Return the part of a tensor that this rank holds, or None for all of it."""
        shape, group = self._shapes[name], self._group
        cut = cut_of(self._spec, name, group.size, whole_experts=self._sharing is not None)
        return None if cut is None else cut.part(shape, group.rank, group.size)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(name, self._shapes[name], self._part(name))

    def _read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._tensor(name)
        # A copy even where nothing changes: the source may hand out views of a mapped file.
        kept = tensor.to(device=self._device, dtype=dtype or self._dtype, copy=True)
        self._count()
        return kept

    def _router(self, name: str) -> torch.Tensor:
        """Return a router's weight. It stays as stored where it may: half the bytes, and the same
        logits.
        """
        tensor = self._tensor(name)
        kept = tensor.dtype == self._dtype and self._backends.keeps_router(tensor.dtype)
        dtype = tensor.dtype if kept else torch.float32
        self._count()
        return tensor.to(device=self._device, dtype=dtype, copy=True)

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        self._placer.copy(self._tensor(name), out)
        self._count()

    def _count(self) -> None:
        with self._counting:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._num_held)

    def _stored(self, name: str) -> QuantizedWeight | None:
        """Return the weight as it is stored, if it may stay that way."""
        part = self._part(name)
        widths = [
            size if part is None or part.dim != dim else part.size
            for dim, size in enumerate(self._shapes[name])
        ]
        apart = self._host is not None and ".mlp.experts." in name
        multiplying = self._host.backends if apart and self._host else self._backends
        if not multiplying.keeps(self._dtype, *widths):
            return None
        return self._source.quantized(name, self._shapes[name], part)

    def _norm(self, name: str, eps: float) -> RmsNorm:
        return RmsNorm(self._read(name), eps, self._backends)

    def _layer(self, number: int, rope: Rope) -> Layer:
        spec, prefix = self._spec, f"model.layers.{number}."
        attention = self._attention(prefix + "self_attn.")
        input_norm = self._norm(prefix + "input_layernorm.weight", spec.rms_norm_eps)
        return Layer(
            Mla(
                spec,
                number,
                input_norm,
                attention,
                rope,
                self._backends,
                self._group.size,
                self._context,
            ),
            self._norm(prefix + "post_attention_layernorm.weight", spec.rms_norm_eps),
            self._moe_of(number) or self._dense(prefix + "mlp."),
            fused=self._backends.fuses,
        )

    def _moe_of(self, number: int) -> Moe | None:
        """Return the experts of a layer, or None if it is a dense one."""
        is_dense = number < min(self._spec.first_k_dense_replace, self._spec.num_hidden_layers)
        return None if is_dense else self._moe(f"model.layers.{number}.mlp.")

    def _attention(self, prefix: str) -> MlaWeights:
        spec = self._spec
        compressed = spec.q_lora_rank is not None
        query = prefix + ("q_a_proj" if compressed else "q_proj")
        heads = spec.num_attention_heads // self._group.size
        kv_b = self._read(prefix + "kv_b_proj.weight").view(heads, -1, spec.kv_lora_rank)
        return MlaWeights(
            query_kv_a=self._linear(query, prefix + "kv_a_proj_with_mqa"),
            query_norm=self._norm(prefix + "q_a_layernorm.weight", LATENT_NORM_EPS)
            if compressed
            else None,
            query_b=self._linear(prefix + "q_b_proj") if compressed else None,
            kv_norm=self._norm(prefix + "kv_a_layernorm.weight", LATENT_NORM_EPS),
            key_up=kv_b[:, : spec.qk_nope_head_dim].transpose(1, 2).contiguous(),
            value_up=kv_b[:, spec.qk_nope_head_dim :].contiguous(),
            output=self._summed(prefix + "o_proj"),
        )

    def _linear(self, *names: str) -> Product:
        """Return one linear layer for several with the same input. Their outputs are in the given
        order.
        """
        kept = self._fp8_linear(names)
        if kept is not None:
            return kept
        multiply = self._backends.linear
        weights = [self._read(name + ".weight") for name in names]
        biases = [self._bias_or_none(name) for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if all(bias is None for bias in biases):
            # What several ranks compute must have the same bits, and each would measure for itself.
            alike = self._group.size > 1
            return Linear(weight, multiply=multiply, compiled=self._backends.compiled, alike=alike)
        filled = [
            part.new_zeros(part.shape[0]) if bias is None else bias
            for part, bias in zip(weights, biases, strict=True)
        ]
        return Linear(weight, torch.cat(filled), multiply)

    def _fp8_linear(self, names: Sequence[str]) -> Fp8Linear | None:
        """Return the layer of FP8 weights, if all of them are FP8, without bias, and blocks stay
        whole.
        """
        if any(name + ".bias" in self._shapes for name in names):
            return None
        stored = [self._stored(name + ".weight") for name in names]
        parts = [part for part in stored if part is not None and part.kind == "fp8"]
        if len(parts) != len(names):
            return None
        if any(part.values.shape[0] % FP8_BLOCK for part in parts[:-1]):
            return None
        for _ in names:
            self._count()
        codes = torch.cat([part.values.view(torch.uint8).to(self._device) for part in parts])
        factors = torch.cat([part.factors.float().to(self._device) for part in parts])
        return Fp8Linear(self._backends.fp8_linear(codes.view(torch.float8_e4m3fn), factors))

    def _bias_or_none(self, name: str) -> torch.Tensor | None:
        if name + ".bias" not in self._shapes:
            return None
        bias = self._read(name + ".bias")
        # Of a product that ranks sum, one of them adds it, or all do after the sum.
        once = name.endswith("o_proj") and not self._backends.adds_slabs
        return torch.zeros_like(bias) if once and self._group.rank else bias

    def _summed(self, name: str) -> Product:
        """Return a product whose input columns are cut like those of the whole input."""
        if self._backends.adds_slabs:
            return self._slabbed(name, self._shapes[name + ".weight"][1])
        product = self._linear(name)
        return product if self._group.size == 1 else SummedProduct(product, self._group)

    def _slabbed(self, name: str, columns: int) -> SlabbedProduct:
        """Return a product that is summed in as many slabs as a sum over `columns`."""
        weight, bias = self._read(name + ".weight"), self._bias_or_none(name)
        return SlabbedProduct(weight, bias, self._slabs_of(columns), self._group)

    def _slabs_of(self, columns: int) -> int:
        """Return how many slabs of a sum over `columns` this rank has.

        Raises:
            ConfigError: this many ranks cannot share them.
        """
        slabs = slabs_of(columns)
        if slabs % self._group.size:
            raise ConfigError(f"{slabs} slabs do not divide among {self._group.size} ranks")
        return slabs // self._group.size

    def _gate_up(self, prefix: str) -> Product:
        return self._linear(prefix + "gate_proj", prefix + "up_proj")

    def _dense(self, prefix: str) -> GatedMlp:
        gated = self._backends.op("gated")
        return GatedMlp(self._gate_up(prefix), self._summed(prefix + "down_proj"), gated)

    def _shared(self, prefix: str) -> GatedMlp:
        """Return the experts that all tokens use. Their sums are made like those of the routed
        ones, and with them.
        """
        down = prefix + "down_proj"
        fixed = self._backends.adds_slabs
        columns = self._spec.moe_intermediate_size
        product = self._slabbed(down, columns) if fixed else self._linear(down)
        return GatedMlp(self._gate_up(prefix), product, self._backends.op("gated"))

    def _routed_in(self, name: str) -> _Routed:
        """Return how the routed experts of a layer are held, by the name of a tensor in it."""
        return self._routed_of_mtp if is_of_mtp(self._spec, name) else self._routed

    def _moe(self, prefix: str) -> Moe:
        spec, routed = self._spec, self._routed_in(prefix)
        router = torch.empty(0, spec.hidden_size, device=self._device)
        bias, shared = router.new_empty(0), None
        if self._has_rest:
            router = self._router(prefix + "gate.weight")
            bias = self._read(prefix + "gate.e_score_correction_bias", torch.float32)
        op, experts = self._routed_experts(prefix, routed.held)
        if self._has_rest and spec.n_shared_experts:
            shared = self._shared(prefix + "shared_experts.")
        weights = MoeWeights(router, bias, op, experts, shared)
        slabs, columns = 0, spec.moe_intermediate_size
        if self._backends.adds_slabs:
            slabs = self._slabs_of(columns) if self._sharing is None else slabs_of(columns)
        made = Moe(
            spec, weights, self._backends, self._group, self._host, slabs, routed.sharing,
            routed.num_slots,
        )  # fmt: skip
        if not self._told:
            self._told = True
            where = "" if self._host is None else " in DRAM"
            _log.info("%s%s are computed by %s", op, where, made.experts_by)
        return made

    def _routed_experts(
        self, prefix: str, held: Sequence[int]
    ) -> tuple[str, tuple[torch.Tensor, ...]]:
        """Return the op that computes the experts `held` in this rank's slots, and their
        tensors.
        """
        if not held:
            return "experts", ()
        stored = self._stored(f"{prefix}experts.{held[0]}.gate_proj.weight")
        if stored is None:
            return "experts", self._plain_experts(prefix, held)
        return f"experts_{stored.kind}", self._stored_experts(prefix, held, stored.kind)

    def _plain_experts(self, prefix: str, held: Sequence[int]) -> tuple[torch.Tensor, ...]:
        count, hidden = len(held), self._spec.hidden_size
        inner = self._spec.moe_intermediate_size
        if self._sharing is None:
            inner //= self._group.size
        gate_up, down = (
            torch.empty(count, *shape, dtype=self._dtype, device=self._expert_device)
            for shape in ((2 * inner, hidden), (hidden, inner))
        )
        places = [
            (f"{prefix}experts.{expert}.{part}_proj.weight", place)
            for slot, expert in enumerate(held)
            for part, place in (
                ("gate", gate_up[slot, :inner]),
                ("up", gate_up[slot, inner:]),
                ("down", down[slot]),
            )
        ]
        self._placer.do(partial(self._read_into, name, out) for name, out in places)
        return gate_up, down

    def _stored_experts(
        self, prefix: str, held: Sequence[int], kind: str
    ) -> tuple[torch.Tensor, ...]:
        """Return (gate_up, its factors, down, its factors) of all experts as they are stored.

        Raises:
            CheckpointError: one of them is stored in another way than the first.
        """
        count = len(held)
        made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for part, lead in (("gate", (count, 2)), ("down", (count,))):
            like = self._stored_expert(f"{prefix}experts.{held[0]}.{part}_proj.weight", kind)
            factors = torch.float32 if kind == "fp8" else self._dtype
            made[part] = (
                self._empty(lead, like.values, like.values.dtype),
                self._empty(lead, like.factors, factors),
            )
        places = [
            (
                f"{prefix}experts.{expert}.{part}_proj.weight",
                made["down"][0][slot] if part == "down" else made["gate"][0][slot, number],
                made["down"][1][slot] if part == "down" else made["gate"][1][slot, number],
            )
            for slot, expert in enumerate(held)
            for number, part in enumerate(("gate", "up", "down"))
        ]
        self._placer.do(
            partial(self._place_stored, name, kind, values, factors)
            for name, values, factors in places
        )
        return *made["gate"], *made["down"]

    def _stored_expert(self, name: str, kind: str) -> QuantizedWeight:
        weight = self._source.quantized(name, self._shapes[name], self._part(name))
        if weight is None or weight.kind != kind:
            raise CheckpointError(f"{name}: not stored as {kind}, as other experts are")
        return weight

    def _place_stored(
        self, name: str, kind: str, values: torch.Tensor, factors: torch.Tensor
    ) -> None:
        weight = self._stored_expert(name, kind)
        self._placer.copy(weight.values, values)
        self._placer.copy(weight.factors, factors)
        self._count()

    def _empty(self, lead: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*lead, *like.shape, dtype=dtype, device=self._expert_device)
