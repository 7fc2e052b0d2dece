"""Analytic costs against published figures, and the shape a cost must have."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import ConfigError, Role, Shape
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import StepPlan, StepSlot
from mooncake.sim.world.cost_model import AllReduce, ExpertSends, InstanceCost, sim_layout
from tests.support.sim.traces import hardware, model

PAIRS = [
    ("llama3-70b", "a800x8"), ("kimi-k2-instruct", "h200x8"), ("kimi-k2-instruct", "h800x8"),
    ("kimi-k2-thinking", "h200x8"), ("kimi-k2-thinking", "h800x8"),
]  # fmt: skip
CHUNK = 8192


def plan_of(*slots: tuple[int, int]) -> StepPlan:
    """Return a step of sequences with so many tokens before, and new ones."""
    return StepPlan(
        step_id=0,
        starts=[],
        slots=[
            StepSlot(sequence_id=index, start=start, tokens=[1] * new, pages=[], sample=True)
            for index, (start, new) in enumerate(slots)
        ],
        ended=[],
    )


@pytest.fixture(params=PAIRS, ids="-".join)
def cost(request: pytest.FixtureRequest) -> InstanceCost:
    return InstanceCost(model(request.param[0]), hardware(request.param[1]))


def test_llama_prefill_gives_the_figure_it_was_fitted_to() -> None:
    """Figure 14: 27.6 s for 128k tokens on 8 A800. The formula has not changed since the fit."""
    assert "27.6 s" in hardware().fitted["flops_efficiency.bf16"]
    seconds = InstanceCost(model(), hardware()).prefill_s(131072, 0, CHUNK)
    assert seconds == pytest.approx(27.6, rel=0.1)


def test_k2_prefill_gives_the_figure_it_was_fitted_to() -> None:
    """56k tokens/s a node at prompts of 2,000 tokens (LMSYS): two nodes here, one prompt a step.
    The formula has not changed since the fit.
    """
    assert "56,000" in hardware("h200x8").fitted["flops_efficiency.fp8"]
    cost = InstanceCost(model("kimi-k2-instruct"), hardware("h200x8"))
    rate = 16_000 / cost.step_s(16_000, 8 * 2000 * 2001 // 2, 16_000) / cost.num_nodes
    assert rate == pytest.approx(56_000, rel=0.2)


@pytest.mark.parametrize(("shape", "published"), [("tp8", 715_072), ("tp8-dcp8", 5_721_088)])
def test_k2_int4_has_the_tokens_vllm_has_in_each_shape(shape: str, published: int) -> None:
    """vLLM's K2-Thinking recipe on 8 x H200. Without DCP every rank holds the KV of all tokens."""
    cost = InstanceCost(model("kimi-k2-thinking"), hardware("h200x8"), Shape.parse(shape))
    assert cost.num_nodes == 1
    assert cost.kv_tokens == pytest.approx(published, rel=0.1)


def test_without_a_shape_an_instance_is_whole_nodes_and_says_so() -> None:
    one = InstanceCost(model("kimi-k2-thinking"), hardware("h200x8"))
    assert (str(one.shape), one.num_nodes, one.node_share) == ("tp8-dcp8", 1, 1)
    assert one.described == f"tp8-dcp8, {one.kv_tokens:,} tokens of KV"
    two = InstanceCost(model("kimi-k2-instruct"), hardware("h200x8"))
    assert two.described.startswith("tp8-dcp8 on each of 2 nodes, ")
    llama = InstanceCost(model(), hardware())
    assert str(llama.shape) == "tp8", "its eight KV heads are shared out already"


def test_a_part_of_a_node_has_a_part_of_its_links() -> None:
    half = InstanceCost(model(), hardware(), Shape(tp=4))
    whole = InstanceCost(model(), hardware(), Shape(tp=8))
    assert (half.num_gpus, half.node_share) == (4, 0.5)
    assert half.link_bytes_per_s == whole.link_bytes_per_s / 2
    assert half.kv_tokens < whole.kv_tokens / 2
    assert half.prefill_s(8192, 0, CHUNK) > 1.5 * whole.prefill_s(8192, 0, CHUNK)


