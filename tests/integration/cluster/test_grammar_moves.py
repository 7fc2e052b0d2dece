"""A grammar goes where its sequence goes: from prefill to decode, and on after a worker is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mooncake.api.constrained.grammar import json_rule
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.base import Grammar
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.api.json_schemas import SchemaMaker
from tests.support.serve.model_cluster import model_cluster, request

MAX_MODEL_LEN = 1024
NUM_ANSWERS = 6
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


def asked(model: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (schema, sampling) of every request."""
    tokenizer = load_tokenizer(model)
    end = tokenizer.special_id("<|im_end|>")
    assert end is not None
    bias = {token: 6.0 for letter in '"]}' for token in tokenizer.encode(letter)}
    maker = SchemaMaker(21)
    found = []
    for number in range(NUM_ANSWERS):
        schema = maker.parameters()
        grammar = Grammar(text=f"start: a\na: {json_rule(schema, 'x')}", end_ids=[end])
        sampling = {
            "grammar": grammar, "temperature": 1.0, "seed": number, "logit_bias": bias,
            "ignore_eos": False, "stop_token_ids": frozenset({end}),
        }  # fmt: skip
        found.append((schema, sampling))
    return found


def tokens_from(model: Path, prefill: int, decode: int) -> list[list[int]]:
    with model_cluster(
        model, prefill, decode, kvstore=min(prefill, 1), max_model_len=MAX_MODEL_LEN
    ) as cluster:
        answers = [
            cluster.submit(request(f"r{number}", [5, 6, 7 + number], MAX_TOKENS, **sampling))
            for number, (_, sampling) in enumerate(asked(model))
        ]
        for answer in answers:
            assert answer.final().failure is None
        return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    """What one engine gives for each."""
    return tokens_from(model, 0, 1)


def test_answers_are_valid(model: Path, truth: list[list[int]]) -> None:
    tokenizer = load_tokenizer(model)
    num_whole = 0
    for tokens, (schema, sampling) in zip(truth, asked(model), strict=True):
        if tokens[-1] in sampling["stop_token_ids"]:
            jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), schema)
            num_whole += 1
    assert num_whole >= 2


def test_a_first_token_from_prefill_is_gone_on_with(model: Path, truth: list[list[int]]) -> None:
    assert tokens_from(model, 1, 1) == truth


def test_a_lost_worker_leaves_no_trace(model: Path, truth: list[list[int]]) -> None:
    longest = max(range(NUM_ANSWERS), key=lambda number: len(truth[number]))
    assert len(truth[longest]) > 8
    _, sampling = asked(model)[longest]
    with model_cluster(model, 1, 2, max_model_len=MAX_MODEL_LEN) as cluster:
        answer = cluster.submit_and_lose(
            lambda attempt: request(f"r{attempt}", [5, 6, 7 + longest], MAX_TOKENS, **sampling)
        )
        assert answer.final().failure is None
    assert answer.tokens == truth[longest]
