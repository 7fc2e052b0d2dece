"""Steps with drafts on emulated GPUs, by one rank and by several, with the tokens of one rank on
the CPU that computes no drafts, and as many right drafts as that rank makes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mooncake.base import SamplingParams, Shape
from mooncake.engine.config import EAGLE3, MTP, NGRAM, SpeculativeConfig
from mooncake.engine.speculation import ACCEPTED_TOKENS, DRAFT_TOKENS, RowCost, Speculation
from mooncake.launch.worker.ranks import rank_processes
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.device.graphs import DecodeGraphs
from mooncake.model.drafts.captured import CapturedGuesses
from mooncake.model.drafts.eagle3 import Eagle3Head
from mooncake.model.kimi_k2 import KimiK2
from tests.device.served import BLOCK_TOKENS, CONFIG, Joins, Served, prompt, served
from tests.device.test_ranks import CAPTURED, EAGER
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import followers_emulated
from tests.support.cuda.streams import ORDERS, RANDOM
from tests.support.model.eagle3_heads import (
    knowing_head,
    mla_config_of,
    random_tensors,
    write_head,
)

pytestmark = pytest.mark.usefixtures("forked")
JOINS: Joins = {
    0: [
        (prompt(5, 0), SamplingParams(temperature=0, max_tokens=24, num_logprobs=1)),
        (prompt(37, 1), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=11)),
    ],
    2: [(prompt(14, 2), SamplingParams(temperature=0, max_tokens=12))],
}
MLA = "eagle3 with MLA"
Answers = tuple[dict[int, list[int]], dict[int, list[float]]]
"""The tokens and the log-probabilities of each sequence."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of k2-nano with an MTP layer."""
    path = tmp_path_factory.mktemp("nano") / "mtp"
    layers = {"num_nextn_predict_layers": 1}
    return init_checkpoint("k2-nano", 0, path, dtype="float32", overrides=layers)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> Answers:
    """The answers of one rank on the CPU, which computes no drafts."""
    with served(checkpoint, "cpu") as engine:
        return engine.run(JOINS), engine.logprobs


@pytest.fixture(scope="module")
def methods(checkpoint: Path, wanted: Answers) -> dict[str, SpeculativeConfig]:
    return methods_of(checkpoint, JOINS, wanted[0])


def methods_of(
    checkpoint: Path, joins: Joins, answers: dict[int, list[int]]
) -> dict[str, SpeculativeConfig]:
    """Return two drafts by each method. One head knows the answers, and the one with MLA is
    random.
    """
    folder, spec = checkpoint.parent, Checkpoint.open(checkpoint).spec
    prompts = [tokens for step in joins.values() for tokens, _ in step]
    texts = [[*tokens, *answers[number]] for number, tokens in enumerate(prompts)]
    config = mla_config_of(spec, draft_vocab_size=None)
    heads = {
        EAGLE3: knowing_head(checkpoint, folder / "head", texts),
        MLA: write_head(folder / "mla", config, random_tensors(config, spec)),
    }
    return {
        NGRAM: drafts_of(NGRAM, prompt_lookup_min=1),
        MTP: drafts_of(MTP),
        **{name: drafts_of(EAGLE3, model=str(head)) for name, head in heads.items()},
    }


def drafts_of(method: str, **settings: Any) -> SpeculativeConfig:
    """Return settings for two drafts."""
    return SpeculativeConfig(method=method, num_speculative_tokens=2, **settings)


@pytest.fixture(scope="module")
def counted(
    checkpoint: Path, wanted: Answers, methods: dict[str, SpeculativeConfig]
) -> dict[str, dict[str, float]]:
    """What one rank on the CPU counts of the drafts of each method."""
    found = {}
    for name, drafts in methods.items():
        with every_other_step(), served(checkpoint, "cpu", drafts=drafts) as engine:
            assert engine.run(JOINS) == wanted[0]
            found[name] = of_drafts(engine)
    assert found[EAGLE3][ACCEPTED_TOKENS] > found[EAGLE3][DRAFT_TOKENS] / 3
    return found


def every_other_step() -> Any:
    """Have every other step compute drafts, whatever the last ones took."""
    return mock.patch.object(RowCost, "known", False)


def of_drafts(engine: Served) -> dict[str, float]:
    return {name: engine.engine.counters[name] for name in (DRAFT_TOKENS, ACCEPTED_TOKENS)}