def test_dealt_out_contexts_are_read_faster_and_cost_an_exchange() -> None:
    replicated, dealt = (
        InstanceCost(model("kimi-k2-thinking"), hardware("h200x8"), Shape(tp=8, dcp=dcp))
        for dcp in (1, 8)
    )
    short = plan_of((100, 1))
    assert dealt.seconds(short) > replicated.seconds(short)
    long = 64, 64 * 10_240, 64 * 10_240
    assert dealt.step_s(*long) < 0.8 * replicated.step_s(*long)
    # Seven eighths of the context's bytes are no longer read by each rank.
    rate = hardware("h200x8").hbm_bytes_per_s * hardware("h200x8").hbm_efficiency
    extra = 1_000_000
    for cost, share in ((replicated, 1), (dealt, 8)):
        more = cost.step_s(64, 0, 10 * extra) - cost.step_s(64, 0, 9 * extra)
        assert more == pytest.approx(extra * 70272 / rate / share, rel=1e-6)


def test_each_sequence_exchanges_what_is_less_of_its_queries_and_its_context() -> None:
    """A prompt beside decoding sequences gathers its own context, not theirs, and they send their
    queries.
    """
    figures = model("kimi-k2-thinking")
    cost = InstanceCost(figures, hardware("h200x8"), Shape(tp=8, dcp=8))
    decoding = [(8000, 1)] * 400
    plan = plan_of((0, 7000), *decoding)
    num_bytes = 7000 * 70272 / 61 + 400 * figures.context_exchange_bytes
    latency_s, rate = 2.5e-5, 2.06e11  # of large sums; a gather is half of one
    exchange_s = 61 * (latency_s + num_bytes / rate) / 2
    tokens = 7400, 7000 * 7001 // 2 + 400 * 8001, 7000 + 400 * 8001
    without_s = cost.step_s(*tokens) - 61 * 7e-6 / 2  # an exchange of nothing
    assert cost.seconds(plan) == pytest.approx(without_s + exchange_s)


