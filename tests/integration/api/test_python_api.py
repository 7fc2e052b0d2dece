"""`mooncake.LLM` and `mooncake.AsyncLLM` on k2-nano: they return what HTTP answers, token for token
and number for number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncake
from mooncake import LLM, AsyncLLM, RequestOutput, SamplingParams
from mooncake.base import InvalidRequest
from mooncake.cli.chat import TRIES
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server import Server, serving

TOLERANCE = 1e-4
"""Of a logprob: requests may share a step in one place and not in the other."""

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "num_threads": 1}
PROMPTS = ["The quick brown fox", "jumps over the lazy dog, and then"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with serving(str(home), "--colocated", *words, log=home.parent / "log") as server:
        yield server


@pytest.fixture(scope="module")
def llm(home: Path) -> Iterator[LLM]:
    with LLM(str(home), **SETTINGS) as served:
        yield served


def check_logprobs(mine: Any, theirs: Any) -> None:
    """Compare candidates by token id with those of HTTP's `prompt_logprobs`."""
    assert len(mine) == len(theirs)
    for ours, other in zip(mine, theirs, strict=True):
        assert (ours is None) == (other is None)
        if ours is not None:
            assert sorted(map(str, ours)) == sorted(other)
            for token, entry in ours.items():
                found = other[str(token)]
                assert (entry.rank, entry.decoded_token) == (found["rank"], found["decoded_token"])
                assert entry.logprob == pytest.approx(found["logprob"], abs=TOLERANCE)


def test_prompts_are_continued_as_http_does(llm: LLM, server: Server) -> None:
    params = SamplingParams(
        n=2, seed=7, temperature=1.0, top_p=0.9, max_tokens=12, logprobs=3, prompt_logprobs=2,
        ignore_eos=True,
    )  # fmt: skip
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        reply = server.complete(prompt, **params.model_dump(exclude_unset=True))
        assert (output.prompt, output.finished) == (prompt, True)
        assert output.num_prompt_tokens == reply["usage"]["prompt_tokens"]
        for mine, theirs in zip(output.outputs, reply["choices"], strict=True):
            assert list(output.prompt_token_ids) == reply["choices"][0]["prompt_token_ids"]
            assert list(mine.token_ids) == theirs["token_ids"]
            assert (mine.text, mine.finish_reason) == (theirs["text"], theirs["finish_reason"])
            assert mine.logprobs is not None
            own = [entry[token] for token, entry in zip(mine.token_ids, mine.logprobs, strict=True)
                   if entry is not None]  # fmt: skip
            assert [each.logprob for each in own] == pytest.approx(
                theirs["logprobs"]["token_logprobs"], abs=TOLERANCE
            )
            assert [each.decoded_token for each in own] == theirs["logprobs"]["tokens"]
        check_logprobs(output.prompt_logprobs, reply["choices"][0]["prompt_logprobs"])


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["e"], "max_tokens": 40, "temperature": 0.0},
        {"structured_outputs": {"regex": "[a-c]{2,5}-[0-9]x"}, "seed": 3, "max_tokens": 30},
        {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0.0, "max_tokens": 8},
        {"bad_words": ["a"], "repetition_penalty": 1.2, "seed": 5, "max_tokens": 16},
    ],
)
def test_every_field_means_the_same(llm: LLM, server: Server, fields: dict[str, Any]) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(**fields))
    [choice] = server.complete(PROMPTS[0], **fields)["choices"]
    [mine] = output.outputs
    assert (list(mine.token_ids), mine.text) == (choice["token_ids"], choice["text"])
    assert (mine.finish_reason, mine.stop_reason) == (
        choice["finish_reason"],
        choice["stop_reason"],
    )


def test_conversations_are_answered_as_http_does(llm: LLM, server: Server) -> None:
    params = SamplingParams(seed=11, max_tokens=10, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [output] = llm.chat(HI, params)
    sent = params.model_dump(exclude_unset=True) | {"logprobs": True, "top_logprobs": 2}
    body = {"messages": HI, "return_token_ids": True, **sent}
    reply = server.client.post("/v1/chat/completions", json=body).json()
    [choice], [mine] = reply["choices"], output.outputs
    assert (list(mine.token_ids), mine.message) == (choice["token_ids"], choice["message"])
    assert mine.logprobs is not None
    for entry, theirs in zip(mine.logprobs, choice["logprobs"]["content"], strict=True):
        assert entry is not None
        own = next(iter(entry.values()))
        assert own.logprob == pytest.approx(theirs["logprob"], abs=TOLERANCE)
        assert own.decoded_token == theirs["token"]
        tops = {each["token"] for each in theirs["top_logprobs"]}
        assert tops <= {each.decoded_token for each in entry.values()}
    check_logprobs(output.prompt_logprobs, reply["prompt_logprobs"])


def test_one_parameter_set_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 5)]
    assert [len(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, each)] == [3, 5]
    with pytest.raises(InvalidRequest, match="1 SamplingParams for 2 prompts"):
        llm.generate(PROMPTS, each[:1])


def test_streams_end_as_whole_answers_and_may_be_left(home: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    [expected] = llm.generate(PROMPTS[0], params)

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(str(home), **SETTINGS) as engine:
            seen = [output async for output in engine.generate(PROMPTS[0], params)]
            async for _ in engine.generate(PROMPTS[0], max_tokens=2000, ignore_eos=True):
                break
            parts = [output async for output in engine.chat(HI, max_tokens=6, ignore_eos=True)]
            assert parts[-1].outputs[0].message is not None
            with pytest.raises(InvalidRequest, match="did you mean max_tokens"):
                engine.generate("x", max_token=3)
        with pytest.raises(InvalidRequest, match="closed"):
            engine.generate("x")
        return seen

    seen = asyncio.run(main())
    assert seen[-1].outputs[0].token_ids == expected.outputs[0].token_ids
    assert seen[-1].text == expected.text
    assert len(seen) > 5
    assert [len(one.outputs[0].token_ids) for one in seen] == sorted(
        len(one.outputs[0].token_ids) for one in seen
    )


def test_public_names_are_there_and_others_are_not() -> None:
    assert all(getattr(mooncake, name) for name in mooncake.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        mooncake.nothing  # noqa: B018


def test_the_demo_model_answers_what_chat_proposes() -> None:
    with LLM("k2-demo", num_threads=1, kv_cache_memory_bytes="64MiB") as llm:
        talks = [[{"role": "user", "content": question}] for question in TRIES]
        answers = [llm.chat(talk)[0].text for talk in talks]
    for part, answer in zip(("serving engine", "932", "Anna"), answers, strict=True):
        assert part in answer
