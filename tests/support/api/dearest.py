"""The dearest legal value of every field that a POST route takes, and one above its bound.

One row a field of the OpenAPI document; the bounds are those of `mooncake.api.bounds`. A field that
is not here makes tests/unit/api/test_dearest.py fail; tests/integration/serve/test_prices.py sends
each row to a live server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mooncake.api.bounds import (
    ALLOWED_IDS,
    ANSWER_IDS,
    BAD_WORDS,
    BEAM_TOKENS,
    BEAM_WIDTH,
    BIASED_IDS,
    CHOICES,
    STOP_IDS,
)
from mooncake.api.config import ApiConfig
from mooncake.api.constrained.schema_graph import MAX_OPTIONAL, MAX_PROPERTIES
from mooncake.api.http.request_body import DIGITS_COST, ITEM_COST, NUM_DIGITS
from mooncake.api.schema.chat import MAX_TOOLS
from mooncake.api.schema.fields import INT64_MAX, MAX_ITEMS
from mooncake.base.large_settings import MAX_SETTINGS_BYTES

LIMITS = ApiConfig()
CONTEXT = 8192
"""The context of k2-demo, with which the walk is made."""
VOCAB = 1536


@dataclass(frozen=True)
class Dearest:
    """A field's row."""

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that make it legal, or dear."""
    above: Mapping[str, Any] | None = None
    """A body with more than the field's bound; None: there is no more than this."""
    named: str = ""
    """What the refusal of that names; "" = the field."""


def switch(value: object = True, **beside: Any) -> Dearest:
    """Return a field of few values."""
    return Dearest(value, beside)


def number(value: float, above: float, **beside: Any) -> Dearest:
    """Return a number with a range."""
    return Dearest(value, beside, {"": above})


WIDE = {"n": LIMITS.max_choices, "max_tokens": 24}
LONG = {"max_tokens": CONTEXT - 64, "ignore_eos": True}
FULL_TEXT = "the " * (LIMITS.max_body_bytes // 5)
"""Most of what a body may have."""
CONTEXT_IDS = [40 + at % 900 for at in range(CONTEXT - 40)]


def schema(num: int = MAX_PROPERTIES) -> dict[str, Any]:
    """Return a schema of so many properties, of which as many as may be are optional."""
    kinds = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "boolean"}]
    properties = {f"field_{at}": kinds[at % 4] for at in range(num)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[: max(16, num - MAX_OPTIONAL)],
    }


