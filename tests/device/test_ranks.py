"""Ranks on emulated GPUs, each in a process of its own, with the tokens of one rank on the CPU."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from mooncake.base import InternalError, SamplingParams, Shape
from mooncake.engine.expert_placement import EplbConfig
from mooncake.model.expert_balancing import MOVES
from mooncake.model.memory import num_communicators
from tests.device.served import CONFIG, Joins, prompt, served
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import followers_emulated
from tests.support.cuda.streams import LATE, RANDOM
from tests.support.followers import followers

pytestmark = pytest.mark.usefixtures("forked")
JOINS: Joins = {
    0: [
        (prompt(5, 0), SamplingParams(temperature=0, max_tokens=13, num_logprobs=1)),
        (prompt(37, 1), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=15)),
    ],
    2: [(prompt(14, 2), SamplingParams(top_k=5, seed=4, frequency_penalty=0.4, max_tokens=6))],
}


@pytest.fixture(scope="module")
def wanted(nano: Path) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """The tokens and log-probabilities of one rank on the CPU."""
    with served(nano, "cpu") as engine:
        return engine.run(JOINS), engine.logprobs


EAGER, CAPTURED = "reference", "auto"
EPLB = EplbConfig(window_size=2, step_interval=4, num_redundant_experts=2)


@pytest.mark.parametrize(
    ("words", "backend", "order"),
    [
        ("tp2", EAGER, LATE), ("tp2", CAPTURED, RANDOM), ("tp2-dcp2", EAGER, RANDOM),
        ("tp2-dcp2", CAPTURED, LATE), ("tp2-ep2", EAGER, RANDOM), ("tp2-ep2", CAPTURED, LATE),
        ("tp1-pp2", EAGER, RANDOM), ("tp2-pp2-dcp2", CAPTURED, RANDOM),
    ],
)  # fmt: skip
def test_ranks_have_the_tokens_and_logprobs_of_one_on_the_cpu(
    nano: Path,
    wanted: tuple[dict[int, list[int]], dict[int, list[float]]],
    words: str,
    backend: str,
    order: str,
) -> None:
    shape = Shape.parse(words)
    machine = {"num_devices": shape.num_ranks, "order": order, "seed": 7}
    with (
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
    ):
        eplb = EPLB if shape.ep > 1 else None
        with served(nano, "cuda", backend, shape=shape, eplb=eplb, measure_pages=True) as engine:
            assert engine.run(JOINS) == wanted[0]
            assert engine.counters.get(MOVES, 1.0) > 0.0
            if shape.num_ranks == shape.pp > 1:  # a prompt in several steps that are under way
                endless = [(prompt(70, 3), SamplingParams(temperature=0, max_tokens=20))]
                engine.run({0: endless}, first=10, aborted=(1, 10))
                engine.engine.check_integrity([], [])
                layout = engine.pages.kv.layout
                assert engine.source.num_pages(layout, CONFIG) > CONFIG.num_blocks
            if backend == EAGER:  # a captured step still runs ahead when all ends
                engine.runner.check_integrity()
        gpus.finish()
        if eplb is None:  # experts that move make pairs of ranks
            assert gpus.machine.num_communicators == num_communicators(shape, shape.pp - 1)
    for sequence, logprobs in wanted[1].items():
        assert engine.logprobs[sequence] == pytest.approx(logprobs, abs=1e-4)
    assert any(name.startswith("allgather") for name in gpus.machine.launched)


@pytest.mark.parametrize(
    ("words", "backend", "how"),
    [
        ("tp2", EAGER, signal.SIGKILL), ("tp2", EAGER, signal.SIGSTOP),
        ("tp2", CAPTURED, signal.SIGKILL), ("tp2", CAPTURED, signal.SIGSTOP),
        ("tp1-pp2", EAGER, signal.SIGKILL), ("tp1-pp2", EAGER, signal.SIGSTOP),
    ],
)  # fmt: skip
def test_a_rank_that_ends_or_stands_still_in_an_exchange_ends_the_lead_too(
    nano: Path, words: str, backend: str, how: signal.Signals
) -> None:
    """The lead's GPU waits for it in the middle of a step; torch's watchdog does nothing here."""
    machine = {"num_devices": 2}
    joins: Joins = {0: [(prompt(5, 0), SamplingParams(temperature=0, max_tokens=60))]}
    with (
        emulated(**machine),
        followers_emulated(as_references=True, silent_s=20.0, **machine),
        reference_ops(),
        served(nano, "cuda", backend, shape=Shape.parse(words)) as engine,
    ):
        [follower] = followers()
        engine.run({0: [(prompt(5, 0), SamplingParams(temperature=0, max_tokens=3))]})
        follower.send_signal(signal.SIGSTOP)
        killing = threading.Timer(1.0, follower.send_signal, [how])
        killing.start()
        with pytest.raises(InternalError, match=r"rank 1 of this model (has ended|gave no sign)"):
            engine.run(joins, first=1)
        engine.runner.close()  # raises where its thread still waits for the other rank
