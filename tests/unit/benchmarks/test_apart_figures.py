"""Attention and experts on different GPUs: a roofline whose limits are known by hand."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from benchmarks.support.apart_figures import Split, best, fits, step_of
from mooncake.launch.config.shipped import figures
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures

K2 = figures("kimi-k2-instruct", ModelFigures)
H800, H20 = (figures(name, HardwareFigures) for name in ("h800x8", "h20x8"))
APART = Split(
    attention=H800, num_attention=16, experts=H20, num_experts=16, batch=64, num_batches=1
)


def test_one_batch_is_a_chain_and_more_are_as_long_as_the_busiest() -> None:
    step = step_of(K2, APART, 4096)
    parts = step.attention_s + step.experts_s + step.there_s + step.back_s
    assert step.seconds == pytest.approx(H800.step_overhead_s + parts)
    step = step_of(K2, dataclasses.replace(APART, batch=256, num_batches=4), 4096)
    busiest = max(step.attention_s, step.experts_s, step.there_s, step.back_s)
    chain = (step.attention_s + step.experts_s + step.there_s + step.back_s) / 4
    assert step.seconds == pytest.approx(H800.step_overhead_s + max(busiest, chain))


def test_what_a_micro_batch_reads_anew() -> None:
    """The weights of attention, and of the experts that it touches; KV is read once."""
    one, two = (step_of(K2, dataclasses.replace(APART, num_batches=n), 4096) for n in (1, 2))
    dense_s = K2.dense_bytes / (H800.hbm_bytes_per_s * H800.hbm_efficiency)
    assert two.attention_s - one.attention_s == pytest.approx(dense_s)
    assert K2.experts is not None
    read = 2 * K2.experts.bytes_read(512) - K2.experts.bytes_read(1024)
    assert two.experts_s - one.experts_s == pytest.approx(
        read / 16 / (H20.hbm_bytes_per_s * H20.hbm_efficiency)
    )


def test_rows_cross_the_network_once_to_each_node_of_their_experts() -> None:
    """Of two nodes a row of eight experts meets both, but for one in 128."""
    none = msgspec.structs.replace(H800, exchange_latency_s=0.0)
    split = dataclasses.replace(
        APART, attention=none, experts=msgspec.structs.replace(H20, exchange_latency_s=0.0)
    )
    step = step_of(K2, split, 4096)
    sent = 64 * 2 * (1 - 2**-8) * K2.hidden_size * K2.num_layers
    assert step.there_s == pytest.approx(sent / (H800.link_bytes_per_s / 8))
    assert step.back_s == pytest.approx(2 * step.there_s)
    fewer = step_of(K2, dataclasses.replace(split, num_attention=32), 4096)
    assert fewer.there_s == pytest.approx(2 * step.there_s), "the experts' cards are the limit"
    gathered = step_of(K2, dataclasses.replace(split, gathers=True), 4096)
    assert gathered.there_s == gathered.back_s > 5 * step.there_s


def test_what_fits() -> None:
    assert fits(K2, APART, 4096)
    assert not fits(K2, dataclasses.replace(APART, num_experts=8), 4096), "127 GB of experts each"
    assert not fits(K2, dataclasses.replace(APART, batch=256), 4096), "74 GB of KV"
    both = Split(
        attention=H800, num_attention=16, experts=None, num_experts=16, batch=8, num_batches=1
    )
    assert not fits(K2, both, 4096), "63 GB of experts beside the rest"
    assert fits(K2, dataclasses.replace(both, num_attention=24, num_experts=24), 4096)


def test_the_best_keeps_the_limit_and_none_that_is_tried_is_better() -> None:
    found = best(K2, H800, H20, context=4096, limit_s=0.05)
    assert found is not None
    assert found.seconds <= 0.05
    for change in ({"batch": 8}, {"num_batches": 1}, {"num_attention": 8}):
        other = step_of(K2, dataclasses.replace(found.split, **change), 4096)
        if other.seconds <= 0.05 and fits(K2, other.split, 4096):
            assert other.tokens_per_dollar <= found.tokens_per_dollar
    assert best(K2, H800, H20, context=4096, limit_s=0.004) is None


def test_dollars_are_those_of_all_gpus() -> None:
    assert APART.dollars == pytest.approx(16 * 3.0 + 16 * 1.05)
    assert dataclasses.replace(APART, experts=None).dollars == pytest.approx(16 * 3.0)
    step = step_of(K2, APART, 4096)
    assert step.tokens_per_dollar == pytest.approx(3600 * 16 * 64 / step.seconds / APART.dollars)