TOO_LARGE = "(" + "ab|" * (MAX_SETTINGS_BYTES // 3) + "a)"
WORDS = [f"choice {at}" for at in range(CHOICES.limit)]
GRAMMAR = "start: " + " | ".join(f'"term{at}"' for at in range(1500))
TEMPLATE_FIELDS = {f"name_{at}": [at] * 40 for at in range(5000)}
TURNS = LIMITS.max_body_cost // 32
"""Short turns: about what `max_body_cost` leaves room for."""

SAMPLING: dict[str, Dearest] = {
    "temperature": number(2, 2.1),
    "top_p": number(0.999, 1.1, **WIDE),
    "top_k": number(VOCAB // 2, 2**31, **WIDE),
    "min_p": number(0.001, 1.1, **WIDE),
    "presence_penalty": number(2, 2.1, **WIDE),
    "frequency_penalty": number(2, 2.1, **WIDE),
    "repetition_penalty": number(1.1, 101, **WIDE),
    "seed": number(INT64_MAX, INT64_MAX + 1),
    "min_tokens": number(8, 10**6),
    "stop_token_ids": Dearest(
        list(range(VOCAB - STOP_IDS.limit, VOCAB)), WIDE, {"": list(range(STOP_IDS.limit + 1))}
    ),
    "ignore_eos": switch(**WIDE),
    "logit_bias": Dearest(
        {str(at): 0.5 for at in range(BIASED_IDS.limit)},
        WIDE,
        {"": {str(at): 0.5 for at in range(BIASED_IDS.limit + 1)}},
    ),
    "allowed_token_ids": Dearest(
        [at % VOCAB for at in range(ALLOWED_IDS.limit)],
        WIDE,
        {"": [at % VOCAB for at in range(ALLOWED_IDS.limit + 1)]},
    ),
    "bad_words": Dearest(
        [f"zq{at:03d}" for at in range(BAD_WORDS.limit)],
        WIDE,
        {"": [f"zq{at:03d}" for at in range(BAD_WORDS.limit + 1)]},
    ),
    "structured_outputs": Dearest({"json": schema()}, above={"": {"regex": TOO_LARGE}}),
    "truncate_prompt_tokens": number(CONTEXT - 64, -2, PROMPT=FULL_TEXT),
    "truncation_side": switch("left", PROMPT=FULL_TEXT, truncate_prompt_tokens=64),
}
EVEN_COUNTED = {
    name for name, row in SAMPLING.items() if isinstance((row.above or {}).get(""), int | float)
} - {"min_tokens"}
ANSWER: dict[str, Dearest] = {
    "n": number(LIMITS.max_choices, LIMITS.max_choices + 1, max_tokens=128, ignore_eos=True),
    "max_tokens": number(CONTEXT - 64, 10**7, ignore_eos=True),
    "stop": Dearest(
        [chr(97 + at % 26) * LIMITS.max_stop_chars for at in range(LIMITS.max_stops)],
        WIDE,
        {"": ["x"] * (LIMITS.max_stops + 1)},
    ),
    "include_stop_str_in_output": switch(stop=["a", "b"], **WIDE),
    "skip_special_tokens": switch(False, **WIDE),
    "prompt_logprobs": number(LIMITS.max_logprobs, LIMITS.max_logprobs + 1, PROMPT=CONTEXT_IDS),
    "best_of": number(LIMITS.max_choices, LIMITS.max_choices + 1, max_tokens=64),
    "use_beam_search": Dearest(
        True,
        {
            "best_of": BEAM_WIDTH.limit,
            "max_tokens": BEAM_TOKENS.limit // BEAM_WIDTH.limit,
            "ignore_eos": True,
        },
        {"": True, "best_of": BEAM_WIDTH.limit + 1},
        "best_of",
    ),
    "length_penalty": number(10, 11, use_beam_search=True, best_of=16, max_tokens=64),
}
REQUEST: dict[str, Dearest] = {"model": switch("k2-demo")}
SHARED: dict[str, Dearest] = {
    **SAMPLING,
    **REQUEST,
    "stream": switch(**WIDE),
    "chat_template_kwargs": switch(TEMPLATE_FIELDS),
    "priority": Dearest("premium", WIDE, {"": "first"}),
    "service_tier": switch("priority", **WIDE),
    "cache_salt": Dearest("s" * 128, above={"": "s" * 129}),
    "cache_control": switch({"type": "ephemeral", "ttl": "1h"}),
    "prompt_cache_key": Dearest("k" * 1024, above={"": "k" * 1025}),
    "session_id": Dearest("s" * 1024, above={"": "s" * 1025}),
    "prompt_cache_retention": Dearest("24h", above={"": "48h"}),
    "request_id": Dearest("r" * 128, above={"": "r" * 129}),
}
GENERATION: dict[str, Dearest] = {
    **SHARED,
    **ANSWER,
    "stream_options": switch(
        {"include_usage": True, "continuous_usage_stats": True}, stream=True, **WIDE
    ),
    "response_format": Dearest(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}},
        above={"": {"type": "json_schema", "json_schema": {"schema": {"const": TOO_LARGE}}}},
    ),
    "guided_json": Dearest(schema(), above={"": {"const": TOO_LARGE}}),
    "guided_regex": Dearest("(abc|[0-9]{3}){1,200}", above={"": TOO_LARGE}),
    "guided_choice": Dearest(WORDS, above={"": [*WORDS, "x"]}),
    "guided_grammar": Dearest(GRAMMAR, above={"": f"start: /{TOO_LARGE}/"}),
    "echo": switch(),
    "add_special_tokens": switch(),
    "return_token_ids": Dearest(
        True,
        {"PROMPT": CONTEXT_IDS, "n": LIMITS.max_choices, "max_tokens": 24},
        {"": True, "PROMPT": "hi", "max_tokens": ANSWER_IDS.limit // LIMITS.max_choices + 1},
    ),
    "return_tokens_as_token_ids": switch(),
}
LOGPROBS = {"n": LIMITS.max_choices, "max_tokens": 24, "ignore_eos": True}


def turns(num: int, **more: Any) -> list[dict[str, Any]]:
    """Return a conversation of short turns."""
    return [{"role": ("user", "assistant")[at % 2], "content": "a", **more} for at in range(num)]


def tools(num: int) -> list[dict[str, Any]]:
    """Return chat's tools."""
    return [
        {"type": "function", "function": {"name": f"call_{at}", "parameters": schema(2)}}
        for at in range(num)
    ]


CHAT: dict[str, Dearest] = {
    **GENERATION,
    "messages": Dearest(turns(TURNS), {"truncate_prompt_tokens": -1}, {"": []}),
    "max_completion_tokens": number(CONTEXT - 64, 10**7, ignore_eos=True),
    "logprobs": Dearest(True, {"top_logprobs": 20, **LOGPROBS}, {"": True, "max_tokens": 4096}),
    "top_logprobs": number(20, 21, logprobs=True, **LOGPROBS),
    "tools": Dearest(tools(60), above={"": tools(MAX_TOOLS + 1)}),
    "tool_choice": switch("required", tools=tools(40)),
    "parallel_tool_calls": switch(False, tools=tools(40)),
    "include_reasoning": switch(False, **WIDE),
    "reasoning_effort": switch("none"),
    "add_generation_prompt": switch(False),
    "continue_final_message": switch(PROMPT=[{"role": "assistant", "content": "the " * 1000}],
                                     add_generation_prompt=False),
    "documents": switch([{"text": "a b c", "title": str(at)} for at in range(10_000)]),
}  # fmt: skip
COMPLETION: dict[str, Dearest] = {
    **GENERATION,
    # A tenant that is not alone gets no more permits at once.
    "prompt": Dearest(["a b c"] * 500, {"max_tokens": 4},
                      {"": ["a"] * (LIMITS.max_sequences + 1)}),
    "stream_options": switch({"include_usage": True, "continuous_usage_stats": True},
                             stream=True, PROMPT=["a b c"] * 500, max_tokens=24),
    "logprobs": number(20, 21, **LOGPROBS),
    "echo": switch(PROMPT=CONTEXT_IDS, logprobs=20, max_tokens=4),
}  # fmt: skip
RESPONSES: dict[str, Dearest] = {
    **SHARED,
    "input": Dearest(turns(TURNS), {"truncation": "auto"}, {"": []}),
    "instructions": switch("the " * 1500),
    "max_output_tokens": number(CONTEXT - 64, 10**7, ignore_eos=True),
    "tools": Dearest(
        [{"type": "function", "name": f"call_{at}", "parameters": schema(2)} for at in range(60)],
        above={"": [{"type": "function", "name": "x"}] * (MAX_TOOLS + 1)},
    ),
    "tool_choice": switch("auto"),
    "parallel_tool_calls": switch(False),
    "text": switch({"format": {"type": "json_schema", "name": "x", "schema": schema()}}),
    "reasoning": switch({"effort": "high"}),
    "include": Dearest(["message.output_text.logprobs"] * MAX_ITEMS,
                       above={"": ["x"] * (MAX_ITEMS + 1)}),
    "top_logprobs": number(20, 21, include=["message.output_text.logprobs"],
                           max_output_tokens=2048, ignore_eos=True),
    "truncation": switch("auto", PROMPT=FULL_TEXT),
    "metadata": switch({f"name_{at}": "value" for at in range(10_000)}),
    "store": switch(),
}  # fmt: skip
PROMPTS: dict[str, Dearest] = {
    **SHARED,
    "messages": Dearest(turns(TURNS), {"truncate_prompt_tokens": -1}, {"": []}),
    "system": switch("the " * 1500),
    "tools": Dearest(
        [{"name": f"call_{at}", "input_schema": schema(2)} for at in range(60)],
        above={"": [{"name": "x", "input_schema": {}}] * (MAX_TOOLS + 1)},
    ),
    "tool_choice": switch({"type": "auto"}),
    "thinking": switch({"type": "enabled"}),
    "output_config": switch({"format": {"type": "json_schema", "schema": schema()}}),
}
COUNT: dict[str, Dearest] = {
    name: replace(row, above=None) if name in SAMPLING.keys() - EVEN_COUNTED else row
    for name, row in PROMPTS.items()
} | {
    "truncate_prompt_tokens": number(CONTEXT - 64, -2, PROMPT="the " * CONTEXT),
    "truncation_side": switch("left", PROMPT="the " * CONTEXT, truncate_prompt_tokens=64),
    "messages": Dearest(turns(TURNS // 2), {"truncate_prompt_tokens": -1}, {"": []}),
}
"""Fields that choose tokens are only checked for their type if a prompt is only counted."""
MESSAGES: dict[str, Dearest] = {
    **PROMPTS,
    "max_tokens": number(CONTEXT - 64, 10**7, ignore_eos=True),
    "stop_sequences": Dearest(
        ANSWER["stop"].value, above={"": ["x"] * (LIMITS.max_stops + 1)}, named="stop_sequences"
    ),
}
COUNTED = "the " * (2 * CONTEXT - 32)
TOKENIZE: dict[str, Dearest] = {
    "model": switch("k2-demo", prompt="hi"),
    "prompt": Dearest(COUNTED, above={"": COUNTED * 2}),
    "messages": Dearest(turns(TURNS // 4), above={"": []}),
    "tools": Dearest(tools(60), {"messages": turns(1)}, {"": tools(MAX_TOOLS + 1)}),
    "add_special_tokens": switch(prompt=COUNTED),
    "add_generation_prompt": switch(messages=turns(1)),
    "continue_final_message": switch(messages=turns(2), add_generation_prompt=False),
    "chat_template_kwargs": switch(TEMPLATE_FIELDS, messages=turns(1)),
    "return_token_strs": switch(prompt=COUNTED),
}
DETOKENIZE: dict[str, Dearest] = {
    **REQUEST,
    "tokens": Dearest([40] * CONTEXT, above={"": [40] * (CONTEXT + 1)}),
}


@dataclass(frozen=True)
class Route:
    """A POST route: its fields, and the least body that is legal."""

    fields: Mapping[str, Dearest]
    prompt: str
    """The field of the prompt; rows call it PROMPT."""
    least: Mapping[str, Any]
    answer: str = "max_tokens"
    """How it calls the answer's length."""
    is_chat: bool = True

    def body(self, name: str, value: Any, beside: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body with `value` of the field `name`; "" in `beside` is the field."""
        made = dict(self.least) | {
            self._own(other): self._prompt(each) if other == "PROMPT" else each
            for other, each in beside.items()
            if other in ("PROMPT", "max_tokens") or other in self.fields
        }
        return made | {name: value}

    def dearest(self, name: str) -> dict[str, Any]:
        """Return the body with the dearest legal value of a field."""
        row = self.fields[name]
        return self.body(name, row.value, row.beside)

    def above(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Return a body above the field's bound, and what the refusal names."""
        row = self.fields[name]
        if row.above is None:
            return None
        more = dict(row.above)
        value = more.pop("")
        return self.body(name, value, {**row.beside, **more}), row.named or name

    def _own(self, name: str) -> str:
        if name == "PROMPT":
            return self.prompt
        return self.answer if name == "max_tokens" else name

    def _prompt(self, value: Any) -> Any:
        if not self.is_chat:
            return value
        if isinstance(value, list) and isinstance(value[0], int):
            value = "the " * (len(value) // 2 - 40)
        if isinstance(value, str):
            return value if self.prompt == "input" else [{"role": "user", "content": value}]
        return value


def long_numbers(digits: int, cost: int = LIMITS.max_body_cost) -> list[int]:
    """Return as many numbers of so many digits as a body of that cost may have."""
    each = digits // NUM_DIGITS * DIGITS_COST + 2 * ITEM_COST
    num = min(cost // each, LIMITS.max_body_bytes // (digits + 4))
    return [10 ** (digits - 1) + at for at in range(num)]


def strict_tools(constant: str, num: int) -> list[dict[str, Any]]:
    """Return tools whose only argument is a constant."""
    return [
        {"type": "function",
         "function": {"name": f"call_{at}", "strict": True, "parameters": {"const": constant}}}
        for at in range(num)
    ]  # fmt: skip


VARIED = ("field_", "name_", "call_", "choice ", "term", "abc")
"""What names of schemas, tools, choices and grammars begin with."""


def varied(path: str, body: Mapping[str, Any], number: int) -> bytes:
    """Return the JSON of a body, other than with another number: what servers keep of the settings
    and the prompt of one is of no use to another.
    """
    text = json.dumps(body)
    for name in VARIED:
        text = text.replace(name, f"{name}{number}_")
    if "cache_salt" in ROUTES[path].fields and "cache_salt" not in body:
        text = f'{{"cache_salt": "{number}", {text[1:]}'
    return text.encode()


COUNTING = "/v1/messages/count_tokens"
"""The route that takes the fields of another and generates nothing."""
_HI = [{"role": "user", "content": "hi"}]
ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(CHAT, "messages", {"messages": _HI, "max_tokens": 8}),
    "/v1/completions": Route(
        COMPLETION, "prompt", {"prompt": "hi", "max_tokens": 8}, is_chat=False
    ),
    "/v1/responses": Route(
        RESPONSES, "input", {"input": "hi", "max_output_tokens": 8}, "max_output_tokens"
    ),
    "/v1/messages": Route(MESSAGES, "messages", {"messages": _HI, "max_tokens": 8}),
    COUNTING: Route(COUNT, "messages", {"messages": _HI}),
    "/tokenize": Route(TOKENIZE, "prompt", {}, is_chat=False),
    "/detokenize": Route(DETOKENIZE, "tokens", {"tokens": [40]}, is_chat=False),
}


def rows_of_routes(*, each: bool) -> Iterator[tuple[str, str]]:
    """Yield the path and the field of each row. `each`: also of rows that another route that
    generates has, too; of these otherwise only one, on each route in turn.
    """
    sharing: dict[tuple[str, int], list[str]] = {}
    for path, route in ROUTES.items():
        for name, row in route.fields.items():
            if path != COUNTING:
                sharing.setdefault((name, id(row)), []).append(path)
    for at, ((name, _), paths) in enumerate(sharing.items()):
        for path in paths if each else [paths[at % len(paths)]]:
            yield path, name
    for name in ROUTES[COUNTING].fields:
        yield COUNTING, name


def chat(status: int, **fields: Any) -> tuple[int, str, dict[str, Any]]:
    """Return the status, path and body of a short conversation with more fields."""
    return status, "/v1/chat/completions", {"messages": _HI, "max_tokens": 8, **fields}


LONG_DIGITS = 4300
"""Digits of the longest whole number that parses."""
FLOAT_DIGITS = 300
"""Digits of the longest one that grammars take."""
LONG_CONST = "y" * (LIMITS.max_body_bytes - 4096)
DEAR: Mapping[str, tuple[int, str, Mapping[str, Any]]] = {
    "long numbers in a schema": chat(200, guided_json={"enum": long_numbers(FLOAT_DIGITS)}),
    "numbers in a schema, too long": chat(400, guided_json={"enum": long_numbers(LONG_DIGITS)}),
    "long numbers in settings": chat(200, chat_template_kwargs={"a": long_numbers(LONG_DIGITS)}),
    "long numbers as token ids": (400, "/v1/completions", {"prompt": long_numbers(LONG_DIGITS)}),
    "16 MB of long numbers": (
        413, "/v1/completions", {"prompt": long_numbers(LONG_DIGITS, 10**9)},
    ),
    "a constant of 16 MB": chat(400, guided_json={"const": LONG_CONST}),
    "constants of 16 MB in tools": chat(
        400, tools=strict_tools(LONG_CONST[: len(LONG_CONST) // 16], 16), tool_choice="required",
        truncate_prompt_tokens=64,
    ),
}  # fmt: skip
"""Status, path and body of what is dear by its length, whatever the field."""
