"""Answers with drafts are those without, however the cluster is cut up, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.api.constrained.grammar import json_rule
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.base import GenerateRequest, Grammar, SamplingParams
from mooncake.engine.config import SpeculativeConfig
from mooncake.engine.speculation import ACCEPTED_TOKENS, DRAFT_TOKENS
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from tests.support.engine.free_drafts import drafts_cost_nothing
from tests.support.followers import followers
from tests.support.model.eagle3_heads import (
    knowing_head,
    mla_config_of,
    random_tensors,
    write_head,
)
from tests.support.serve.model_cluster import ModelCluster, model_cluster, request

NUM_TOKENS = 40
SETTINGS: dict[str, Any] = {"max_model_len": 512, "block_size": 32}
METHODS = ("ngram", "mtp", "eagle3")
CROWD = [[number, *range(2, 41)] for number in range(6)]
PROMPTS = [[5, 6, 7, 8] * 10, [9, 10] * 30, list(range(11, 50)), [400, 3]]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert followers() == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    return init_checkpoint(
        "k2-nano", seed=3, out=out, dtype="float32", overrides={"num_nextn_predict_layers": 1}
    )


@pytest.fixture(scope="module")
def methods(model: Path) -> dict[str, SpeculativeConfig]:
    ngram, mtp, eagle3 = METHODS
    return {
        ngram: SpeculativeConfig(
            method=ngram, num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3
        ),
        mtp: SpeculativeConfig(method=mtp, num_speculative_tokens=3),
        eagle3: SpeculativeConfig(
            method=eagle3, num_speculative_tokens=3, model=str(model.parent / "head")
        ),
    }


@pytest.fixture(scope="module", autouse=True)
def head(model: Path) -> None:
    """An EAGLE-3 head that knows the greedy answers."""
    prompts = [*PROMPTS, *CROWD]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with DirectEngine.open(str(model), device="cpu", max_model_len=512, num_threads=1) as engine:
        found = engine.generate(prompts, [greedy] * len(prompts))
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, found, strict=True)]
    knowing_head(model, model.parent / "head", texts)


free_drafts = pytest.fixture(autouse=True)(drafts_cost_nothing)


def samplings(model: Path) -> list[dict[str, Any]]:
    end = load_tokenizer(model).special_id("<|im_end|>")
    assert end is not None
    schema = {"type": "array", "items": {"enum": ["ab", "abc"]}, "minItems": 4, "maxItems": 9}
    grammar = Grammar(text=f"start: a\na: {json_rule(schema, 'x')}", end_ids=[end])
    return [
        {},
        {"temperature": 0.7, "seed": 42, "top_p": 0.9},
        {"presence_penalty": 0.1, "frequency_penalty": 0.05, "repetition_penalty": 1.02},
        {"grammar": grammar, "stop_token_ids": frozenset({end}), "ignore_eos": False, "seed": 1},
    ]


def answers(cluster: ModelCluster, model: Path, *, is_cached: bool = False) -> list[list[int]]:
    """Return the tokens of every prompt with every sampling, all running together. `is_cached`:
    the first blocks of long prompts must come from a cache.
    """
    asked = [
        cluster.submit(request(f"{number}-{index}", tokens, NUM_TOKENS, **sampling))
        for number, sampling in enumerate(samplings(model))
        for index, tokens in enumerate(PROMPTS)
    ]
    ends = [answer.final() for answer in asked]
    assert not any(end.failure for end in ends)
    if is_cached:
        long = [len(tokens) > SETTINGS["block_size"] for tokens in PROMPTS]
        assert [end.num_cached_tokens > 0 for end in ends] == long * len(samplings(model))
    return [answer.tokens for answer in asked]


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    with model_cluster(model, 0, 1, kvstore=0, **SETTINGS) as cluster:
        return answers(cluster, model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", [(0, 1, 0), (1, 1, 1)])
def test_any_layout(
    model: Path,
    truth: list[list[int]],
    layout: tuple[int, int, int],
    methods: dict[str, SpeculativeConfig],
    method: str,
) -> None:
    prefill, decode, kvstore = layout
    speculation = methods[method]
    with model_cluster(
        model, prefill, decode, kvstore=kvstore, speculative_config=speculation, **SETTINGS
    ) as cluster:
        assert answers(cluster, model) == truth
        assert answers(cluster, model, is_cached=True) == truth, "from the cache"
        assert cluster.counter(DRAFT_TOKENS) >= cluster.counter(ACCEPTED_TOKENS)
        # An MTP layer of random weights is right by chance only.
        assert cluster.counter(DRAFT_TOKENS if method == "mtp" else ACCEPTED_TOKENS) > 0


def test_preemption(model: Path, methods: dict[str, SpeculativeConfig]) -> None:
    found = []
    for num_pages, speculation in ((64, None), *((10, each) for each in methods.values())):
        settings = {**SETTINGS, "max_model_len": 256, "num_gpu_blocks_override": num_pages}
        with model_cluster(
            model, 0, 1, kvstore=0, speculative_config=speculation, **settings
        ) as cluster:
            asked = [
                cluster.submit(request(f"r{number}", tokens, 100))
                for number, tokens in enumerate(CROWD)
            ]
            for answer in asked:
                answer.final()
            found.append([answer.tokens for answer in asked])
            assert (cluster.counter("preemptions") > 0) == (num_pages == 10)
            assert (cluster.counter(ACCEPTED_TOKENS) > 0) == (speculation is not None)
    assert found == found[:1] * 4


@pytest.mark.parametrize("method", METHODS)
def test_another_worker_goes_on_with_an_answer(
    model: Path, truth: list[list[int]], methods: dict[str, SpeculativeConfig], method: str
) -> None:
    speculation = methods[method]
    with model_cluster(model, 1, 2, speculative_config=speculation, **SETTINGS) as cluster:
        for number, expected in enumerate(truth[: len(PROMPTS)]):

            def made(attempt: int, number: int = number) -> GenerateRequest:
                return request(f"r{number}-{attempt}", PROMPTS[number], NUM_TOKENS)

            answer = cluster.submit_and_lose(made) if number == 1 else cluster.submit(made(0))
            answer.final()
            assert answer.tokens == expected


def test_deterministic_answers_are_equal_in_bfloat16_too(
    model: Path, methods: dict[str, SpeculativeConfig]
) -> None:
    """With rows of drafts in its steps a sequence's bits are those without them."""
    found = []
    for speculation in (None, *methods.values()):
        settings = {**SETTINGS, "deterministic": True, "dtype": "bfloat16"}
        with model_cluster(
            model, 0, 1, kvstore=0, speculative_config=speculation, **settings
        ) as cluster:
            found.append(answers(cluster, model))
            assert (cluster.counter(ACCEPTED_TOKENS) > 0) == (speculation is not None)
    assert found == found[:1] * 4


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("eagle3", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("eagle3", {"pipeline_parallel_size": 2}),
        ("mtp", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("mtp", {"pipeline_parallel_size": 2}),
    ],
)
def test_two_ranks_draft(
    model: Path,
    truth: list[list[int]],
    methods: dict[str, SpeculativeConfig],
    method: str,
    shape: dict[str, Any],
) -> None:
    """Two processes: each has the whole head or a part of the MTP layer, whose KV prefill hands
    over; or the last stage has what drafts, and states of the first one go there.
    """
    apart = int(method == "mtp")
    with model_cluster(
        model, apart, 1, kvstore=apart, by_role=apart > 0, speculative_config=methods[method],
        **shape, **SETTINGS,
    ) as cluster:  # fmt: skip
        assert answers(cluster, model) == truth
        assert answers(cluster, model, is_cached=True) == truth, "from the cache"
        assert cluster.counter(DRAFT_TOKENS if method == "mtp" else ACCEPTED_TOKENS) > 0


def test_a_head_with_mla(model: Path, truth: list[list[int]], tmp_path: Path) -> None:
    """One of random weights, which is right by chance only, behind prefill and from the pool."""
    spec = Checkpoint.open(model).spec
    config = mla_config_of(spec)
    head = write_head(tmp_path, config, random_tensors(config, spec))
    speculation = SpeculativeConfig(method="eagle3", num_speculative_tokens=3, model=str(head))
    with model_cluster(model, 1, 1, kvstore=1, speculative_config=speculation, **SETTINGS) as each:
        assert answers(each, model) == truth
        assert answers(each, model, is_cached=True) == truth, "from the cache"
        assert each.counter(DRAFT_TOKENS) > 0
