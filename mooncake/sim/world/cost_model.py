"""Step durations on hardware that is not available: a roofline over published figures.

Pure; the figures come from `configs/`, each with its source. An instance is one model replica. It
runs on the ranks of a `Shape`, with the ranks of a stage on one node. Without a shape it takes all
GPUs of as many nodes as its weights need. Such nodes share out the experts; each has the rest of
the model and sequences of its own. Instances of a shape that share experts do the same, and step
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake.base import ConfigError, KvLayout, Shape
from mooncake.base.messages import CostSample, Role
from mooncake.engine.chunks import chunk_sizes
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import StepPlan

KV_SHARE_MIN = 0.07
"""An instance takes so many nodes that this share of their HBM is left for the KVCache."""
HBM_USABLE = 0.9
RUNTIME_BYTES_PER_GPU = 4e9
"""Memory for activations, communication buffers and graphs."""
ACTIVATION_BYTES = 2
"""Bytes of a number in the tensors that ranks sum: bfloat16."""


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routed experts. A batch reads only the weights of the experts it touches."""

    num_experts: int
    num_per_token: int
    bytes_total: float
    flops_per_token: float
    """Operations per token in products with these experts, which are a part of the model's."""

    def bytes_read(self, num_tokens: int) -> float:
        """Return the bytes of the experts that `num_tokens` evenly routed tokens touch."""
        missed = (1 - self.num_per_token / self.num_experts) ** num_tokens
        return self.bytes_total * (1 - missed)


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model in one precision."""

    name: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    """The most tensor-parallel ranks that share out the KV by heads; 1 for MLA, whose latent is one
    head.
    """
    kv_bytes_per_token: int
    flops_per_token: float
    """Operations in all matrix products of one token: two per weight."""
    flops_per_pair: float
    """Operations of one token's attention to one other, over all layers, as computed in prefill."""
    dense_bytes: float
    """Bytes of weights that every step reads."""
    whole_bytes: float = 0.0
    """The part of `dense_bytes` that every rank holds and reads whole."""
    context_exchange_bytes: float = 0.0
    """Bytes for one token and layer where ranks share out the KV: queries of all heads, and their
    outputs.
    """
    precision: str
    """The precision of its matrix products, which selects the hardware's peak: "bf16" or "fp8"."""
    max_model_len: int
    experts: Experts | None = None
    sources: dict[str, str] = {}
    """Figure -> where it comes from."""

    def expert_bytes_read(self, num_tokens: int) -> float:
        """Return the bytes of routed experts that a step with `num_tokens` tokens reads."""
        return self.experts.bytes_read(num_tokens) if self.experts is not None else 0.0


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to sum a tensor over the GPUs of a node: seconds = latency + bytes / rate."""

    latency_s: float
    bytes_per_s: float
    """Counts the bytes of the tensor, not of the traffic on the wires."""


class HardwareFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    num_gpus: int
    flops: dict[str, float]
    """The dense peak of one GPU by precision."""
    hbm_bytes: float
    """The HBM of one GPU."""
    hbm_bytes_per_s: float
    """The peak memory bandwidth of one GPU."""
    flops_efficiency: dict[str, float]
    """The share of each peak that prefill reaches."""
    hbm_efficiency: float
    step_overhead_s: float
    """The fixed time of a step for launches, scheduling and sampling."""
    all_reduce: list[AllReduce]
    """Ways to sum over the GPUs of a node; the fastest for a size is taken."""
    dram_bytes_per_s: float
    """The bandwidth between a node's pool and its GPUs."""
    link_bytes_per_s: float
    """The bandwidth between nodes that is reached, all cards together."""
    transfer_latency_s: float
    exchange_latency_s: float = 3e-5
    """The latency of a small exchange between ranks on several nodes."""
    dram_bytes: float | None = None
    """The DRAM of a node, where experts may lie; None: not given."""
    gpu_hour_dollars: float | None = None
    """What one of its GPUs costs for an hour, its part of the node included; None: not given."""
    sources: dict[str, str] = {}
    fitted: dict[str, str] = {}
    """Figures that were fitted, not measured or published -> what they were fitted to. A simulation
    of that same run proves nothing.
    """

    @property
    def remark(self) -> str:
        """A sentence to print below tables: which figures were fitted, and to what."""
        if not self.fitted:
            return f"No figure of {self.name} was fitted."
        parts = []
        for path, target in self.fitted.items():
            value: Any = self
            for name in path.split("."):
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            parts.append(f"{path} = {value:g}, to {target}")
        return f"Fitted figures of {self.name}: {'; '.join(parts)}."