@pytest.mark.parametrize(
    ("words", "backend", "method", "order"),
    [
        ("tp1", EAGER, MTP, RANDOM), ("tp2", CAPTURED, NGRAM, RANDOM),
        *(("tp1", CAPTURED, method, order) for method in (MTP, EAGLE3, MLA) for order in ORDERS),
        ("tp2-dcp2", CAPTURED, MTP, RANDOM), ("tp2-ep2", CAPTURED, MLA, RANDOM),
        ("tp1-pp2", EAGER, EAGLE3, RANDOM), ("tp2-pp2-dcp2", CAPTURED, EAGLE3, RANDOM),
        ("tp1-pp2", CAPTURED, MTP, RANDOM),
    ],
)  # fmt: skip
def test_drafts_change_no_token(
    checkpoint: Path,
    wanted: Answers,
    methods: dict[str, SpeculativeConfig],
    counted: dict[str, dict[str, float]],
    words: str,
    backend: str,
    method: str,
    order: str,
) -> None:
    shape = Shape.parse(words)
    machine = {"num_devices": shape.num_ranks, "order": order, "seed": 3}
    with (
        mock.patch.object(rank_processes, "EXCHANGE_S", 600.0),  # also where four share two cores
        every_other_step(),
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
        watched(DecodeGraphs) as replayed,
        watched(CapturedGuesses) as guessed,
    ):
        options = {"drafts": methods[method], "shape": shape}
        measures = backend == CAPTURED and order == RANDOM
        with served(checkpoint, "cuda", backend, measures=measures, **options) as engine:
            assert engine.run(JOINS) == wanted[0]
            assert engine.logprobs[0] == pytest.approx(wanted[1][0], abs=1e-4)
            found, alone = of_drafts(engine), counted[method]
            if shape.pp == 1:
                assert found == alone
            else:  # other sequences share a step
                assert found[ACCEPTED_TOKENS] / found[DRAFT_TOKENS] == pytest.approx(
                    alone[ACCEPTED_TOKENS] / alone[DRAFT_TOKENS], abs=0.1
                )
            engine.engine.check_integrity([], [])
            engine.runner.check_integrity()
        gpus.finish()
    most = max(
        (slot.num_drafts for call in replayed.mock_calls for slot in call.args[1]), default=0
    )
    assert most == (2 if backend == CAPTURED else 0), "steps with drafts are replayed"
    num_makes = 0 if backend == EAGER or method == NGRAM else found[DRAFT_TOKENS] / 4
    assert guessed.call_count >= num_makes, "and what makes the drafts"


def test_pages_leave_room_for_the_states_that_drafts_are_made_from(tmp_path: Path) -> None:
    """Of sequences for which none are made for so long that all are due in one step."""
    wide = {"num_nextn_predict_layers": 1, "hidden_size": 512, "num_hidden_layers": 2}
    path = init_checkpoint("k2-nano", 0, tmp_path / "wide", dtype="float32", overrides=wide)
    config = dataclasses.replace(
        CONFIG, max_num_seqs=12, max_batched_tokens=12, max_waiting=12, num_blocks=10**6
    )
    sampling = SamplingParams(temperature=0, max_tokens=BLOCK_TOKENS + 2)
    room = {"measures": True, "measure_pages": True, "gpu_memory_utilization": 1.0}
    with (
        mock.patch.object(Speculation, "choose", return_value={}),
        emulated(device_bytes=24 << 20) as gpus,
        reference_ops(),
        served(path, "cuda", EAGER, drafts=drafts_of(MTP), config=config, **room) as engine,
    ):
        engine.run({0: [(prompt(1, number), sampling) for number in range(12)]})
        assert gpus.memory.peak[0] > 20 << 20, "pages take what is left"
        gpus.finish()


def watched(replays: type[DecodeGraphs] | type[CapturedGuesses]) -> Any:
    """Have the calls of `replay` counted."""
    return mock.patch.object(replays, "replay", autospec=True, side_effect=replays.replay)


@pytest.mark.parametrize(("method", "head"), [(MTP, KimiK2), (EAGLE3, Eagle3Head)])
def test_a_layer_whose_guess_the_host_reads_cannot_be_captured(
    checkpoint: Path,
    methods: dict[str, SpeculativeConfig],
    method: str,
    head: type[KimiK2] | type[Eagle3Head],
) -> None:
    likeliest: Any = head.likeliest

    def read(self: Any, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = likeliest(self, states)
        found.tolist()
        return found

    with (
        mock.patch.object(head, "likeliest", read),
        emulated(),
        reference_ops(),
        pytest.raises(RuntimeError, match="captur"),
        served(checkpoint, "cuda", CAPTURED, drafts=methods[method]),
    ):
        pass