def test_sums_grow_with_what_is_summed_and_one_rank_needs_none() -> None:
    figures = hardware("h200x8")
    small, large = 1, 8192
    cost = InstanceCost(model("kimi-k2-thinking"), figures, Shape(tp=8))
    silent = InstanceCost(
        model("kimi-k2-thinking"),
        msgspec.structs.replace(
            figures, all_reduce=[AllReduce(latency_s=0.0, bytes_per_s=float("inf"))]
        ),
        Shape(tp=8),
    )
    first, second = (cost.step_s(n, 0, 0) - silent.step_s(n, 0, 0) for n in (small, large))
    assert first == pytest.approx(122 * (7e-6 + 7168 * 2 / 3.9e10))
    assert second == pytest.approx(122 * (2.5e-5 + large * 7168 * 2 / 2.06e11))
    tiny = msgspec.structs.replace(model(), dense_bytes=1e9)
    alone = InstanceCost(tiny, hardware(), Shape())
    assert alone.step_s(1, 0, 0) < hardware().step_overhead_s + 0.01


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("kimi-k2-thinking", "tp16", "16 ranks of a stage lie on one node, and h200x8 has 8 GPUs"),
        ("kimi-k2-thinking", "tp4", "less than one sequence of 262,144; tp8-dcp8 would"),
        (
            "kimi-k2-instruct",
            "tp8",
            "no shape of one node does; tp8-pp2.* would, or leave `shape` out for 2",
        ),
        ("kimi-k2-thinking", "tp8-pp2-dp2-ep16", "several stages share no experts; leave out -pp2"),
        ("llama3-70b", "tp8-dcp2", "8 KV heads of llama3-70b .* so dcp can be at most 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_what_would(
    name: str, shape: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        InstanceCost(model(name), hardware("h200x8"), Shape.parse(shape))


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
    figures, shape = cost.model, cost.shape
    latents = figures.kv_bytes_per_token / figures.num_layers
    queries = figures.context_exchange_bytes
    exchanged = min(queries, 101 * latents) + min(3 * queries, 3 * latents)
    wanted = cost.step_s(4, 101 + 6, 101 + 3, exchanged if shape.dcp > 1 else 0.0)
    assert cost.seconds(plan) == wanted


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
        wanted = {
            "flops",
            "flops_efficiency",
            "hbm_bytes",
            "hbm_bytes_per_s",
            "link_bytes_per_s",
            "all_reduce",
        }
        assert wanted <= set(hardware(name).sources)


@pytest.mark.parametrize("name", sorted({pair[1] for pair in PAIRS}))
def test_fitted_figures_are_named_with_their_values(name: str) -> None:
    figures = hardware(name)
    assert figures.fitted
    for path, target in figures.fitted.items():
        assert f"{path} = " in figures.remark
        assert target in figures.remark
    plain = msgspec.structs.replace(figures, fitted={})
    assert plain.remark == f"No figure of {name} was fitted."


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8"):
        InstanceCost(model("kimi-k2-instruct"), hardware("a800x8"))


def test_stages_share_the_layers_out() -> None:
    """Twice the GPUs hold twice the rest, and a step takes half in each of two stages."""
    shapes = [Shape.parse(words) for words in ("tp8", "tp8-pp2")]
    one, two = (InstanceCost(model("kimi-k2-thinking"), hardware("h200x8"), s) for s in shapes)
    overhead_s = hardware("h200x8").step_overhead_s
    step = (CHUNK, CHUNK * CHUNK // 2, CHUNK)
    assert two.step_s(*step) - overhead_s == pytest.approx((one.step_s(*step) - overhead_s) / 2)
    assert two.kv_tokens > 2 * one.kv_tokens, "and what weights leave of it"
    assert (one.node_share, two.node_share) == (1, 2)
    assert one.send_s(CHUNK) == 0 < two.send_s(CHUNK)


def test_chunks_follow_one_another_through_stages() -> None:
    figures = model("kimi-k2-thinking"), hardware("h200x8")
    one, two, four = (InstanceCost(*figures, Shape(tp=8, dcp=8, pp=stages)) for stages in (1, 2, 4))
    for length in (128_000, 512_000):
        alone, halves, quarters = (cost.prefill_s(length, 0, CHUNK) for cost in (one, two, four))
        assert halves > alone / 2, "no better than all stages busy"
        assert quarters > alone / 4
        assert halves < 0.60 * alone
        assert quarters < 0.36 * alone
    short = [cost.prefill_s(CHUNK, 0, CHUNK) for cost in (one, two)]
    assert short[1] > short[0], "one chunk goes through all stages"


def test_experts_in_common_leave_room_and_are_computed_for_all() -> None:
    figures = model("kimi-k2-instruct"), hardware("h800x8")
    cost = InstanceCost(*figures, Shape(tp=8, dcp=8, dp=2, ep=16))
    assert cost.num_gpus == 8, "the other instance has as many"
    assert 0.7e6 < cost.kv_tokens < 0.8e6
    plan, none = plan_of((0, 8192)), StepPlan(step_id=0, starts=[], slots=[], ended=[])
    assert cost.seconds(plan) == cost.seconds_together(plan, [8192])
    alone, beside = cost.seconds_together(plan, [0]), cost.seconds_together(plan, [8192])
    assert figures[0].experts is not None
    rate = 16 * 1.979e15 * 0.42
    extra_s = 8192 * figures[0].experts.flops_per_token / rate
    assert beside - alone == pytest.approx(extra_s)
    serving = cost.seconds_together(none, [8192])
    assert hardware("h800x8").step_overhead_s < serving < beside


def test_rows_cross_the_network_where_instances_lie_on_several_nodes() -> None:
    figures, rows = model("kimi-k2-thinking"), 64
    near, far = (
        InstanceCost(figures, hardware("h200x8"), Shape(tp=tp, dcp=tp, dp=dp, ep=16))
        for tp, dp in ((4, 4), (8, 2))
    )
    row_bytes = rows * 7168 * 2
    card = 1.9e11 / 8
    assert far._spread_s(rows) == pytest.approx(61 * 2 * (3e-5 + row_bytes / card))
    assert near._spread_s(rows) == pytest.approx(61 * 2 * (3e-5 + 2 * row_bytes / card))
    one = InstanceCost(figures, hardware("h200x8"), Shape(tp=4, dcp=4, dp=2, ep=8))
    assert 0 < one._spread_s(rows) < 0.3 * near._spread_s(rows), "all on one node"


def test_rows_that_go_to_their_experts_alone_are_counted_by_bytes() -> None:
    figures, rows = (model("kimi-k2-instruct"), hardware("h200x8")), 480
    shape, numbers = Shape(dp=32, ep=32), 7168 * 3
    away = 3 * (1 - (3 / 4) ** 8)
    sent_s = rows * away * numbers / (1.9e11 / 8)
    even = InstanceCost(*figures, shape, ExpertSends())
    assert even._spread_s(rows) == pytest.approx(61 * (6e-5 + sent_s))
    uneven = InstanceCost(*figures, shape, ExpertSends(balance=0.8))
    assert uneven._spread_s(rows) == pytest.approx(61 * (6e-5 + sent_s / 0.8))
    assert uneven._expert_token_s == pytest.approx(even._expert_token_s / 0.8)
    gathered = InstanceCost(*figures, shape)
    assert gathered._spread_s(rows) > 5 * even._spread_s(rows), "all rows go to all ranks"
    node = InstanceCost(*figures, Shape(dp=16, ep=16, tp=1), ExpertSends(there_bytes=2))
    inside = msgspec.structs.replace(figures[1], link_bytes_per_s=1e15, exchange_latency_s=0.0)
    links = InstanceCost(figures[0], inside, Shape(dp=16, ep=16), ExpertSends(there_bytes=2))
    assert 0 < links._spread_s(rows) < node._spread_s(rows), "NVLink carries them then"
    ranks = 15 * (1 - (15 / 16) ** 8)
    assert links._spread_s(rows) == pytest.approx(61 * rows * ranks * 7168 * 4 / 3.605e11)


@pytest.mark.parametrize("rows", [1, 480, 8192])
def test_sends_hide_behind_products_or_the_other_way_round(rows: int) -> None:
    figures = model("kimi-k2-instruct"), hardware("h200x8")
    shape, plan = Shape(dp=32, ep=32), plan_of(*((0, 1) for _ in range(rows)))
    turn = InstanceCost(*figures, shape, ExpertSends())
    hidden = InstanceCost(*figures, shape, ExpertSends(hidden=True))
    sent_s = turn._spread_s(rows)
    overhead_s = figures[1].step_overhead_s
    assert hidden.seconds(plan) >= overhead_s + sent_s
    computed_s = turn.seconds(plan) - overhead_s - sent_s
    assert hidden.seconds(plan) >= overhead_s + computed_s, "each half reads the weights"
    assert hidden.seconds(plan) <= overhead_s + max(2 * computed_s, sent_s)


def test_sends_without_experts_in_common_are_refused() -> None:
    figures = model("kimi-k2-instruct"), hardware("h200x8")
    with pytest.raises(ConfigError, match="experts in common"):
        InstanceCost(*figures, None, ExpertSends())
    with pytest.raises(ConfigError, match="balance"):
        ExpertSends(balance=0.0)


@pytest.mark.parametrize(
    ("name", "shape", "copies"),
    [("kimi-k2-thinking", "tp8", 8), ("kimi-k2-thinking", "tp8-dcp4", 2),
     ("kimi-k2-thinking", "tp8-dcp8", 1), ("kimi-k2-thinking", "tp8-pp2", 8)],
)  # fmt: skip
def test_pages_that_are_not_dealt_out_are_held_by_every_rank(
    name: str, shape: str, copies: int
) -> None:
    assert InstanceCost(model(name), hardware("h200x8"), Shape.parse(shape)).page_copies == copies


def test_heads_that_are_shared_out_leave_no_copies() -> None:
    assert InstanceCost(model(), hardware(), Shape(tp=8)).page_copies == 1
