"""Composes the grammars that answers are held to: JSON schemas, choices, tool calls. Pure.

Everything a client wrote is compiled once here, without the vocabulary, so that what cannot be
followed exactly is a 400 that names it and never a wrong answer. llguidance refuses schema keywords
it does not follow, which is why it was chosen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance
import llguidance.gbnf_to_lark
import msgspec

from mooncake.api.message_parser import Marker
from mooncake.api.schema_graph import MAPS_OF_SCHEMAS, MAX_PARTS, PLAIN_VALUES, check_schema
from mooncake.base import InvalidRequest

MAX_GRAMMAR_CHARS = 1_000_000
"""Of one schema."""
MAX_OWN_CHARS = 100_000
"""Of a pattern or grammar that a client wrote."""
MAX_CHOICES = 1_000
"""The library follows at most 2,000 ways at a time."""
MAX_RULES = 500
"""Of a client's own grammar. Rules may lie within each other: the library that compiles them goes
down by recursion, and a stack of 8 MiB ends at 1,600."""

_WHITESPACE = r"[ \n\t]{0,40}"
"""Between JSON tokens: enough for indentation, too little to fill an answer with."""

_CHECKED_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown",
        "uri", "uuid",
    }
)  # fmt: skip
"""What the library holds strings to; any other `format` is a remark, as JSON Schema has it."""

_NAMES_OF_SCHEMAS = frozenset({"$anchor", "$dynamicAnchor", "$id", "id"})
"""Left out: references are taken from the root, as `check_schema` reads them."""

_NO_RULES = re.compile(r""""(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//.*""")
"""Strings, patterns and remarks in a Lark grammar."""
_TOKEN = re.compile(r"<[^<>\s]+>")
_SCHEMA = re.compile(r"%json\s*(?=\{)")

_INDEX = "/[0-9]{1,4}/"
"""The number that ends a call's id."""


class ToolRule(msgspec.Struct, frozen=True):
    """A function that may be called and what its arguments must look like."""

    name: str
    schema: Any


def json_rule(schema: Any, param: str) -> str:
    """Return the Lark expression for JSON that is valid against `schema`.

    Raises:
        InvalidRequest: part of the schema cannot be followed; it says which, `param` says where.
    """
    rule, _ = _measured_rule(schema, param)
    return rule


