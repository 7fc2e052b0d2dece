"""What attention and routed experts on different GPUs would give, by a roofline of one decode step:
the best of many splits, batches and numbers of micro-batches within a limit.

Pure; the figures of models and hardware are those of the simulator. Sequences are all as long, and
experts are drawn evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake.sim.world.cost_model import (
    ACTIVATION_BYTES,
    HBM_USABLE,
    RUNTIME_BYTES_PER_GPU,
    HardwareFigures,
    ModelFigures,
)

THERE_BYTES = 1
"""Bytes of a number on its way to the experts: FP8. Sums come back in bfloat16."""
MOST_BATCHES = 4
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)
"""Sequences of a GPU with attention."""
EMBEDDING_BYTES = 163_840 * 7168 * 2
"""Bytes of Kimi-K2's embedding in bfloat16; `dense_bytes` leaves them out."""
ABSORBED_FLOPS = 2 * 64 * (576 + 512) * 61
"""Operations of one new token's attention to one other, over all layers of Kimi-K2: 64 heads,
scores over the latent and its rotated part, sums over the latent. The simulator's own figure is
that of prompts, whose keys are expanded.
"""


@dataclass(frozen=True, kw_only=True)
class Split:
    """GPUs with attention, and GPUs with experts; the same ones if `experts` is None."""

    attention: HardwareFigures
    num_attention: int
    experts: HardwareFigures | None
    num_experts: int
    batch: int
    """Sequences of each GPU with attention."""
    num_batches: int
    """The number of micro-batches into which they are cut; these take turns."""
    gathers: bool = False
    """Whether all rows go to all workers, as here today, or only to those of their experts."""

    @property
    def holders(self) -> HardwareFigures:
        return self.experts or self.attention

    @property
    def dollars(self) -> float:
        """What an hour costs."""
        prices = [self.attention.gpu_hour_dollars, self.holders.gpu_hour_dollars]
        assert None not in prices, "these kinds of hardware have prices"
        [own, theirs] = [price or 0.0 for price in prices]
        return self.num_attention * own + (self.num_experts * theirs if self.experts else 0.0)

    def __str__(self) -> str:
        own = f"{self.num_attention} {_kind(self.attention)}"
        return own if self.experts is None else f"{own} + {self.num_experts} {_kind(self.experts)}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decode step of a split."""

    split: Split
    attention_s: float
    """Seconds for all micro-batches on a GPU with attention; the next three are for all
    micro-batches, too."""
    experts_s: float
    there_s: float
    back_s: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.split.num_attention * self.split.batch / self.seconds

    @property
    def tokens_per_dollar(self) -> float:
        return 3600 * self.tokens_per_s / self.split.dollars


def step_of(model: ModelFigures, split: Split, context: int) -> Step:
    """Return what a step takes when each sequence attends to `context` tokens."""
    experts = model.experts
    assert experts is not None
    own, theirs, turns = split.attention, split.holders, split.num_batches
    rows = split.batch / turns
    all_rows = rows * split.num_attention
    dense_s = max(
        rows * (model.flops_per_token - experts.flops_per_token) / _flops(own, model.precision),
        model.dense_bytes / _hbm(own),
    )
    pairs = rows * context
    kv_s = max(pairs * ABSORBED_FLOPS / _flops(own, "bf16"),
               pairs * model.kv_bytes_per_token / _hbm(own))  # fmt: skip
    experts_s = max(
        all_rows * experts.flops_per_token / _flops(theirs, model.precision),
        experts.bytes_read(round(all_rows)) / _hbm(theirs),
    ) / split.num_experts  # fmt: skip
    there_s, back_s = _ways(model, split, rows)
    attention_s = dense_s + kv_s
    chain_s = attention_s + there_s + experts_s + back_s
    if split.experts is None:  # the same GPUs compute both, and their cards carry both ways
        busiest_s = max(attention_s + experts_s, there_s + back_s)
    else:
        busiest_s = max(attention_s, experts_s, there_s, back_s)
    layers_s = max(turns * busiest_s, chain_s)
    overhead_s = max(own.step_overhead_s, theirs.step_overhead_s)
    return Step(
        split=split, attention_s=turns * attention_s, experts_s=turns * experts_s,
        there_s=turns * there_s, back_s=turns * back_s, seconds=overhead_s + layers_s,
    )  # fmt: skip


