"""One k2-nano behind a real server, asked by the official clients through all three chat APIs:
constrained calls, streams that say what whole answers say, the numbers of transformers.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
import torch

from benchmarks.k2vv import NO_ANSWER, measure
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.api.json_schemas import SchemaMaker
from tests.support.serve.server import Server, serving
from tests.support.waiting import LONG_S

TOLERANCE = 2e-3
"""Of a logprob: both sides compute in float32, in different orders."""

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look-up.v2", "parameters": SCHEMA}}
ITEM_TOOL: Any = {"type": "function", "name": "look-up.v2", "parameters": SCHEMA}
BLOCK_TOOL: Any = {"name": "look-up.v2", "input_schema": SCHEMA}
pytestmark = pytest.mark.slow
NUM_TOKENS = 128
NUM_REQUESTS = int(os.environ.get("K2VV_REQUESTS", "24"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    words = ["--colocated", "--dtype", "float32", "--max-model-len", "4096"]
    with serving(str(home), *words, log=home.parent / "log") as server:
        yield server


@pytest.fixture(scope="module")
def bias(home: Path) -> dict[str, float]:
    """Closing characters are made more likely, so that answers come to their end."""
    tokenizer = load_tokenizer(home)
    return {str(token): 6.0 for letter in '"]}' for token in tokenizer.encode(letter)}


Call = tuple[str, Any]


def chat_calls(client: openai.OpenAI, extra: dict[str, Any], *, stream: bool) -> list[Call]:
    ask: dict[str, Any] = {
        "model": "nano", "messages": [{"role": "user", "content": "go"}], "tools": [CHAT_TOOL],
        "tool_choice": "required", "max_completion_tokens": NUM_TOKENS, "extra_body": extra,
    }  # fmt: skip
    if not stream:
        message = client.chat.completions.create(**ask).choices[0].message
        return [(one.function.name, one.function.arguments) for one in message.tool_calls or []]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in client.chat.completions.create(**ask, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.function.name:
                names[piece.index] = piece.function.name
            said = arguments.get(piece.index, "")
            arguments[piece.index] = said + (piece.function.arguments or "")
    return [(names[index], arguments[index]) for index in sorted(names)]


def response_calls(client: openai.OpenAI, extra: dict[str, Any], *, stream: bool) -> list[Call]:
    ask: dict[str, Any] = {
        "model": "nano", "input": "go", "tools": [ITEM_TOOL], "tool_choice": "required",
        "max_output_tokens": NUM_TOKENS, "extra_body": extra,
    }  # fmt: skip
    if stream:
        *_, last = client.responses.create(**ask, stream=True)
        output = last.response.output
    else:
        output = client.responses.create(**ask).output
    return [(item.name, item.arguments) for item in output if item.type == "function_call"]


def message_calls(
    client: anthropic.Anthropic, extra: dict[str, Any], *, stream: bool
) -> list[Call]:
    ask: dict[str, Any] = {
        "model": "nano", "max_tokens": NUM_TOKENS, "tools": [BLOCK_TOOL], "extra_body": extra,
        "messages": [{"role": "user", "content": "go"}], "tool_choice": {"type": "any"},
    }  # fmt: skip
    if stream:
        with client.messages.stream(**ask) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**ask)
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_constrained_calls_are_the_same_through_all_apis(
    server: Server, bias: dict[str, float]
) -> None:
    num_whole = 0
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ours,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as theirs,
    ):
        for seed in range(4):
            extra = {"seed": seed, "logit_bias": bias, "temperature": 1.0}
            expected = chat_calls(ours, extra, stream=False)
            assert chat_calls(ours, extra, stream=True) == expected
            for stream in (False, True):
                assert response_calls(ours, extra, stream=stream) == expected
                blocks = message_calls(theirs, extra, stream=stream)
                assert [name for name, _ in blocks] == [name for name, _ in expected]
                whole = [value for _, value in blocks if value]
                jsons = [json.loads(text) for _, text in expected if is_json(text)]
                assert whole[: len(jsons)] == jsons
            for name, text in expected:
                assert name == "look-up.v2"
                if is_json(text):
                    jsonschema.validate(json.loads(text), SCHEMA)
                    num_whole += 1
    assert num_whole >= 3


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


FORMS: dict[str, dict[str, Any]] = {
    "free": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "regex": {"structured_outputs": {"regex": r"[a-c]{2,9}-\d+x"}},
    "tools": {"tools": [CHAT_TOOL], "tool_choice": "required"},
    "stops": {"stop": ["a", "e ", "}"], "include_stop_str_in_output": True},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_stream_equals_the_whole_answer(
    server: Server, bias: dict[str, float], name: str
) -> None:
    """Text, calls, token ids, logprobs, ends and usage, of several choices."""
    for seed in range(3):
        body = {
            "messages": [{"role": "user", "content": "hello"}], "seed": seed, "n": 2,
            "max_tokens": 80, "temperature": 1.0, "logit_bias": bias, "logprobs": True,
            "top_logprobs": 2, "return_token_ids": True, **FORMS[name],
        }  # fmt: skip
        reply = server.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        whole = reply.json()
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        usage, choices = collect(server.client, body | streamed)
        assert usage == {**whole["usage"], "prompt_tokens_details": usage["prompt_tokens_details"]}
        for choice in whole["choices"]:
            message, got = choice["message"], choices[choice["index"]]
            assert got["content"] == (message["content"] or "")
            calls = [one["function"] for one in message.get("tool_calls", [])]
            assert list(got["calls"].values()) == calls
            assert got["token_ids"] == choice["token_ids"]
            assert [entry["token"] for entry in got["logprobs"]] == [
                entry["token"] for entry in choice["logprobs"]["content"]
            ]
            ended = (choice["finish_reason"], choice["stop_reason"])
            assert got["end"] == ended


def collect(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, dict[int, Any]]:
    """Put a chat stream together: its usage, and each choice's text, calls, tokens and end."""
    usage: Any = None
    choices: dict[int, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                empty = {"content": "", "calls": {}, "token_ids": [], "logprobs": [], "end": None}
                got = choices.setdefault(choice["index"], empty)
                got["content"] += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls", []):
                    call = got["calls"].setdefault(piece["index"], {"arguments": ""})
                    call["arguments"] += piece["function"].get("arguments", "")
                    if "name" in piece["function"]:
                        call["name"] = piece["function"]["name"]
                got["token_ids"] += choice.get("token_ids", [])
                got["logprobs"] += (choice["logprobs"] or {}).get("content", [])
                if choice["finish_reason"]:
                    got["end"] = (choice["finish_reason"], choice["stop_reason"])
    return usage, choices


@pytest.fixture(scope="module")
def truth(home: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(home), dtype=torch.float32).eval()


def true_logprobs(truth: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logprobs [positions, vocab] of what follows each token."""
    with torch.inference_mode():
        return torch.log_softmax(truth(torch.tensor([tokens])).logits[0].float(), dim=-1)


def test_logprobs_prompt_logprobs_echo_and_n_are_those_of_transformers(
    server: Server, home: Path, truth: torch.nn.Module
) -> None:
    tokenizer = load_tokenizer(home)
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3)
    fields: dict[str, Any] = {
        "max_tokens": 12, "n": 3, "seed": 11, "temperature": 1.0, "logprobs": 4, "echo": True,
        "prompt_logprobs": 4, "ignore_eos": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = server.complete(prompt, **fields)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    for number, choice in enumerate(answer["choices"]):
        tokens = prompt + choice["token_ids"]
        expected = true_logprobs(truth, tokens)
        columns = choice["logprobs"]
        first = 0 if number == 0 else len(prompt)  # the first choice carries those of the prompt
        assert columns["tokens"] == [f"token_id:{token}" for token in tokens[first:]]
        assert choice["text"].startswith(tokenizer.decode(prompt))
        for at in range(max(1, first), len(tokens)):
            row = expected[at - 1]
            own = columns["token_logprobs"][at - first]
            assert own == pytest.approx(row[tokens[at]].item(), abs=TOLERANCE), at
            top = sorted(columns["top_logprobs"][at - first].values(), reverse=True)[:4]
            assert top == pytest.approx(row.topk(4).values.tolist(), abs=TOLERANCE), at
        alone = server.complete(prompt, **fields | {"n": 1, "seed": 11 + number})
        assert alone["choices"][0]["token_ids"] == choice["token_ids"]
        if number:
            assert "prompt_logprobs" not in choice
            continue
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        assert choice["prompt_logprobs"][0] is None
        for at in range(1, len(prompt)):
            candidates = choice["prompt_logprobs"][at]
            row = expected[at - 1]
            own = candidates[str(prompt[at])]
            assert own["logprob"] == pytest.approx(row[prompt[at]].item(), abs=TOLERANCE)
            rank = 1 + int((row > row[prompt[at]] + TOLERANCE).sum())
            lowest = 1 + int((row > row[prompt[at]] - TOLERANCE).sum())
            assert rank <= own["rank"] <= lowest
            for token, entry in candidates.items():
                assert entry["logprob"] == pytest.approx(row[int(token)].item(), abs=TOLERANCE)


@pytest.mark.parametrize(("width", "penalty", "ends"), [(4, 1.0, 0), (3, 2.0, 0), (4, 0.0, 3)])
def test_beam_search_finds_what_transformers_finds(
    server: Server, truth: Any, width: int, penalty: float, ends: int
) -> None:
    """`ends`: so many of the likely tokens end an answer, so that lengths differ."""
    prompt = [40, 50, 60, 70, 80]
    likely = true_logprobs(truth, prompt)[-1].topk(20).indices.tolist()
    stop_ids = likely[1 : 1 + ends]
    with torch.inference_mode():
        expected = truth.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)),
            num_beams=width, num_return_sequences=width, max_new_tokens=8, do_sample=False,
            length_penalty=penalty, early_stopping="never", eos_token_id=stop_ids or None,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    answer = server.complete(
        prompt, n=width, max_tokens=8, use_beam_search=True, length_penalty=penalty,
        ignore_eos=True, stop_token_ids=stop_ids, logprobs=0,
    )  # fmt: skip
    num_same = 0
    for choice, tokens, score in zip(
        answer["choices"], expected.sequences.tolist(), expected.sequences_scores, strict=True
    ):
        got = choice["token_ids"]
        total = sum(choice["logprobs"]["token_logprobs"]) / len(got) ** penalty
        # An end among the less likely tokens counts here, as in vLLM, and not there.
        if total < score.item() + TOLERANCE:
            assert got == tokens[len(prompt) : len(prompt) + len(got)]
            assert total == pytest.approx(score.item(), abs=5 * TOLERANCE)
        num_same += total < score.item() + TOLERANCE
    assert num_same >= (width - 1 if ends else width)
    if ends:
        assert any(choice["finish_reason"] == "stop" for choice in answer["choices"])


def test_k2vvs_measure_on_a_random_model(server: Server, bias: dict[str, float]) -> None:
    """Its own request format, random tools, random weights: every finished call is right."""
    maker = SchemaMaker(21)
    requests = [
        {
            "messages": [
                {"role": "system", "content": "You are Kimi."},
                {"role": "user", "content": f"request {number}"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "description": "d",
                        "parameters": maker.parameters(),
                    },
                }
                for name in ("look-up.v2", "search_2")
            ],
            "tool_choice": "required",
            "temperature": 1.0,
            "seed": number,
            "max_tokens": 300,
            "logit_bias": bias,
            "stream": False,
        }
        for number in range(NUM_REQUESTS)
    ]

    async def run() -> None:
        url = f"{server.url}/v1/"
        async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as client:
            tally, _ = await measure(requests, client, 8)
        assert NO_ANSWER not in tally.finished
        print(tally)
        assert tally.finished["tool_calls"] >= NUM_REQUESTS // 2
        assert tally.faults == {}
        assert tally.schema_accuracy == 1.0

    asyncio.run(run())