class ExpertSends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows go only to the ranks of their experts. Each row crosses the network once to each other
    node that has one of them, to the rank with the sender's position there, and from there over the
    node's own links. Without this all ranks gather all rows, as engines here do today.
    """

    there_bytes: int = 1
    """Bytes of a number on its way to the experts: FP8."""
    back_bytes: int = ACTIVATION_BYTES
    hidden: bool = False
    """A step is computed as two halves in turn, so that the sends of one overlap with the products
    of the other. Each half reads the weights.
    """
    balance: float = 1.0
    """The mean of the ranks' rows divided by the largest."""

    def __post_init__(self) -> None:
        if not 0 < self.balance <= 1:
            raise ConfigError(f"balance: {self.balance} is not above 0 and at most 1")


class InstanceCost:
    """One instance of a model on hardware: implements `sim.runner.StepCost`."""

    def __init__(
        self,
        model: ModelFigures,
        hardware: HardwareFigures,
        shape: Shape | None = None,
        sends: ExpertSends | None = None,
    ) -> None:
        """shape: the ranks, those of a stage on one node. None: all GPUs of as few nodes as hold
        the weights, where the GPUs of each node share out the KV. sends: how rows get to experts
        that instances share. None: all ranks gather all rows.

        Raises:
            ConfigError: the model does not fit, or not in this shape; or `sends` is given without
                shared experts.
        """
        if sends is not None and (model.experts is None or shape is None or shape.dp == 1):
            raise ConfigError("sends to experts: there are no instances with experts in common")
        self._sends = sends
        if model.precision not in hardware.flops:
            raise ConfigError(
                f"{model.name} computes in {model.precision}, which {hardware.name} does not have"
            )
        self.model = model
        self.hardware = hardware
        self.num_nodes = 1
        if shape is None:
            self.shape = _all_of_a_node(model, hardware)
            self.num_nodes = _num_nodes(model, hardware, self.shape)
        else:
            self.shape = shape
            _check(model, hardware, shape)
        self._stage_gpus = self.num_nodes * self.shape.tp
        self.num_gpus = self._stage_gpus * self.shape.pp

        def reached(precision: str) -> float:
            peak = hardware.flops[precision] * hardware.flops_efficiency[precision]
            return self._stage_gpus * peak

        self._gpu_hbm = hardware.hbm_bytes_per_s * hardware.hbm_efficiency
        experts = model.experts.flops_per_token if model.experts is not None else 0.0
        self._token_s = (model.flops_per_token - experts) / reached(model.precision)
        self._expert_token_s = experts / reached(model.precision) / self.shape.dp
        if sends is not None:
            self._expert_token_s /= sends.balance
        # Attention runs in bf16, whatever precision the weights have.
        self._pair_s = model.flops_per_pair / reached("bf16")
        holders = self.num_nodes * _kv_shares(model, self.shape)
        self._context_s = model.kv_bytes_per_token / holders / self._gpu_hbm
        self._weights_s: dict[int, float] = {}

    @property
    def kv_tokens(self) -> int:
        """The number of tokens whose KV fits into HBM beside the weights."""
        return _kv_tokens(self.model, self.hardware, self.num_nodes, self.shape)

    @property
    def page_copies(self) -> int:
        """How many ranks of a stage hold each page."""
        return self.shape.tp // _kv_shares(self.model, self.shape)

    @property
    def node_share(self) -> float:
        """How many nodes an instance takes; below 1: a part of one node."""
        return self.num_gpus / self.hardware.num_gpus

    @property
    def link_bytes_per_s(self) -> float:
        """The network bandwidth of the whole instance, in bytes per second: the cards of all its
        GPUs.
        """
        return self.node_share * self.hardware.link_bytes_per_s

    @property
    def described(self) -> str:
        """A description of the instance, for people."""
        nodes = f" on each of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.shape}{nodes}, {self.kv_tokens:,} tokens of KV"

    def send_s(self, num_tokens: int) -> float:
        """Return how long the activations of a step take from one stage to the next, over the cards
        of its GPUs.
        """
        if self.shape.pp == 1:
            return 0.0
        hardware = self.hardware
        link = hardware.link_bytes_per_s * self.shape.tp / hardware.num_gpus
        num_bytes = num_tokens * self.model.hidden_size * ACTIVATION_BYTES
        return hardware.transfer_latency_s + num_bytes / link

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of a step in seconds, in each of its stages. Instances that share its
        experts are assumed to have as many tokens in their steps.
        """
        return self._seconds(plan, None)

    def seconds_together(self, plan: StepPlan, others: Sequence[int]) -> float:
        """Return the same when each of the other instances has the given number of tokens."""
        return self._seconds(plan, others)

    def _seconds(self, plan: StepPlan, others: Sequence[int] | None) -> float:
        num_tokens = num_pairs = num_context = 0
        exchanged = 0.0
        for slot in plan.slots:
            new, start = len(slot.tokens), slot.start
            num_tokens += new
            num_pairs += new * start + new * (new + 1) // 2
            num_context += start + new
            exchanged += self._exchanged(new, start + new)
        return self.step_s(num_tokens, num_pairs, num_context, exchanged, others)

    def _exchanged(self, new: float, context: float) -> float:
        """Return the bytes per layer that ranks exchange for one sequence where they share out the
        KV: its queries and outputs, or its context, whichever is less.
        """
        if self.shape.dcp == 1:
            return 0.0
        model = self.model
        latents = context * model.kv_bytes_per_token / model.num_layers
        return min(new * model.context_exchange_bytes, latents)

    def step_s(
        self,
        num_tokens: int,
        num_pairs: int,
        num_context: int,
        exchanged: float = 0.0,
        others: Sequence[int] | None = None,
    ) -> float:
        """Return the seconds of a step in each of its stages, which count as equal.

        num_pairs: (token, attended token) pairs. num_context: the tokens whose KV is read.
        exchanged: the bytes per layer that ranks exchange for them. others: the tokens of each
        instance that shares its experts; None: the same as this one's.
        """
        if others is None:
            others = (num_tokens,) * (self.shape.dp - 1)
        all_tokens = num_tokens + sum(others)
        halves = 2 if self._sends is not None and self._sends.hidden else 1
        weights_s = halves * self._weights_read_s(all_tokens // halves)
        flops_s = num_tokens * self._token_s + all_tokens * self._expert_token_s
        products_s = max(flops_s, weights_s)
        attention_s = max(num_pairs * self._pair_s, num_context * self._context_s)
        sync_s = self._sync_s(num_tokens / self.num_nodes, exchanged / self.num_nodes)
        computed_s = sync_s + products_s + attention_s
        spread_s = self._spread_s(max(num_tokens, *others) if others else 0)
        layers_s = max(computed_s, spread_s) if halves > 1 else computed_s + spread_s
        return self.hardware.step_overhead_s + layers_s / self.shape.pp

    def _weights_read_s(self, num_tokens: int) -> float:
        seconds = self._weights_s.get(num_tokens)
        if seconds is None:
            seconds = self._rank_bytes_read(num_tokens) / self._gpu_hbm
            self._weights_s[num_tokens] = seconds
        return seconds

    def _rank_bytes_read(self, num_tokens: int) -> float:
        """Return the weight bytes that one rank of each stage, with the same part of each layer,
        reads in a step.
        """
        model, tp = self.model, self.shape.tp
        cut = model.dense_bytes - model.whole_bytes
        experts = model.expert_bytes_read(num_tokens) / (self._stage_gpus * self.shape.dp)
        return model.whole_bytes + cut / tp + experts

    def _sync_s(self, num_tokens: float, exchanged: float) -> float:
        """Return how long the ranks of a node communicate in a step, over all stages: two sums per
        layer, and where they share out the KV, their exchange for it. A gather is half of a sum.
        """
        if self.shape.tp == 1:
            return 0.0
        model = self.model
        layer_s = 2 * self._all_reduce_s(num_tokens * model.hidden_size * ACTIVATION_BYTES)
        if self.shape.dcp > 1:
            layer_s += self._all_reduce_s(exchanged) / 2
        return model.num_layers * layer_s

    def _spread_s(self, num_rows: int) -> float:
        """Return how long the instances that share experts take to bring each rank the rows of all,
        padded to `num_rows` of each, and to bring the sums back, over all layers
        (`model.parallel.exchange`).
        """
        model, hardware, shape = self.model, self.hardware, self.shape
        if shape.dp == 1:
            return 0.0
        if self._sends is not None:
            return self._sent_s(num_rows, self._sends)
        row_bytes = model.hidden_size * ACTIVATION_BYTES
        away = shape.dp - min(shape.dp, hardware.num_gpus // shape.tp)  # ranks on other nodes
        if not away:
            return model.num_layers * self._all_reduce_s(shape.dp * num_rows * row_bytes)
        card = hardware.link_bytes_per_s / hardware.num_gpus
        each_s = hardware.exchange_latency_s + away * num_rows * row_bytes / card
        return model.num_layers * 2 * each_s

    def _sent_s(self, num_rows: int, sends: ExpertSends) -> float:
        """Return how long rows take to the ranks of their experts, and sums take back, over all
        layers. The network and the links of a node carry them at the same time. The experts of a
        row are drawn evenly.

        num_rows: the rows of the instance that has most.
        """
        model, hardware, shape = self.model, self.hardware, self.shape
        assert model.experts is not None
        chosen, ranks = model.experts.num_per_token, shape.ep
        nodes = math.ceil(ranks / hardware.num_gpus)
        of_rank = num_rows / shape.tp / sends.balance
        row_bytes = model.hidden_size * (sends.there_bytes + sends.back_bytes)
        away = (nodes - 1) * (1 - (1 - 1 / nodes) ** chosen)
        all_ranks = (ranks - 1) * (1 - (1 - 1 / ranks) ** chosen)
        network_s = of_rank * away * row_bytes * hardware.num_gpus / hardware.link_bytes_per_s
        inside_s = of_rank * all_ranks * row_bytes / self._node_link
        latency_s = 2 * hardware.exchange_latency_s if nodes > 1 else 0.0
        return model.num_layers * (latency_s + max(network_s, inside_s))

    @property
    def _node_link(self) -> float:
        """Bytes per second that a GPU sends to others of its node. In a ring sum, it sends twice
        all but one GPU's part of the tensor.
        """
        num = self.hardware.num_gpus
        return max(way.bytes_per_s for way in self.hardware.all_reduce) * 2 * (num - 1) / num

    def _all_reduce_s(self, num_bytes: float) -> float:
        return min(way.latency_s + num_bytes / way.bytes_per_s for way in self.hardware.all_reduce)

    def prefill_s(self, num_tokens: int, num_cached: int, chunk_tokens: int) -> float:
        """Return the seconds to compute a prompt's tokens from `num_cached` on. The prompt is cut
        into chunks as an engine cuts it, and these follow one another through the stages.
        """
        profile = self.profile(Role.PREFILL, chunk_tokens, 1) if self.shape.pp > 1 else ()
        cost, start = StepCostModel(profile, self.shape.pp), num_cached
        ends_s = [0.0] * self.shape.pp
        for new in chunk_sizes(cost, chunk_tokens, start, num_tokens - start):
            pairs = new * start + new * (new + 1) // 2
            step_s = self.step_s(new, pairs, start + new, self._exchanged(new, start + new))
            comes_s = self.send_s(0)  # the last stage's message to the first about a step
            for stage, free_s in enumerate(ends_s):
                ends_s[stage] = max(comes_s, free_s) + step_s
                comes_s = ends_s[stage] + self.send_s(new)
            start += new
        return ends_s[-1]

    def profile(self, role: Role, chunk_tokens: int, max_batch: int) -> list[CostSample]:
        """Return the start-up profile that `mooncake profile` would measure on this instance."""
        if role is Role.PREFILL:
            shapes = [
                (new, start, 1)
                for new in _grid(64, chunk_tokens)
                for start in (0, 4096, 16384, 65536, 131072)
            ]
        else:
            shapes = [
                (batch, batch * context, batch)
                for batch in _grid(1, max_batch)
                for context in (1024, 8192, 32768)
            ]
        samples = [
            CostSample(new, context, sequences, self._shape_s(new, context, sequences))
            for new, context, sequences in shapes
        ]
        return samples if role is Role.PREFILL else [each.of_streams() for each in samples]

    def _shape_s(self, new: int, context: int, sequences: int) -> float:
        each = new / sequences
        pairs = round(each * context + new * (each + 1) / 2)
        exchanged = sequences * self._exchanged(each, (context + new) / sequences)
        return self.step_s(new, pairs, context + new, exchanged)


def sim_layout(model: ModelFigures, block_tokens: int, num_groups: int) -> KvLayout:
    """Return the layout of simulated blocks with the bytes of the model. Its layers form
    `num_groups` groups that are pushed together, so that the simulator needs fewer events.

    Raises:
        ConfigError: the bytes cannot be divided into this many groups.
    """
    width, rest = divmod(model.kv_bytes_per_token, num_groups)
    if rest:
        raise ConfigError(
            f"{model.name}: {model.kv_bytes_per_token} bytes of KV a token cannot be divided into "
            f"{num_groups} groups"
        )
    return KvLayout(
        num_layers=num_groups,
        block_tokens=block_tokens,
        kv_width=width,
        dtype="float8_e4m3fn",  # one byte: the width is in bytes
        fingerprint=f"sim-{model.name}-{block_tokens}",
    )


def _grid(first: int, last: int) -> Sequence[int]:
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def _kv_shares(model: ModelFigures, shape: Shape) -> int:
    """Return how many ranks share out a token's KV."""
    return min(model.num_kv_heads, shape.tp) * shape.dcp