def _ways(model: ModelFigures, split: Split, rows: float) -> tuple[float, float]:
    """Return how long a micro-batch is on its way to the experts, and back, over all layers. Rows
    cross the network once to each node that has one of their experts; inside a node links are no
    limit.
    """
    own, theirs, experts = split.attention, split.holders, model.experts
    assert experts is not None
    latency_s = max(own.exchange_latency_s, theirs.exchange_latency_s)
    if split.gathers:
        members = split.num_attention + (split.num_experts if split.experts else 0)
        each = rows * (members - 1) * model.hidden_size * ACTIVATION_BYTES
        way_s = model.num_layers * (latency_s + each / min(_card(own), _card(theirs)))
        return way_s, way_s
    nodes = math.ceil(split.num_experts / theirs.num_gpus)
    met = nodes * (1 - (1 - 1 / nodes) ** experts.num_per_token)
    if split.experts is None:  # one of the nodes is the row's own
        met *= (nodes - 1) / nodes
    sent = rows * met * model.hidden_size
    come = sent * split.num_attention / split.num_experts
    slowest_s = max(sent / _card(own), come / _card(theirs))
    ways = (THERE_BYTES, ACTIVATION_BYTES)
    there_s, back_s = (model.num_layers * (latency_s + each * slowest_s) for each in ways)
    return there_s, back_s


def fits(model: ModelFigures, split: Split, context: int) -> bool:
    """Return whether weights, and the KV of all sequences, have room."""
    assert model.experts is not None
    dense = model.dense_bytes + EMBEDDING_BYTES + split.batch * context * model.kv_bytes_per_token
    share = model.experts.bytes_total / split.num_experts
    if split.experts is None:
        return dense + share <= _usable(split.attention)
    return dense <= _usable(split.attention) and share <= _usable(split.experts)


def best(
    model: ModelFigures,
    attention: HardwareFigures,
    experts: HardwareFigures | None,
    *,
    context: int,
    limit_s: float,
    most_batches: int = MOST_BATCHES,
    gathers: bool = False,
) -> Step | None:
    """Return the step with most tokens for a dollar that takes at most `limit_s`; None: there is
    none.
    """
    steps = (
        step_of(model, split, context)
        for split in _splits(model, attention, experts, most_batches, gathers)
        if fits(model, split, context)
    )
    kept = [step for step in steps if step.seconds <= limit_s]
    return max(kept, key=lambda step: step.tokens_per_dollar, default=None)


def _splits(
    model: ModelFigures,
    attention: HardwareFigures,
    experts: HardwareFigures | None,
    most_batches: int,
    gathers: bool,
) -> Iterator[Split]:
    """Yield whole nodes of both kinds, with as many experts on each GPU."""
    assert model.experts is not None
    sizes = [n for n in range(8, 193, 8) if not model.experts.num_experts % n]
    for num_experts in sizes:
        for num_attention in [num_experts] if experts is None else range(8, 193, 8):
            for batch in BATCHES:
                for turns in range(1, most_batches + 1):
                    yield Split(
                        attention=attention, num_attention=num_attention, experts=experts,
                        num_experts=num_experts, batch=batch, num_batches=turns, gathers=gathers,
                    )  # fmt: skip


def _flops(hardware: HardwareFigures, precision: str) -> float:
    return hardware.flops[precision] * hardware.flops_efficiency[precision]


def _hbm(hardware: HardwareFigures) -> float:
    return hardware.hbm_bytes_per_s * hardware.hbm_efficiency


def _card(hardware: HardwareFigures) -> float:
    """Return the bytes per second that the cards of a node carry for each of its GPUs."""
    return hardware.link_bytes_per_s / hardware.num_gpus


def _usable(hardware: HardwareFigures) -> float:
    return hardware.hbm_bytes * HBM_USABLE - RUNTIME_BYTES_PER_GPU


def _kind(hardware: HardwareFigures) -> str:
    return hardware.name.partition("x")[0].upper()