def _measured_rule(schema: Any, param: str) -> tuple[str, int]:
    """Return what `json_rule` does, and how many objects and lists are in the schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: a JSON schema is an object", param=param)
    num_parts = check_schema(schema, param)
    options = {"whitespace_pattern": _WHITESPACE}
    rule = f"%json {json.dumps(_cleaned(schema) | {'x-guidance': options})}"
    _check(f"start: answer\nanswer: {rule}", param)
    return rule, num_parts


def regex_rule(pattern: str, param: str) -> str:
    """Return the Lark expression for texts that match `pattern` as a whole.

    Raises:
        InvalidRequest: the pattern cannot be followed.
    """
    _check_length(pattern, param, MAX_OWN_CHARS)
    # Anchors at the ends say what holds anyway.
    bare = pattern.removeprefix("^")
    if bare.endswith("$") and not bare.endswith("\\$"):
        bare = bare[:-1]
    plain = llguidance.regex_to_lark(bare, "dws")  # \\d, \\w and \\s mean ASCII
    rule = f"/{plain}/" if bare else '""'
    _check(f"start: answer\nanswer: {rule}", param)
    return rule


def choice_rule(choices: Sequence[str], param: str) -> str:
    """Return the Lark expression for exactly one of `choices`.

    Raises:
        InvalidRequest: there are none, an empty one, or too many.
    """
    if not choices or not all(choices):
        raise InvalidRequest(f"{param}: at least one choice, none of them empty", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(
            f"{param}: at most {MAX_CHOICES} choices; a JSON schema's enum takes more", param=param
        )
    rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    _check(f"start: answer\nanswer: {rule}", param)
    return f"({rule})"


def lark_text(grammar: str, param: str) -> str:
    """Return a client's own grammar, Lark or GBNF, as Lark.

    Raises:
        InvalidRequest: it cannot be followed, has too many rules, or names special tokens.
    """
    _check_length(grammar, param, MAX_OWN_CHARS)
    try:
        text: str = llguidance.gbnf_to_lark.any_to_lark(grammar)
    except Exception as error:  # the converter raises whatever it stumbles on
        raise InvalidRequest(f"{param}: {_first_line(str(error))}", param=param) from error
    text, rules = _with_clean_schemas(text, param)
    if _TOKEN.search(rules):
        raise InvalidRequest(f"{param}: special tokens are not available in it", param=param)
    if rules.count(":") > MAX_RULES:
        raise InvalidRequest(f"{param}: more than {MAX_RULES} rules", param=param)
    _check(text, param)
    return text


def _with_clean_schemas(text: str, param: str) -> tuple[str, str]:
    """Return a Lark grammar with the schemas in it checked and cleaned, and its bare rules: without
    schemas, strings, patterns and remarks."""
    whole: list[str] = []
    bare: list[str] = []
    end = 0
    while found := _SCHEMA.search(text, end):
        before = text[end : found.start()]
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"{param}: what follows %json is not valid JSON", param=param
            ) from error
        check_schema(schema, param)
        options = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
        whole += [before, f"%json {json.dumps(_cleaned(schema) | options)}"]
        bare.append(before)
    whole.append(text[end:])
    bare.append(text[end:])
    return "".join(whole), _NO_RULES.sub("", "\n".join(bare))


def tool_rules(
    tools: Sequence[ToolRule], ids: Mapping[Marker, int], *, many: bool, opened: bool
) -> list[str]:
    """Return Lark rules in which `calls` is a whole tool section of Kimi-K2.

    `many`: more than one call may be made. `opened`: the section may also begin with a call, as a
    model does that leaves out the section's own marker.

    Raises:
        InvalidRequest: a tool's parameters cannot be followed, which names the tool, or those of
            all together are too many.
    """
    num_parts = 0
    token = {marker: f"<[{token_id}]>" for marker, token_id in ids.items()}
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    begin = token[Marker.SECTION_BEGIN] + ("?" if opened else "")
    rules = [
        f"calls: {begin} call{'+' if many else ''} {token[Marker.SECTION_END]}",
        f"call: {token[Marker.CALL_BEGIN]} ({names}) {token[Marker.CALL_END]}",
    ]
    for number, tool in enumerate(tools):
        schema, more = _measured_rule(tool.schema, f"tools: {tool.name}: parameters")
        num_parts += more
        if num_parts > MAX_PARTS:
            raise InvalidRequest(
                f"tools: their parameters have more than {MAX_PARTS} objects and lists together",
                param="tools",
            )
        name = json.dumps(f"functions.{tool.name}:", ensure_ascii=False)
        rules += [
            f"tool_{number}: NAME_{number} {token[Marker.ARGUMENT_BEGIN]} arguments_{number}",
            f"NAME_{number}: {name} {_INDEX}",
            f"arguments_{number}: {schema}",
        ]
    return rules


def _cleaned(schema: Any) -> Any:
    """Return `schema` without the remarks that the library takes for rules it does not know, and
    without options for the library that a client may have put in."""
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "x-guidance" or (key == "format" and str(value) not in _CHECKED_FORMATS):
            continue
        if key in _NAMES_OF_SCHEMAS and isinstance(value, str):
            continue
        if key in PLAIN_VALUES:
            cleaned[key] = value
        elif key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            cleaned[key] = {name: _cleaned(part) for name, part in value.items()}
        else:
            cleaned[key] = _cleaned(value)
    return cleaned


def _check_length(text: str, param: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(f"{param}: longer than the limit of {limit} characters", param=param)


def _check(text: str, param: str) -> None:
    _check_length(text, param, MAX_GRAMMAR_CHARS)
    fault = _fault(text)
    if fault:
        raise InvalidRequest(f"{param}: {fault}", param=param)


@lru_cache(maxsize=512)
def _fault(text: str) -> str:
    """Return what is wrong with a grammar in one line, "" when it can be followed."""
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return _first_line(messages[0]) if is_error and messages else ""


_WHERE = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")


def _first_line(message: str) -> str:
    """Return a fault in one line, without its place in the grammar that we made around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "cannot be followed"
    first = _WHERE.sub("", lines[0])
    details = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([first, *details])[:300]
