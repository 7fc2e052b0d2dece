"""Steps with drafts on emulated GPUs, by one rank and by two, with the tokens of one rank on the
CPU that computes no drafts.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from mooncake.base import SamplingParams, Shape
from mooncake.engine.config import MTP, NGRAM, SpeculativeConfig
from mooncake.engine.speculation import ACCEPTED_TOKENS, DRAFT_TOKENS, RowCost
from mooncake.launch.worker import rank_processes
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.device.served import Joins, prompt, served
from tests.device.test_ranks import CAPTURED, EAGER
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import followers_emulated
from tests.support.cuda.streams import RANDOM

pytestmark = pytest.mark.usefixtures("forked")
JOINS: Joins = {
    0: [
        (prompt(5, 0), SamplingParams(temperature=0, max_tokens=24)),
        (prompt(37, 1), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=11)),
    ],
    2: [(prompt(14, 2), SamplingParams(temperature=0, max_tokens=12))],
}
SETTINGS = {NGRAM: {"prompt_lookup_min": 1}, MTP: {}}


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of k2-nano with an MTP layer."""
    path = tmp_path_factory.mktemp("nano") / "mtp"
    layers = {"num_nextn_predict_layers": 1}
    return init_checkpoint("k2-nano", 0, path, dtype="float32", overrides=layers)


@pytest.fixture(scope="module")
def wanted(with_mtp: Path) -> dict[int, list[int]]:
    """The tokens of one rank on the CPU, which computes no drafts."""
    with served(with_mtp, "cpu") as engine:
        return engine.run(JOINS)


@pytest.mark.parametrize(
    ("words", "backend", "method"),
    [
        ("tp1", EAGER, MTP), ("tp2-dcp2", EAGER, MTP), ("tp2", CAPTURED, NGRAM),
    ],
)  # fmt: skip
def test_drafts_change_no_token(
    with_mtp: Path, wanted: dict[int, list[int]], words: str, backend: str, method: str
) -> None:
    shape = Shape.parse(words)
    machine = {"num_devices": shape.num_ranks, "order": RANDOM, "seed": 3}
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=2, **SETTINGS[method])
    with (
        mock.patch.object(rank_processes, "EXCHANGE_S", 600.0),  # also where four share two cores
        mock.patch.object(RowCost, "known", False),  # every other step has drafts, whatever it took
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
    ):
        with served(with_mtp, "cuda", backend, drafts=drafts, shape=shape) as engine:
            assert engine.run(JOINS) == wanted
            counters = engine.engine.counters
            assert counters[DRAFT_TOKENS] > counters[ACCEPTED_TOKENS] > 0
            engine.engine.check_integrity([], [])
        gpus.finish()
