"""Targets: what clients write to constrain an answer: grammars, patterns, JSON schemas, choices."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from mooncake.api.constrained.constraints import answer_form, form_constraint
from mooncake.api.constrained.grammar import choice_rule, lark_text, regex_rule
from mooncake.api.schema.completion import CompletionRequest
from mooncake.base.errors import InvalidRequest
from tests.support.api.server import tiny_model
from tests.support.fuzz.target import Shape, Target

_MODULES = ("mooncake.api.constrained.grammar", "mooncake.api.constrained.schema_graph")


class Lark(Target):
    """A client's own grammar, Lark or GBNF."""

    name = "lark"
    word_chars = 32
    modules = (*_MODULES, "llguidance.gbnf_to_lark")
    shape = Shape.TEXT
    allowed = (InvalidRequest,)
    max_bytes = 99_000
    base_cpu_s = 1.0
    cpu_s_per_mb = 10.0
    base_memory = 128 * 2**20
    memory_per_byte = 2048
    tokens = (
        b"start: ", b"\n", b'"', b'\\"', b"/", b"\\/", b"(", b"[", b"{", b"}", b"|", b"*", b"+",
        b"?", b"~ 3..5", b"%json {", b"%json ", b"%regex {", b"%llguidance {}", b"%ignore /a/",
        b"%import common.INT", b"%declare A", b"::=", b"root ::= ", b"<[1]>", b"<a>", b"//", b"#",
        b"A: /a/\n", b"@", b'{"type": "object"}', b"[0-9]", b"{1,1000}", b"->", b"$", b".1: ",
        b"[lazy]", b"[max_tokens=3]",
    )  # fmt: skip

    def run(self, data: bytes) -> str:
        text = lark_text(data.decode("utf-8", "replace"), "guided_grammar")
        return "grammar " + ("changed" if text.encode() != data else "as it came")


class Regex(Target):
    """A pattern that an answer must match."""

    name = "regex"
    word_chars = 24
    modules = _MODULES
    shape = Shape.TEXT
    allowed = (InvalidRequest,)
    max_bytes = 99_000
    base_cpu_s = 1.0
    cpu_s_per_mb = 10.0
    base_memory = 128 * 2**20
    memory_per_byte = 2048
    tokens = (
        b"(", b")", b"(?:", b"(?=", b"(?<!", b"[", b"[^", b"]", b"{1,1000}", b"{1000000}", b"*",
        b"+?", b"|", b"\\d", b"\\w", b"\\p{L}", b"\\b", b"\\1", b"^", b"$", b".", b"\\", b"/",
        b"(?i)", b"\\u{1F600}", b"\\x00", b"(?P<n>", b"&", b"~", b"[[:alpha:]]", b"\\Q", b"(a*)*",
    )  # fmt: skip

    def run(self, data: bytes) -> str:
        regex_rule(data.decode("utf-8", "replace"), "guided_regex")
        return "pattern"


class Schemas(Target):
    """A JSON schema, as text (`guided_json`), and a list of choices."""

    name = "schemas"
    modules = (*_MODULES, "mooncake.api.constrained.constraints")
    shape = Shape.JSON
    allowed = (InvalidRequest,)
    max_bytes = 100_000
    base_cpu_s = 1.0
    cpu_s_per_mb = 40.0
    base_memory = 128 * 2**20
    memory_per_byte = 4096
    tokens = (
        b'"$ref"', b'"#/$defs/a"', b'"#"', b'"$defs"', b'"allOf"', b'"anyOf"', b'"oneOf"', b'"not"',
        b'"const"', b'"enum"', b'"pattern"', b'"format"', b'"properties"', b'"items"',
        b'"prefixItems"', b'"required"', b'"additionalProperties"', b'"type"', b'"minLength"',
        b'"maxLength"', b'"minItems"', b'"multipleOf"', b'"minimum"', b'"x-guidance"', b'"\\ud800"',
        b"1e999", b"9" * 400, b"[", b'{"a":', b"null", b'"$id"', b'"patternProperties"', b'"if"',
        b'"#/%"', b'"#/~1~0"',
    )  # fmt: skip

    def __init__(self) -> None:
        self._model = tiny_model()

    def run(self, data: bytes) -> str:
        text = data.decode("utf-8", "replace")
        if text.startswith("[") and _is_texts(text):
            choice_rule(json.loads(text), "guided_choice")
            return "choices"
        schema = json.loads(text) if _is_object(text) else None
        exact = self._word({"guided_json": text})
        if schema is None:
            return exact
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return f"{exact}, {self._word({'response_format': form})}"

    def _word(self, fields: dict[str, Any]) -> str:
        try:
            body = CompletionRequest(prompt="x", **fields)
        except ValidationError:
            return "no request"
        form = answer_form(body)
        constraint = form_constraint(form, self._model)
        assert constraint.grammar is not None
        constraint.grammar.text.encode()
        return "schema" if constraint.answer is None else "schema in part"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_texts(text: str) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return all(isinstance(each, str) for each in found) and found == json.loads(
        json.dumps(found).encode().decode("utf-8", "replace")
    )
