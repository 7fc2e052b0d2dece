"""Ranks that hold the routed experts together compute what one rank does: ranks of one instance,
and instances with sequences of their own.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from mooncake_kernels.native import build

from mooncake.base import ModelSpec, Shape
from mooncake.engine.expert_placement import EplbConfig
from mooncake.engine.plan import StepSlot
from mooncake.model.backends import Backends, settle
from mooncake.model.loading import WeightSource, load_model
from mooncake.model.memory import weights_bytes
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.peers import Peers
from mooncake.model.running import runner
from mooncake.model.running.runner import ModelRunner
from tests.support.model.held_bytes import held_bytes
from tests.support.model.ranks import ThreadRanks
from tests.support.model.thread_group import ThreadGroup
from tests.support.model.tiny_models import (
    CONFIGS,
    CPU,
    DictSource,
    forward,
    kv_for,
    ours,
    random_source,
    random_tokens,
    slot,
    source_of,
    truth,
)
from tests.support.waiting import LONG_S
from tests.unit.model.running.test_runner import GreedySampler, plan, result_of, start_of
from tests.unit.model.test_ranks import MOST, compare, logprobs


class ThreadInstances:
    """`dp` instances of `tp` ranks each, all threads of this process, that share the experts. Or
    `experts` further ones hold these alone.
    """

    def __init__(
        self,
        source: WeightSource,
        dp: int,
        tp: int = 1,
        eplb: EplbConfig | None = None,
        dtype: torch.dtype = torch.float32,
        backends: Backends | None = None,
        experts: int = 0,
        with_mtp: bool = False,
    ) -> None:
        shape = Shape(tp=tp, dp=dp, ep=experts or tp * dp, experts=experts)
        self.tp, size = tp, shape.num_sharers
        self.all = ThreadGroup.make(size * tp)
        inside = [ThreadGroup.make(tp) for _ in range(size)]
        self._without = dp if experts else 0
        self.models = [
            [
                load_model(
                    source, dtype=dtype, device=CPU, group=inside[instance][rank],
                    shape=shape, eplb=eplb, backends=backends,
                    sharing=ExpertRanks.of_instances(
                        self.all[rank * size + instance], size, None, self._without
                    ),
                    with_mtp=with_mtp,
                )
                for rank in range(tp)
            ]
            for instance in range(size)
        ]  # fmt: skip
        self.holders = self.models[self._without :]
        """The instances that hold experts."""
        self.kv = [[kv_for(source.spec) for _ in range(tp)] for _ in range(dp)]
        self._threads = ThreadPoolExecutor(size * tp)

    def step(
        self, slots: list[list[StepSlot]], whole: bool = False
    ) -> list[dict[int, torch.Tensor]]:
        """Return the logits of a step of every instance, of which some may have no slots."""

        def one(instance: int, rank: int) -> dict[int, torch.Tensor]:
            model = self.models[instance][rank]
            try:
                if instance < len(slots) and slots[instance]:
                    kv = self.kv[instance][rank]
                    return forward(model, kv, slots[instance], whole=whole)
                with torch.inference_mode():
                    model.serve()
                return {}
            except BaseException:
                self.all[0].fail()
                raise

        size = len(self.models)
        ranks = [(instance, rank) for instance in range(size) for rank in range(self.tp)]
        found = list(self._threads.map(lambda pair: one(*pair), ranks))
        return found[:: self.tp][: len(slots)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_ranks_of_one_instance_share_the_experts(name: str, num_ranks: int) -> None:
    source = source_of(truth(name, vocab_size=212))
    compare(ours(source), ThreadRanks(lambda _: source, num_ranks, whole_experts=True))


@pytest.mark.parametrize(
    ("dp", "tp", "redundant", "experts"),
    [(2, 1, 0, 0), (4, 1, 4, 0), (2, 2, 4, 0), (1, 1, 0, 1), (2, 1, 0, 1), (2, 1, 4, 2)],
)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_instances_share_the_experts(
    name: str, dp: int, tp: int, redundant: int, experts: int
) -> None:
    """Each has rows of its own, others than the rest, or none; prompts and single tokens mixed."""
    source = source_of(truth(name, vocab_size=212))
    eplb = EplbConfig(num_redundant_experts=redundant)
    one, together = ours(source), ThreadInstances(source, dp, tp, eplb, experts=experts)
    tokens = [random_tokens(12 + 3 * number, seed=number) for number in range(dp)]
    alone = [kv_for(source.spec) for _ in range(dp)]
    cuts = [0, 7, 10, 11]
    for step, (begin, end) in enumerate(itertools.pairwise(cuts)):
        slots = [
            [] if (number + step) % dp == 1 and step else [
                slot(number, begin, tokens[number][begin : end + number * (step == 2)], range(4)),
                *([slot(9, 0, tokens[number][:5], range(8, 10), sample=False)] if number else []),
            ]
            for number in range(dp)
        ]  # fmt: skip
        for number, found in enumerate(together.step(slots, whole=step == 1)):
            if not slots[number]:
                continue
            expected = forward(one, alone[number], slots[number], whole=step == 1)
            assert found.keys() == expected.keys()
            for sequence, logits in expected.items():
                assert (logprobs(found[sequence]) - logprobs(logits)).abs().max() <= MOST
    counts = [
        [layer.counts.tolist() for layer in model.expert_slots]
        for instance in together.models
        for model in instance
    ]
    assert all(each == counts[0] for each in counts)


def test_no_instance_holds_what_another_kind_holds() -> None:
    """As the plan of memory has it, to the few bytes of rotations and of tables."""
    source = source_of(truth("plain", vocab_size=212))
    together = ThreadInstances(source, 2, experts=2)
    shape = Shape(dp=2, ep=2, experts=2)
    told: list[tuple[int, int]] = []
    tables = sum(
        part.numel() * part.element_size()
        for slots in together.models[0][0].expert_slots
        for part in (slots.counts, slots._one, slots._slots, slots._num_slots)
    )
    whole = weights_bytes(source.spec, "float32")
    for number, [model] in enumerate(together.models):
        held = held_bytes(model) - tables
        planned = weights_bytes(source.spec, "float32", shape=shape, only_experts=number > 1)
        assert 0 <= held - planned < 4096, (number, held, planned)
        assert model.has_rest == (number < 2)
        told.append((held, planned))
    routed = 2 * told[2][1]
    assert told[0][1] + routed == whole, "each tensor is on one kind"
    with pytest.raises(AssertionError, match="holds no experts"):
        together.models[0][0].expert_slots[0].weights(0)


@pytest.mark.parametrize(("dp", "tp", "experts"), [(2, 1, 0), (2, 2, 0), (2, 1, 2)])
def test_each_instance_has_all_experts_of_its_mtp_layer(dp: int, tp: int, experts: int) -> None:
    """As the plan of memory has it. Other layers have second copies of some experts."""
    source, eplb = with_mtp(), EplbConfig(num_redundant_experts=4)
    together = ThreadInstances(source, dp, tp, eplb, experts=experts, with_mtp=True)
    shape = Shape(tp=tp, dp=dp, ep=experts or tp * dp, experts=experts)
    for number, models in enumerate(together.models):
        holds_rest = number < dp
        planned = weights_bytes(
            source.spec, "float32", shape=shape, redundant=4, with_mtp=True,
            only_experts=not holds_rest,
        )  # fmt: skip
        for model in models:
            slots = [*model.expert_slots]
            if model.mtp is not None and (moe := model.mtp.layer.moe) is not None:
                assert moe.slots is not None
                slots.append(moe.slots)
                assert len(moe.slots.placement) == source.spec.n_routed_experts
            tables = sum(
                part.numel() * part.element_size()
                for each in slots
                for part in (each.counts, each._one, each._slots, each._num_slots)
            )
            assert 0 <= held_bytes(model) - tables - planned < 4096, number
            assert (model.mtp is not None) == holds_rest


def with_mtp() -> DictSource:
    """Return random weights of a model with an MTP layer."""
    spec = ModelSpec.from_config(truth("plain", vocab_size=212).config.to_dict())
    return random_source(spec, with_mtp=True)


@pytest.mark.parametrize("with_layer", [False, True])
def test_a_loader_says_how_many_tensors_it_reads(with_layer: bool) -> None:
    source = with_mtp() if with_layer else source_of(truth("plain", vocab_size=212))

    def tell(to: list[tuple[int, int]], done: int, whole: int) -> None:
        to.append((done, whole))

    for experts, without in ((0, 0), (1, 1)):
        size, told = 2, dict[int, list[tuple[int, int]]]()
        group = ThreadGroup.make(size)
        for number in range(size):
            sharing = ExpertRanks.of_instances(group[number], size, None, without)
            load_model(
                source, dtype=torch.float32, device=CPU, sharing=sharing,
                shape=Shape(dp=size - experts, ep=experts or size, experts=experts),
                progress=partial(tell, told.setdefault(number, [])), with_mtp=with_layer,
            )  # fmt: skip
            assert told[number][-1] == (len(told[number]),) * 2
        if experts:
            assert sum(map(len, told.values())) == len(source.tensors)


class Woken(Peers):
    """The only other instance, in the same process; says when it has begun a step."""

    def __init__(self, number: int, link: socket.socket) -> None:
        super().__init__(number, ["a", "b"], {1 - number: link}, {}, -1, 60.0)
        self.woken = threading.Semaphore(0)

    def watch(
        self,
        on_wake: Callable[[int], None],
        on_lost: Callable[[], None],
        on_silent: Callable[[], None],
    ) -> None:
        def woken(step: int) -> None:
            on_wake(step)
            self.woken.release()

        super().watch(woken, on_lost, on_silent)


def test_busy_instances_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of one comes only after the other has begun the step: it waits, and brings rows."""
    monkeypatch.setattr(runner, "_PATIENCE", 1e6)
    source = source_of(truth("plain"))
    models = [ranks[0] for ranks in ThreadInstances(source, 2).models]
    peers = [Woken(number, link) for number, link in enumerate(socket.socketpair())]
    runners = [
        ModelRunner(model, kv_for(source.spec), GreedySampler(), num_threads=1, peers=each)
        for model, each in zip(models, peers, strict=True)
    ]
    steps, prompt = 8, random_tokens(5, seed=1)

    def drive(number: int) -> None:
        tokens, start = prompt, 0
        for step in range(steps):
            if number and step:
                assert peers[number].woken.acquire(timeout=LONG_S)
            begun = [start_of(1, prompt)] if not step else []
            runners[number].submit(plan(step, [slot(1, start, tokens, range(4))], begun))
            start += len(tokens)
            tokens = result_of(runners[number])[0].tokens[1]
        runners[number].submit(plan(steps, [], ended=[1]))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(drive, range(2)))
    rounds = {model.exchange.num_steps for model in models if model.exchange is not None}
    for each in runners:
        each.close()
    for each in peers:
        each.close()
    # At its ends, or when a thread gets no core for long, a step may have the rows of one.
    assert steps <= max(rounds) <= steps + steps // 2