def _all_of_a_node(model: ModelFigures, hardware: HardwareFigures) -> Shape:
    tp = hardware.num_gpus
    return Shape(tp=tp, dcp=tp // min(model.num_kv_heads, tp))


def _kv_tokens(model: ModelFigures, hardware: HardwareFigures, num_nodes: int, shape: Shape) -> int:
    each = hardware.hbm_bytes * HBM_USABLE - RUNTIME_BYTES_PER_GPU
    cut = (model.dense_bytes - model.whole_bytes) / shape.tp
    experts = model.experts.bytes_total if model.experts else 0.0
    experts /= num_nodes * shape.tp * shape.dp
    left = each - (model.whole_bytes + cut + experts) / shape.pp
    per_token = model.kv_bytes_per_token / shape.pp
    return int(left * num_nodes * _kv_shares(model, shape) / per_token)


def _check(model: ModelFigures, hardware: HardwareFigures, shape: Shape) -> None:
    """Raise ConfigError unless an instance of this shape fits a node. The message says which shape
    would.
    """
    if shape.tp > hardware.num_gpus:
        raise ConfigError(
            f"shape: {shape.tp} ranks of a stage lie on one node, and {hardware.name} has "
            f"{hardware.num_gpus} GPUs; give at most tp{hardware.num_gpus}"
        )
    if shape.dp > 1 and shape.pp > 1:
        raise ConfigError(
            f"shape: {shape}: instances of several stages share no experts; leave out -pp{shape.pp}"
        )
    if _kv_shares(model, shape) > shape.tp:
        raise ConfigError(
            f"shape: {shape}: the {model.num_kv_heads} KV heads of {model.name} are shared out "
            f"among {min(model.num_kv_heads, shape.tp)} ranks already, so dcp can be at most "
            f"{shape.tp // min(model.num_kv_heads, shape.tp)}"
        )
    if _kv_tokens(model, hardware, 1, shape) >= model.max_model_len:
        return
    node = _all_of_a_node(model, hardware)
    if _kv_tokens(model, hardware, 1, node) >= model.max_model_len:
        cure = f"{node} would"
    else:
        nodes = _num_nodes(model, hardware, node)
        cure = "no shape of one node does; "
        stages = msgspec.structs.replace(node, pp=nodes)
        if _kv_tokens(model, hardware, 1, stages) >= model.max_model_len:
            cure += f"{stages} would, or "
        cure += f"leave `shape` out for {nodes} nodes an instance"
    raise ConfigError(
        f"shape: {shape} on {hardware.name} leaves room for "
        f"{max(0, _kv_tokens(model, hardware, 1, shape)):,} tokens of {model.name}'s KV, less than "
        f"one sequence of {model.max_model_len:,}; {cure}"
    )


def _num_nodes(model: ModelFigures, hardware: HardwareFigures, shape: Shape) -> int:
    for num_nodes in range(1, 65):
        total = num_nodes * hardware.num_gpus * hardware.hbm_bytes
        tokens = _kv_tokens(model, hardware, num_nodes, shape)
        if tokens * model.kv_bytes_per_token >= KV_SHARE_MIN * total:
            return num_nodes
    raise ConfigError(f"{model.name} does not fit 64 nodes of {hardware.name}")
