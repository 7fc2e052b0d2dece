"""Engines that share experts on emulated GPUs, each in processes of its own, with the tokens of one
rank on the CPU.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mooncake.base import SamplingParams, Shape, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.engine.config import EAGLE3, MTP, SpeculativeConfig
from mooncake.engine.expert_placement import EplbConfig
from mooncake.engine.speculation import ACCEPTED_TOKENS
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.ranks import expert_peers
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.expert_balancing import MOVES
from mooncake.model.options import ExpertGroup, ModelOptions
from tests.device.processes import Processes
from tests.device.served import Joins, prompt, served
from tests.device.test_drafts import every_other_step
from tests.device.test_ranks import CAPTURED, EAGER, JOINS
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import RANK_S, followers_emulated
from tests.support.cuda.streams import LATE, RANDOM
from tests.support.followers import followers
from tests.support.model.eagle3_heads import knowing_head

pytestmark = pytest.mark.usefixtures("forked")
SECRET = "0123456789abcdef" * 2
SHORT: Joins = {0: [(prompt(5, 0), SamplingParams(temperature=0, max_tokens=3))]}
LONG: Joins = {0: [(prompt(5, 0), SamplingParams(temperature=0, max_tokens=60))]}
PARTS: list[Joins] = [{0: JOINS[0][:1], 2: JOINS[2]}, {0: JOINS[0][1:]}]
"""What each of two engines computes: sequences 0 and 2, and 1."""


@pytest.fixture(scope="module")
def wanted(nano: Path) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """The tokens and log-probabilities of one rank on the CPU."""
    with served(nano, "cpu") as engine:
        return engine.run(JOINS), engine.logprobs


def engine_of_some(
    number: int, name: str, path: Path, words: str, backend: str, machine: dict[str, Any],
    options: dict[str, Any], *all_joins: Joins | None,
) -> Iterator[Any]:  # fmt: skip
    """Open an engine that shares its experts, and yield what it makes of some requests, and of
    further ones; None: there are none, and it goes on until it fails. options: of `served`;
    `silent_s`: how long a follower may give no sign of life, and another engine once the first
    requests are done.
    """
    silent_s = options.pop("silent_s", RANK_S)
    torch.set_num_threads(1)
    shape = Shape.parse(words)
    workers = tuple(f"decode-{each}" for each in range(shape.num_sharers))
    group = ExpertGroup(name=name, number=number, size=len(workers), workers=workers)
    with (
        mock.patch.object(expert_peers, "EXCHANGE_S", RANK_S),
        every_other_step(),
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, silent_s=silent_s, **machine),
        reference_ops(),
    ):
        credential = own_credential(SECRET, CredentialRole.WORKER)
        peers = expert_peers.meet(group, credential, ModelOptions(device="cuda", shape=shape))
        with served(path, "cuda", backend, peers, shape=shape, **options) as engine:
            for turn, joins in enumerate(all_joins):
                if joins is None:
                    engine.hear_until_it_fails()
                found = engine.run(joins, first=10 * turn) if joins else {}
                peers.timeout_s = silent_s
                yield found, engine.logprobs, engine.counters | engine.engine.counters
        gpus.finish()


def group_name() -> str:
    return f"decode-0 of a test at {SystemIds().hex(8)}"


@pytest.mark.parametrize(
    ("words", "backend", "order"),
    [
        ("tp1-dp2-ep2", EAGER, RANDOM), ("tp1-dp2-ep2", CAPTURED, LATE),
        ("tp2-dp2-ep4", CAPTURED, RANDOM),
    ],
)  # fmt: skip
def test_engines_that_share_experts_have_the_tokens_and_logprobs_of_one_on_the_cpu(
    nano: Path,
    wanted: tuple[dict[int, list[int]], dict[int, list[float]]],
    words: str,
    backend: str,
    order: str,
) -> None:
    """Both at once; then one alone, for which the other computes its experts."""
    shape, name = Shape.parse(words), group_name()
    machine = {"num_devices": shape.num_ranks, "order": order, "seed": 5}
    eplb = EplbConfig(window_size=2, step_interval=4, num_redundant_experts=shape.ep)
    alone: list[Joins] = [{}, {0: JOINS[0][:1]}]
    engines = Processes(
        engine_of_some,
        [
            (
                number,
                name,
                nano,
                words,
                backend,
                machine,
                {"eplb": eplb, "measures": shape.tp > 1, "measure_pages": True},
                PARTS[number],
                alone[number],
            )
            for number in range(2)
        ],
    )
    first, second = engines.found()
    assert not isinstance(first, str), (first, second)
    assert not isinstance(second, str), (first, second)
    tokens, logprobs = wanted
    assert [*first[0].values(), *second[0].values()] == [tokens[each] for each in (0, 2, 1)]
    assert first[1][0] == pytest.approx(logprobs[0], abs=1e-4)
    assert min(first[2][MOVES], second[2][MOVES]) > 0.0
    engines.go_on()
    assert engines.found()[1][0] == {10: tokens[0]}
    engines.end()


def test_engines_whose_experts_are_on_another_have_the_tokens_and_logprobs_of_one_on_the_cpu(
    nano: Path, wanted: tuple[dict[int, list[int]], dict[int, list[float]]]
) -> None:
    """Steps are eager. The last process holds experts and no pages."""
    name, machine = group_name(), {"num_devices": 1, "order": RANDOM, "seed": 5}
    parts: list[Joins] = [*PARTS, {}]
    measured = {"measures": True, "measure_pages": True}
    engines = Processes(
        engine_of_some,
        [
            (number, name, nano, "tp1-dp2-experts1", CAPTURED, machine, measured, part)
            for number, part in enumerate(parts)
        ],
    )
    first, second, experts = engines.found()
    assert not any(isinstance(each, str) for each in (first, second, experts)), (first, second)
    tokens, logprobs = wanted
    assert [*first[0].values(), *second[0].values()] == [tokens[each] for each in (0, 2, 1)]
    assert first[1][0] == pytest.approx(logprobs[0], abs=1e-4)
    assert experts[0] == {}
    engines.end()


@pytest.mark.parametrize("method", [EAGLE3, MTP])
def test_drafts_of_a_layer_are_in_captured_steps_that_engines_agree_on(
    tmp_path: Path, method: str
) -> None:
    """Steps of one engine have drafts while those of the other have none, or others. The experts of
    an MTP layer are in each engine.
    """
    with_mtp = {"num_nextn_predict_layers": int(method == MTP)}
    model = init_checkpoint("k2-nano", 0, tmp_path / "nano", "float32", overrides=with_mtp)
    with served(model, "cpu") as engine:
        tokens = engine.run(JOINS)
    name, machine = group_name(), {"num_devices": 1, "order": RANDOM, "seed": 5}
    prompts = [each for step in JOINS.values() for each, _ in step]
    texts = [[*each, *tokens[number]] for number, each in enumerate(prompts)]
    head = "" if method == MTP else str(knowing_head(model, tmp_path / "head", texts))
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=2, model=head)
    engines = Processes(
        engine_of_some,
        [
            (
                number,
                name,
                model,
                "tp1-dp2-ep2",
                CAPTURED,
                machine,
                {"drafts": drafts, "measures": method == MTP, "measure_pages": True},
                PARTS[number],
            )
            for number in range(2)
        ],
    )
    found = engines.found()
    assert not any(isinstance(each, str) for each in found), found
    assert [each for part, *_ in found for each in part.values()] == [
        tokens[each] for each in (0, 2, 1)
    ]
    assert sum(counters[ACCEPTED_TOKENS] for *_, counters in found) > 0
    engines.end()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("words", "ends"),
    [("tp1-dp2-ep2", 1), ("tp1-dp2-experts1", 1), ("tp1-dp2-experts1", 2)],
    ids=["an engine", "an engine without experts", "the experts"],
)
def test_an_engine_that_ends_or_stands_still_ends_the_others_in_its_exchange(
    nano: Path, words: str, ends: int, how: signal.Signals
) -> None:
    """Where it stands still, it is killed. The first engine is in a step, and the others wait for
    work.
    """
    idle: list[Joins | None] = [{}, None]
    engines = some_that_wait(words, nano, [SHORT, LONG], *[idle] * (1 + words.count("experts")))
    others = [each for each in range(1, len(engines.each)) if each != ends]
    victim = engines.each[ends].pid
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    engines.go_on(0, *others)
    killing = threading.Timer(1.0, os.kill, [victim, how])
    killing.start()
    said = "has ended" if how is signal.SIGKILL else "has said nothing for"
    for each in (0, *others):
        found = engines.found_by(each)
        assert re.search(
            f"decode-{ends}, which shares experts with this worker, ({said}|is lost, as)", found
        )
    engines.go_on(0, *others)
    engines.join()
    killing.join()
    wanted = [0] * len(engines.each)
    wanted[ends] = -signal.SIGKILL
    assert [each.exitcode for each in engines.each] == wanted


def test_a_rank_that_stands_still_ends_all_engines_that_share_experts(nano: Path) -> None:
    """Its own engine finds that it does; the other one waits for both of its ranks."""
    engines = some_that_wait("tp2-dp2-ep4", nano, [SHORT, LONG], [{}, LONG])
    [follower] = followers(engines.each[1].pid)
    follower.send_signal(signal.SIGSTOP)
    engines.go_on()
    first, second = engines.found()
    assert "decode-1, which shares experts with this worker, has ended" in first
    assert "rank 1 of this model gave no sign of life" in second
    engines.end()
    assert not follower.is_running()


def some_that_wait(words: str, path: Path, *joins: list[Joins | None]) -> Processes:
    """Return engines with captured steps once they have computed their first requests."""
    name, shape = group_name(), Shape.parse(words)
    machine = {"num_devices": shape.tp}
    engines = Processes(
        engine_of_some,
        [
            (number, name, path, words, CAPTURED, machine, {"silent_s": 20.0}, *each)
            for number, each in enumerate(joins)
        ],
    )
    found = engines.found()
    assert not any(isinstance(each, str) for each in found), found
    assert len(found[0][0][0]) == 3
    return engines
