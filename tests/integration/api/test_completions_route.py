"""Completions as the official client sees them, over HTTP on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.support.api.server import Script, ScriptedBackend, live_api_server, says, tiny_tokenizer

TEXT = "hello the 你好 in the end"
TOKENIZER = tiny_tokenizer()


def run(
    script: Script, test: Callable[[openai.AsyncOpenAI, ScriptedBackend], Awaitable[None]]
) -> None:
    async def main() -> None:
        backend = ScriptedBackend(script)
        async with (
            live_api_server(backend) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            await test(client, backend)
        assert backend.num_running == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [TOKENIZER.encode("hello")]),
        (["a", "hello"], [[97], TOKENIZER.encode("hello")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("a<|im_end|>", [TOKENIZER.encode("a<|im_end|>")]),
    ],
)
def test_prompts_in_all_forms(prompt: Any, expected: list[list[int]]) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(model="tiny", prompt=prompt)
        assert [asked.prompt_tokens.tolist() for asked in backend.requests] == expected
        assert [choice.index for choice in reply.choices] == list(range(len(expected)))
        assert all(choice.text == TEXT for choice in reply.choices)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == sum(map(len, expected))
        assert reply.id.startswith("cmpl-")
        assert reply.object == "text_completion"
        assert all(asked.sampling.max_tokens == 16 for asked in backend.requests)

    run(says(TEXT), test)


def test_choices_are_ordered_prompt_by_prompt() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(model="tiny", prompt=["a", "b"], n=3, seed=10)
        assert [choice.index for choice in reply.choices] == list(range(6))
        asked = backend.requests
        assert [one.prompt_tokens.tolist() for one in asked] == [[97]] * 3 + [[98]] * 3
        assert [one.sampling.seed for one in asked] == [10, 11, 12] * 2
        base = asked[0].request_id.removesuffix("-0")
        assert [one.request_id for one in asked] == [f"{base}-{i}" for i in range(6)]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == 2

    run(says(TEXT), test)


def test_echo_puts_the_prompt_before_the_text() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(model="tiny", prompt=["ab", "你"], echo=True)
        assert [choice.text for choice in reply.choices] == ["ab" + TEXT, "你" + TEXT]
        reply = await client.completions.create(model="tiny", prompt=[[97, 98]], echo=True)
        assert reply.choices[0].text == "ab" + TEXT

    run(says(TEXT), test)


def test_logprobs_have_four_columns() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(
            model="tiny", prompt="ab", echo=True, logprobs=2, max_tokens=2
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", "b", "hello", " the"]
        assert logprobs.text_offset == [0, 1, 2, 7]
        assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.top_logprobs[1] == {"b": -0.5, "c": -1.5}
        assert logprobs.top_logprobs[2] == {"hello": -0.5, " w": -1.5}

    run(says(TEXT), test)


def test_scoring_a_prompt_makes_no_text() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(
            model="tiny", prompt="ab", echo=True, logprobs=1, max_tokens=0
        )
        [choice] = reply.choices
        assert (choice.text, choice.finish_reason) == ("ab", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b"]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 0
        assert backend.requests[0].sampling.max_tokens == 1

    run(says(TEXT), test)


@pytest.mark.parametrize("group", [1, 4, 50])
@pytest.mark.parametrize("echo", [True, False])
def test_stream_and_whole_agree(group: int, echo: bool) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        settings: dict[str, Any] = {
            "model": "tiny", "prompt": ["ab", "c"], "n": 2, "echo": echo, "logprobs": 1,
            "stop": ["end"], "seed": 1,
        }  # fmt: skip
        whole = await client.completions.create(**settings)
        stream = await client.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        texts: dict[int, str] = dict.fromkeys(range(4), "")
        columns: dict[int, list[Any]] = {index: [] for index in range(4)}
        ends: dict[int, Any] = {}
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.logprobs is not None:
                    part = choice.logprobs
                    columns[choice.index] += zip(
                        part.tokens, part.token_logprobs, part.top_logprobs, part.text_offset,
                        strict=True,
                    )  # fmt: skip
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
        assert usage == whole.usage
        for choice in whole.choices:
            part = choice.logprobs
            assert texts[choice.index] == choice.text
            assert ends[choice.index] == choice.finish_reason
            assert columns[choice.index] == list(
                zip(
                    part.tokens,
                    part.token_logprobs,
                    part.top_logprobs,
                    part.text_offset,
                    strict=True,
                )
            )

    run(says(TEXT, group=group), test)


def test_prompt_logprobs_in_the_shape_of_vllm() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(
            model="tiny", prompt="ab", extra_body={"prompt_logprobs": 2, "return_token_ids": True}
        )
        dump = reply.model_dump()["choices"][0]
        assert dump["prompt_logprobs"] == [
            None,
            {
                "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
                "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
            },
        ]
        assert dump["prompt_token_ids"] == [97, 98]
        assert dump["token_ids"] == TOKENIZER.encode(TEXT + "<|im_end|>")[:16]

    run(says(TEXT), test)


def test_what_is_the_prompts_own_comes_with_its_first_choice() -> None:
    """Its log-probabilities are computed for one sequence only, whatever `n` is."""

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        extra = {"prompt_logprobs": 1, "return_token_ids": True}
        ask = {"model": "tiny", "prompt": ["ab", "cde"], "n": 3, "max_tokens": 4}
        reply = await client.completions.create(**ask, extra_body=extra)
        asked = [request.sampling.num_prompt_logprobs for request in backend.requests]
        assert asked == [1, None, None] * 2
        dumps = [choice.model_dump() for choice in reply.choices]
        assert [each.get("prompt_token_ids") for each in dumps] == [
            [97, 98], None, None, [99, 100, 101], None, None,
        ]  # fmt: skip
        numbers = [len(each.get("prompt_logprobs") or []) for each in dumps]
        assert numbers == [2, 0, 0, 3, 0, 0]
        best = await client.completions.create(**ask | {"n": 1}, extra_body=extra | {"best_of": 3})
        numbers = [len(each.model_dump()["prompt_logprobs"]) for each in best.choices]
        assert numbers == [2, 3]
        echoed = await client.completions.create(**ask, logprobs=1, echo=True)
        for choice in echoed.choices:
            prompt = ["ab", "cde"][choice.index // 3]
            columns = choice.logprobs
            text = "".join(columns.tokens)
            assert choice.text.endswith(text)
            assert columns.text_offset[0] == (0 if choice.index % 3 == 0 else len(prompt))
            assert text.startswith(prompt) == (choice.index % 3 == 0)

    run(says(TEXT), test)


@pytest.mark.parametrize("stream", [False, True])
def test_long_replies_are_the_same_from_a_thread(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        ask: dict[str, Any] = {
            "model": "tiny", "prompt": "ab" * 40, "echo": True, "logprobs": 2, "n": 2, "seed": 1,
        }  # fmt: skip

        async def told() -> list[Any]:
            reply = await client.completions.create(**ask, stream=stream)
            chunks = [chunk async for chunk in reply] if stream else [reply]
            shown = [choice.model_dump() for chunk in chunks for choice in chunk.choices]
            return [
                (
                    "".join(each["text"] for each in shown if each["index"] == index),
                    [
                        column
                        for each in shown
                        if each["index"] == index and each["logprobs"]
                        for column in zip(*each["logprobs"].values(), strict=True)
                    ],
                )
                for index in range(2)
            ]

        here = await told()
        assert [len(columns) for _, columns in here] == [92, 12]
        monkeypatch.setattr("mooncake.api.http.response.MAX_SIZE_HERE", 0)
        assert await told() == here

    run(says(TEXT), test)


def test_stop_string_is_the_stop_reason() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.completions.create(model="tiny", prompt="a", stop=["in the"])
        [choice] = reply.choices
        assert (choice.text, choice.finish_reason) == ("hello the 你好 ", "stop")
        assert choice.model_dump()["stop_reason"] == "in the"
        kept = await client.completions.create(
            model="tiny", prompt="a", stop=["in the"],
            extra_body={"include_stop_str_in_output": True},
        )  # fmt: skip
        assert kept.choices[0].text == "hello the 你好 in the"

    run(says(TEXT), test)


def test_long_prompts_are_encoded_beside_the_loop_with_the_same_result() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        text = "hello the " * 3000
        await client.completions.create(
            model="tiny", prompt=text, extra_body={"truncate_prompt_tokens": 10}
        )
        assert backend.requests[0].prompt_tokens.tolist() == TOKENIZER.encode(text)[-10:]

    run(says(TEXT), test)


def test_prompt_cut_to_what_fits_leaves_room_for_the_default_answer() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        await client.completions.create(
            model="tiny", prompt=[1] * 500, extra_body={"truncate_prompt_tokens": -1}
        )
        [asked] = backend.requests
        assert (len(asked.prompt_tokens), asked.sampling.max_tokens) == (240, 16)

    run(says(TEXT), test)
