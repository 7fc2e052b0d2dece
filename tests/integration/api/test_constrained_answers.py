"""Random weights behind the whole engine: whatever the model would say, complete answers are valid.

Tokens are nearly uniform, so every mistake that a grammar lets through is made sooner or later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from mooncake.launch.llm import LLM
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.api.json_schemas import SchemaMaker
from tests.support.examples import examples

BATCH = 48
MAX_TOKENS = 220
CLOSING = '"]}'
"""Made more likely, so that more answers come to their end."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    # One layer's tokens are as random as three layers', and take half the time.
    init_checkpoint("k2-nano", seed=3, out=out, dtype="float32", overrides={"num_hidden_layers": 1})
    with LLM(str(out), max_model_len=4096, dtype="float32", num_threads=1) as served:
        yield served


@pytest.fixture(scope="module")
def bias(llm: LLM) -> dict[str, float]:
    encode = llm.get_tokenizer().encode
    return {str(token): 10.0 for letter in CLOSING for token in encode(letter)}


def ask(llm: LLM, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all bodies at once and return the choices."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        results = [one for [one] in threads.map(lambda body: llm.chat(**body), bodies)]
    return [
        {"finish_reason": result.outputs[0].finish_reason, **(result.outputs[0].message or {})}
        for result in results
    ]


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls_of_random_tools(llm: LLM, bias: dict[str, float], seed: int, count: int) -> int:
    """Have `count` requests call random tools, check every call and return how many came whole."""
    maker = SchemaMaker(seed)
    num_whole = 0
    for first in range(0, count, BATCH):
        declared = [
            {"look-up.v2": maker.parameters(), "look_up": maker.parameters()}
            for _ in range(min(BATCH, count - first))
        ]
        bodies = [
            {
                "messages": [{"role": "user", "content": f"request {first + number}"}],
                "tools": [tool(name, schema) for name, schema in tools.items()],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "max_tokens": MAX_TOKENS,
                "temperature": 1.0,
                "seed": seed * 1000 + first + number,
                "logit_bias": bias,
            }
            for number, tools in enumerate(declared)
        ]
        for tools, message in zip(declared, ask(llm, bodies), strict=True):
            if message["finish_reason"] != "tool_calls":
                assert message["finish_reason"] == "length"
                assert len(message.get("tool_calls", [])) <= 1
                continue
            [call] = message["tool_calls"]
            assert call["id"].startswith(f"functions.{call['function']['name']}:")
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict)
            jsonschema.validate(arguments, tools[call["function"]["name"]])
            assert not message["content"]
            num_whole += 1
    return num_whole


@pytest.mark.timeout(1200)
def test_calls_of_a_thousand_random_tools_are_valid(llm: LLM, bias: dict[str, float]) -> None:
    count = examples(528)  # each request declares two
    assert calls_of_random_tools(llm, bias, seed=2, count=count) > count * 5 // 6


def test_free_text_may_lead_to_calls_and_those_are_valid(llm: LLM, bias: dict[str, float]) -> None:
    """The model is drawn to the section's marker; nothing but the marker opens a call."""
    opening = llm.get_tokenizer().special_id("<|tool_calls_section_begin|>")
    schema = SchemaMaker(5).parameters()
    bodies = [
        {
            "messages": [{"role": "user", "content": f"request {number}"}],
            "tools": [tool("go", schema)],
            "max_tokens": 400,
            "temperature": 1.0,
            "seed": number,
            "logit_bias": {**bias, str(opening): 14.0},
        }
        for number in range(24)
    ]
    messages = ask(llm, bodies)
    called = [message for message in messages if message["finish_reason"] == "tool_calls"]
    assert len(called) >= 5
    assert any(message["content"] for message in called)
    for message in called:
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "go"
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])


FORMS: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": SchemaMaker(9).parameters()},
        }
    },
    "object": {"response_format": {"type": "json_object"}},
    "structured": {"structured_outputs": {"json": {"type": "array", "items": {"enum": [1, 22]}}}},
    "regex": {"structured_outputs": {"regex": r"[a-c]{2,5}-\d+x"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no", "maybe so", "你好"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= ("ab" | "c")+ "."'}},
}


def check_form(name: str, text: str) -> None:
    if name == "regex":
        jsonschema.validate(text, {"type": "string", "pattern": r"^[a-c]{2,5}-\d+x$"})
    elif name == "choice":
        assert text in FORMS["choice"]["structured_outputs"]["choice"]
    elif name == "grammar":
        jsonschema.validate(text, {"type": "string", "pattern": r"^(ab|c)+\.$"})
    else:
        schema = {
            "schema": FORMS["schema"]["response_format"].get("json_schema", {}).get("schema"),
            "object": {"type": "object"},
            "structured": {"type": "array", "items": {"enum": [1, 22]}},
        }[name]
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("name", FORMS)
def test_answers_of_a_form(llm: LLM, bias: dict[str, float], name: str) -> None:
    settings = {
        "max_tokens": 200, "temperature": 1.0, "logit_bias": bias, "n": 4, "min_tokens": 3,
        "logprobs": True, **FORMS[name],
    }  # fmt: skip
    [chat] = llm.chat([{"role": "user", "content": "go"}], seed=4, **settings)
    settings["logprobs"] = 1
    [plain] = llm.generate("go", seed=5, **settings)
    whole = [out.text for out in (*chat.outputs, *plain.outputs) if out.finish_reason == "stop"]
    assert len(whole) >= 4
    for text in whole:
        check_form(name, text)