def test_where_no_row_is_read_all_ranks_still_meet_in_the_last_layer() -> None:
    source = source_of(truth("plain"))
    together = ThreadInstances(source, 2)
    unread = slot(1, 0, random_tokens(5, seed=1), range(2), sample=False)
    read = slot(2, 0, random_tokens(4, seed=2), range(2))
    for slots in ([[unread], [read]], [[unread], []], [[read], [unread]]):
        together.step(slots)
    expected = forward(ours(source), kv_for(source.spec), [read])
    found = together.step([[], [read]])[1]
    assert (logprobs(found[2]) - logprobs(expected[2])).abs().max() <= MOST


@pytest.mark.parametrize(
    ("dp", "tp", "redundant", "experts"), [(2, 1, 0, 0), (2, 2, 4, 0), (2, 1, 4, 2)]
)
def test_experts_move_while_they_are_used(dp: int, tp: int, redundant: int, experts: int) -> None:
    """A router that likes a few experts most, all of them on the first ranks. Between two steps
    one expert moves, or two; answers stay those of one rank, and weights lie where the table says.
    """
    source = source_of(truth("plain", vocab_size=212))
    for name, bias in source.tensors.items():
        if name.endswith("e_score_correction_bias"):
            bias[:2] += 0.4
    eplb = EplbConfig(window_size=4, step_interval=8, num_redundant_experts=redundant)
    one, together = ours(source), ThreadInstances(source, dp, tp, eplb, experts=experts)
    alone = [kv_for(source.spec) for _ in range(dp)]
    tokens = [random_tokens(60, seed=number) for number in range(dp)]
    layers = [[model.expert_slots for model in instance] for instance in together.models]
    before = [layer.placement for layer in layers[0][0]]
    for step in range(24):
        slots = [[slot(1, step, tokens[number][step : step + 1], range(4))] for number in range(dp)]
        last = [layer.placement for layer in layers[0][0]]
        for number, found in enumerate(together.step(slots)):
            expected = forward(one, alone[number], slots[number])
            assert (logprobs(found[1]) - logprobs(expected[1])).abs().max() <= MOST
        now = [layer.placement for layer in layers[0][0]]
        assert sum(map(_num_changed, last, now)) <= 2, "one move between two steps"
        for instance in layers:
            for rank in instance:
                assert [layer.placement for layer in rank] == now, "alike on all ranks"
    assert now != before
    spec, size = source.spec, experts or dp * tp
    balancers = [instance[0].balancer for instance in together.holders]
    rows = [balancer.rows for balancer in balancers if balancer is not None]
    assert abs(sum(map(sum, rows)) - 4 * dp * spec.num_experts_per_tok * len(now)) <= sum(
        map(len, rows)
    ), "of the last window, each on one instance"
    assert all(min(each) >= 0 < max(each) for each in rows)
    # The same bits as of ranks that were given these experts when they were loaded.
    for number, instance in enumerate(layers[-len(together.holders) :]):
        for rank, mine in enumerate(instance):
            place = rank * len(together.holders) + number
            for layer, slots_of_layer in enumerate(mine):
                each = len(slots_of_layer.placement) // size
                for index in range(each):
                    expert = slots_of_layer.placement[place * each + index]
                    whole = expert_of(source, layer, expert)
                    for part, stored in zip(slots_of_layer.weights(index), whole, strict=True):
                        assert torch.equal(part, stored.t())


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dp", "tp", "redundant", "experts"),
    [(2, 1, 4, 0), (2, 2, 4, 0), (1, 2, 0, 0), (2, 1, 4, 2)],
)
def test_deterministic_bits_are_those_of_one_rank_while_experts_move(
    dp: int, tp: int, redundant: int, experts: int, dtype: torch.dtype
) -> None:
    """Whatever rows other instances have meanwhile, or none."""
    source = source_of(truth("plain", vocab_size=212))
    for name, bias in source.tensors.items():
        if name.endswith("e_score_correction_bias"):
            bias[:2] += 0.4
    fixed = settle("auto", "auto", CPU, deterministic=True, dtype=dtype)
    eplb = EplbConfig(window_size=2, step_interval=3, num_redundant_experts=redundant)
    one = load_model(source, dtype=dtype, device=CPU, backends=fixed)
    together = ThreadInstances(source, dp, tp, eplb, dtype, fixed, experts)
    alone = [kv_for(source.spec) for _ in range(dp)]
    tokens = [random_tokens(60, seed=number) for number in range(dp)]
    placements = set()
    for step, (begin, end) in enumerate(itertools.pairwise([0, 9, *range(10, 34), 50])):
        slots = [
            [slot(1, begin, tokens[number][begin:end], range(4))] if number <= step % 4 else []
            for number in range(dp)
        ]
        for number, found in enumerate(together.step(slots, whole=True)):
            if slots[number]:
                expected = forward(one, alone[number], slots[number], whole=True)
                assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))
        layers = together.models[0][0].expert_slots
        placements.add(tuple(layer.placement for layer in layers))
    assert len(placements) > 2, "experts have moved"


def _num_changed(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    return sum(map(int.__ne__, old, new))


def expert_of(source: DictSource, moe_layer: int, expert: int) -> list[torch.Tensor]:
    """Return gate and up, and down, of an expert of the `moe_layer`-th layer that has some."""
    prefix = f"model.layers.{source.spec.first_k_dense_replace + moe_layer}.mlp.experts.{expert}."
    gate, up, down = (
        source.tensors[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down")
    )
    return [torch.cat((gate, up)), down]
