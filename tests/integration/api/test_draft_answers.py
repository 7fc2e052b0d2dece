"""Answers with drafts are those without, as a client sees them: text cut at stop strings, whatever
came with it in the same step; log-probabilities, finish reasons, several answers to a prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake import LLM, RequestOutput, SamplingParams
from mooncake.engine.speculation import ACCEPTED_TOKENS
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.engine.free_drafts import drafts_cost_nothing
from tests.support.waiting import LONG_S

METHODS = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
PROMPTS = ["one two one two one two one", "The quick brown fox jumps over"]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "num_threads": 1, "kv_cache_memory_bytes": "16MiB",
}  # fmt: skip
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=5, n=2, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=40, temperature=0.0, allowed_token_ids=[100, 101, 102]),
    SamplingParams(max_tokens=30, temperature=0.0, presence_penalty=0.3, ignore_eos=True),
]


def asked(llm: LLM, stops: list[str]) -> list[RequestOutput]:
    """Return the answers to every prompt, all without stop strings and one with each."""
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    answers = llm.generate(prompts, PARAMS * len(PROMPTS))
    for stop in stops:
        params = SamplingParams(
            max_tokens=40, temperature=0.0, ignore_eos=True, stop=[stop], logprobs=1
        )
        answers += llm.generate(PROMPTS[1:], params)
    return answers


def seen(answers: list[RequestOutput]) -> list[Any]:
    """Return what a client sees of answers but for the numbers of their log-probabilities."""
    return [
        (each.text, list(each.token_ids), each.finish_reason, each.stop_reason)
        for answer in answers
        for each in answer.outputs
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "nano"
    layers = {"num_nextn_predict_layers": 1}
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32", overrides=layers)


@pytest.fixture(scope="module")
def stops_and_truth(home: Path) -> tuple[list[str], list[RequestOutput]]:
    with LLM(str(home), **SETTINGS) as llm:
        text = llm.generate(PROMPTS[1], PARAMS[0])[0].outputs[0].text
        assert len(text) > 40
        stops = [text[at : at + 2] for at in range(11, 35, 8)]
        return stops, asked(llm, stops)


free_drafts = pytest.fixture(autouse=True)(drafts_cost_nothing)


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without_drafts(
    home: Path, stops_and_truth: tuple[list[str], list[RequestOutput]], method: str
) -> None:
    stops, truth = stops_and_truth
    with LLM(str(home), speculative_config=METHODS[method], **SETTINGS) as llm:
        found = asked(llm, stops)
        cluster = llm._engine._workers._cluster
        assert cluster is not None
        [worker] = cluster.worker_ids
        driver = cluster._workers[worker].driver
        counters = driver.call(lambda machine, _: machine.instance.load().counters).result(LONG_S)
    assert counters[ACCEPTED_TOKENS] > 10
    assert seen(found) == seen(truth)
    ends = [answer.outputs[0].stop_reason for answer in found]
    assert ends[-len(stops) :] == stops
    for mine, theirs in zip(found, truth, strict=True):
        for own, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert (own.logprobs is None) == (other.logprobs is None)
            for at, token in enumerate(own.token_ids if own.logprobs and other.logprobs else ()):
                left, right = own.logprobs[at][token], other.logprobs[at][token]
                assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
                assert left.rank == right.rank
