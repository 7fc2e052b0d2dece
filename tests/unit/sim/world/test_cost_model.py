"""Analytic costs against published figures, and the shape a cost must have."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import ConfigError, Role
from mooncake.engine.plan import StepPlan, StepSlot
from mooncake.scheduler.cost import StepCostModel
from mooncake.sim.world.cost_model import InstanceCost, sim_layout
from tests.support.sim.traces import hardware, model

PAIRS = [
    ("llama3-70b", "a800x8"), ("kimi-k2-instruct", "h200x8"), ("kimi-k2-instruct", "h800x8"),
    ("kimi-k2-thinking", "h200x8"), ("kimi-k2-thinking", "h800x8"),
]  # fmt: skip
CHUNK = 8192


@pytest.fixture(params=PAIRS, ids="-".join)
def cost(request: pytest.FixtureRequest) -> InstanceCost:
    return InstanceCost(model(request.param[0]), hardware(request.param[1]))


def test_llama_prefill_is_that_of_the_paper() -> None:
    """Figure 14: 27.6 s for 128k tokens on 8 A800."""
    seconds = InstanceCost(model(), hardware()).prefill_s(131072, 0, CHUNK)
    assert seconds == pytest.approx(27.6, rel=0.1)


def test_k2_prefill_is_that_of_the_record() -> None:
    """56k tokens/s a node at prompts of 2,000 tokens (LMSYS): two nodes here, one prompt a step."""
    cost = InstanceCost(model("kimi-k2-instruct"), hardware("h200x8"))
    rate = 16_000 / cost.step_s(16_000, 8 * 2000 * 2001 // 2, 16_000) / cost.num_nodes
    assert rate == pytest.approx(56_000, rel=0.2)


def test_k2_int4_fits_one_node_of_h200_with_the_tokens_vllm_sees() -> None:
    """vLLM: 715,072 tokens a rank without sharing, so 8 times that with DCP8."""
    cost = InstanceCost(model("kimi-k2-thinking"), hardware("h200x8"))
    assert cost.num_nodes == 1
    assert cost.kv_tokens == pytest.approx(8 * 715_072, rel=0.2)


def test_k2_fp8_needs_two_nodes() -> None:
    assert InstanceCost(model("kimi-k2-instruct"), hardware("h200x8")).num_nodes == 2


def test_more_of_anything_takes_longer(cost: InstanceCost) -> None:
    assert cost.step_s(64, 0, 0) >= cost.step_s(1, 0, 0)
    assert cost.step_s(1, 1, 200_000) > cost.step_s(1, 1, 1)
    assert cost.prefill_s(20_000, 0, CHUNK) > cost.prefill_s(20_000, 10_000, CHUNK) > 0
    assert cost.prefill_s(5000, 5000, CHUNK) == 0


def test_a_plan_costs_what_its_slots_do(cost: InstanceCost) -> None:
    slots = [
        StepSlot(sequence_id=1, start=100, tokens=[1], pages=[], sample=True),
        StepSlot(sequence_id=2, start=0, tokens=[1, 2, 3], pages=[], sample=False),
    ]
    plan = StepPlan(step_id=0, starts=[], slots=slots, ended=[])
    assert cost.seconds(plan) == cost.step_s(4, 101 + 6, 101 + 3)


def test_the_conductors_model_learns_it_from_the_profile(cost: InstanceCost) -> None:
    prefill = StepCostModel(cost.profile(Role.PREFILL, CHUNK, 1))
    for num_tokens, cached in ((6000, 0), (30_000, 12_000), (90_000, 0)):
        truth = cost.prefill_s(num_tokens, cached, CHUNK)
        assert prefill.prefill_s(num_tokens - cached, cached, CHUNK) == pytest.approx(
            truth, rel=0.25
        )
    decode = StepCostModel(cost.profile(Role.DECODE, CHUNK, 128))
    for batch, context in ((4, 8000), (16, 8000), (64, 4000)):
        truth = cost.step_s(batch, batch * context, batch * context)
        assert decode.tbt_s(batch, batch * context) == pytest.approx(truth, rel=0.5)


def test_the_layout_keeps_the_bytes(cost: InstanceCost) -> None:
    layout = sim_layout(cost.model, 512, 4)
    assert layout.kv_bytes_per_token == cost.model.kv_bytes_per_token
    with pytest.raises(ConfigError, match="groups"):
        sim_layout(msgspec.structs.replace(cost.model, kv_bytes_per_token=1001), 512, 4)


def test_every_figure_has_its_source() -> None:
    for name in {pair[0] for pair in PAIRS}:
        wanted = {"kv_bytes_per_token", "flops_per_token", "flops_per_pair", "dense_bytes"}
        assert wanted <= set(model(name).sources)
    for name in {pair[1] for pair in PAIRS}:
        wanted = {"flops", "flops_efficiency", "hbm_bytes", "hbm_bytes_per_s", "link_bytes_per_s"}
        assert wanted <= set(hardware(name).sources)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8"):
        InstanceCost(model("kimi-k2-instruct"), hardware("a800x8"))
