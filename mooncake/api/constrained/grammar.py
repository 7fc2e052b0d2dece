"""Composes the grammars of constrained answers: JSON schemas, choices, tool calls. Pure.

Everything a client wrote is compiled once here, without the vocabulary. If something cannot be
followed exactly, the request gets a 400 that names it. If the client did not ask for exactness, a
weaker schema is followed, and the rule says so. llguidance was chosen because it refuses schema
keywords that it does not follow.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.gbnf_to_lark
import msgspec

from mooncake.api.bounds import CHOICES
from mooncake.api.constrained.schema_graph import (
    MAPS_OF_SCHEMAS,
    MAX_PARTS,
    PLAIN_VALUES,
    check_schema,
)
from mooncake.api.constrained.weakened import PatternTrials, weaker_schemas
from mooncake.api.text.answer import Marker
from mooncake.base import InvalidRequest
from mooncake.base.bounded_map import BoundedMap
from mooncake.base.threads import run_deep

MAX_GRAMMAR_CHARS = 1_000_000
"""The longest grammar made of one schema."""
MAX_OWN_CHARS = 100_000
"""The longest pattern or grammar that a client may write."""
MAX_RULES = 500
"""The most rules of a client's own grammar. The library compiles nested rules by recursion, and a
stack of 8 MiB overflows at 1,600."""
MAX_GBNF_WORK = 5_000_000
"""The most characters times rules of a client's GBNF grammar."""
MAX_KNOWN_FAULTS = 512

_WHITESPACE = r"[ \n\t]{0,40}"
"""White space between JSON tokens: enough for indentation, too little to fill an answer with."""

_CHECKED_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown",
        "uri", "uuid",
    }
)  # fmt: skip
"""The formats that the library enforces; JSON Schema allows the others to be ignored."""

_NAMES_OF_SCHEMAS = frozenset({"$anchor", "$dynamicAnchor", "$id", "id"})
"""Keywords that are left out: references start at the root, as `check_schema` reads them."""

_LEXEME = re.compile(
    r"""(?:\#|//).*|"(?:[^"\\\n]|\\.)*+(?:"i?|(?P<string>))"""
    r"""|/(?:[^/\\]|\\.)++(?:/[imslux]*|(?P<pattern>))"""
    r"""|(?P<token><[^<>\s]+>)|(?P<document>%(?:json|llguidance|regex))\s*"""
)
"""Comments, strings, patterns, special tokens and keywords before a JSON document, as the library
reads a Lark grammar. The text between them is rules. A string or pattern that does not end has an
empty group: searching for an end from each of many openings would take quadratic time.
"""
_IS_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")
"""A grammar that does not match is GBNF, as for the library. The library's own pattern takes time
quadratic in the number of empty lines.
"""
_SET_OPERATOR = re.compile(r"&|~(?!\s*[0-9])")
"""Intersection and complement; `~ 3..5` is a repetition."""

_INDEX = "/[0-9]{1,4}/"
"""Pattern of the number at the end of a call's id."""


class ToolRule(msgspec.Struct, frozen=True):
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    schema: Any
    strict: bool | None = None
    """True: the whole schema is followed, or the tool is refused. None: as much of it as a grammar
    can follow. False: the same, and arguments may be any object if nothing of it can be followed.
    """


class SchemaRule(msgspec.Struct, frozen=True):
    """The Lark expression for JSON that is valid against a schema, or against a weaker one."""

    text: str
    num_parts: int
    """Objects and lists in the schema."""
    whole: bool = True
    """False if not all of the schema is followed."""


def json_rule(schema: Any, param: str) -> str:
    """Return the Lark expression for JSON that is valid against `schema`.

    Raises:
        InvalidRequest: part of the schema cannot be followed; the message names it, and `param` the
            field.
    """
    return schema_rule(schema, param, strict=True).text


_LOOSER = (
    "; without `strict: true` an answer is held to what can be followed, and is checked against "
    "the whole schema"
)


def schema_rule(
    schema: Any,
    param: str,
    *,
    strict: bool,
    trials: PatternTrials | None = None,
    asked_strict: bool = False,
) -> SchemaRule:
    """Return the rule for JSON that is valid against `schema`. If not `strict`, keywords that no
    grammar can follow are left out. Schemas of one request share their `trials`. `asked_strict`:
    the request says `strict: true`, so a refusal says what happens without it.

    Raises:
        InvalidRequest: the schema cannot be followed. If `strict`, a part of it cannot; otherwise
            it is wrong, no value meets it, or it is too large. The message names the part, and
            `param` the field.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{param}: a JSON schema must be an object",
            param=param,
        )
    try:
        return _exact_rule(schema, param)
    except InvalidRequest as error:
        refusal = error
    if (strict and not asked_strict) or _NO_VALUE in refusal.message:
        raise refusal
    try:
        found = _weaker_rule(schema, param, trials or PatternTrials(_can_follow), refusal)
    except InvalidRequest:
        if strict:
            raise refusal from None
        raise
    if strict:
        raise InvalidRequest(refusal.message + _LOOSER, param=refusal.param)
    return found


def _weaker_rule(
    schema: dict[str, Any], param: str, trials: PatternTrials, refusal: InvalidRequest
) -> SchemaRule:
    """Return the rule of the first weaker schema that can be followed. Otherwise raise `refusal`,
    or what is wrong with the last one.
    """
    try:
        for weak in weaker_schemas(schema, trials):
            try:
                return msgspec.structs.replace(_exact_rule(weak, param), whole=False)
            except InvalidRequest as error:
                refusal = error
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    raise refusal


def _exact_rule(schema: dict[str, Any], param: str) -> SchemaRule:
    num_parts = check_schema(schema, param)
    options = {"whitespace_pattern": _WHITESPACE}
    rule = f"%json {_json(_cleaned(schema) | {'x-guidance': options}, param)}"
    _check(f"start: answer\nanswer: {rule}", param)
    return SchemaRule(rule, num_parts)


_NO_VALUE = "Unsatisfiable"
"""The library's words for a schema that no value meets; a weaker schema would only hide it."""


def _can_follow(pattern: str) -> bool:
    """Return whether the library can follow a text with this pattern."""
    if len(pattern) > MAX_OWN_CHARS:
        return False
    text = f"start: a\na: %json {json.dumps({'type': 'string', 'pattern': pattern})}"
    return not run_deep(lambda: _fault(text))


def regex_rule(pattern: str, param: str) -> str:
    """Return the Lark expression for texts that match `pattern` as a whole.

    Raises:
        InvalidRequest: the pattern cannot be followed.
    """
    _check_length(pattern, param, MAX_OWN_CHARS)
    # Anchors at the ends are redundant: the whole text must match.
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
        raise InvalidRequest(f"{param}: send at least one choice, none of them empty", param=param)
    CHOICES.check(param, len(choices))
    rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    _check(f"start: answer\nanswer: {rule}", param)
    return f"({rule})"


def lark_text(grammar: str, param: str) -> str:
    """Return a client's own grammar, Lark or GBNF, as Lark.

    Raises:
        InvalidRequest: the grammar cannot be followed, has too many rules, or names special tokens.
    """
    _check_length(grammar, param, MAX_OWN_CHARS)
    text = grammar if _IS_LARK.search(grammar) else _from_gbnf(grammar, param)
    text, rules = _with_clean_schemas(text, param)
    if _SET_OPERATOR.search(rules):
        raise InvalidRequest(
            f"{param}: & and ~ (intersections and complements) cannot be used: "
            "a mask of tokens could take hours",
            param=param,
        )
    if rules.count(":") > MAX_RULES:
        raise InvalidRequest(
            f"{param}: the grammar has more than {MAX_RULES} rules; send a shorter one",
            param=param,
        )
    _check(text, param)
    return text


def _from_gbnf(grammar: str, param: str) -> str:
    """Return a GBNF grammar as Lark.

    Raises:
        InvalidRequest: it is not GBNF, or it is too large: the converter reads all of it once for
            each rule and would be busy for seconds.
    """
    num_rules = grammar.count("::=")
    if num_rules > MAX_RULES or num_rules * len(grammar) > MAX_GBNF_WORK:
        limit = min(MAX_RULES, MAX_GBNF_WORK // len(grammar))
        raise InvalidRequest(
            f"{param}: {num_rules} rules; a GBNF grammar of this length may have {limit}: "
            "write it in Lark, with 'start:' as its first rule",
            param=param,
        )
    try:
        text: str = llguidance.gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:  # the converter may raise anything
        raise InvalidRequest(f"{param}: {_first_line(str(error))}", param=param) from error
    return text


def _with_clean_schemas(text: str, param: str) -> tuple[str, str]:
    """Return a Lark grammar with its schemas checked and cleaned, and its rules without schemas,
    strings, patterns and comments.

    Raises:
        InvalidRequest: the grammar names special tokens, a string or pattern in it does not end, or
            a schema in it cannot be followed.
    """
    whole: list[str] = []
    bare: list[str] = []
    end = 0
    while found := _LEXEME.search(text, end):
        bare.append(text[end : found.start()])
        if found["string"] is not None or found["pattern"] is not None:
            kind = "string" if found["string"] is not None else "pattern"
            raise InvalidRequest(
                f"{param}: the grammar has a {kind} that does not end", param=param
            )
        if found["token"]:
            raise InvalidRequest(
                f"{param}: a grammar cannot name special tokens; leave them out", param=param
            )
        lexeme = found[0]
        start, end = end, found.end()
        if keyword := found["document"]:
            try:
                document, end = json.JSONDecoder().raw_decode(text, end)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(
                    f"{param}: what follows {keyword} is not valid JSON", param=param
                ) from error
            lexeme = text[found.start() : end]
            if keyword == "%json" and isinstance(document, dict):
                check_schema(document, param)
                options = {name: document[name] for name in document if name == "x-guidance"}
                lexeme = f"%json {_json(_cleaned(document) | options, param)}"
        whole += [text[start : found.start()], lexeme]
    whole.append(text[end:])
    bare.append(text[end:])
    return "".join(whole), "\n".join(bare)


def tool_rules(
    tools: Sequence[ToolRule], ids: Mapping[Marker, int], *, many: bool, opened: bool
) -> tuple[list[str], list[ToolRule]]:
    """Return Lark rules in which `calls` is a whole tool section of Kimi-K2, and the tools whose
    schemas they do not follow as a whole.

    `many`: more than one call may be made. `opened`: the section may also begin with a call, for
    models that leave out the section's own marker.

    Raises:
        InvalidRequest: a tool's parameters cannot be followed (names the tool), or all together
            are too large.
    """
    num_parts = 0
    weakened: list[ToolRule] = []
    trials = PatternTrials(_can_follow)
    token = {marker: f"<[{token_id}]>" for marker, token_id in ids.items()}
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    begin = token[Marker.SECTION_BEGIN] + ("?" if opened else "")
    rules = [
        f"calls: {begin} call{'+' if many else ''} {token[Marker.SECTION_END]}",
        f"call: {token[Marker.CALL_BEGIN]} ({names}) {token[Marker.CALL_END]}",
    ]
    for number, tool in enumerate(tools):
        rule = _tool_rule(tool, MAX_PARTS - num_parts, trials)
        num_parts += rule.num_parts
        if not rule.whole:
            weakened.append(tool)
        name = json.dumps(f"functions.{tool.name}:", ensure_ascii=False)
        rules += [
            f"tool_{number}: NAME_{number} {token[Marker.ARGUMENT_BEGIN]} arguments_{number}",
            f"NAME_{number}: {name} {_INDEX}",
            f"arguments_{number}: {rule.text}",
        ]
    return rules, weakened


def _tool_rule(tool: ToolRule, max_parts: int, trials: PatternTrials) -> SchemaRule:
    """Return the rule of a tool's arguments. Their schema may have this many objects and lists."""
    param = f"tools: {tool.name}: parameters"
    try:
        strict = tool.strict is True
        rule = schema_rule(tool.schema, param, strict=strict, trials=trials, asked_strict=strict)
        if rule.num_parts > max_parts:
            raise InvalidRequest(
                f"tools: their parameters have more than {MAX_PARTS} objects and lists together",
                param="tools",
            )
    except InvalidRequest:
        if tool.strict is not False:
            raise
        return SchemaRule(json_rule({"type": "object"}, param), 0, whole=False)
    return rule


def _json(schema: dict[str, Any], param: str) -> str:
    """Return a schema as text. Raises InvalidRequest when a value in it is nested too deep, or it
    is too long, which is found before all of it is written.
    """
    if _is_longer(schema, MAX_GRAMMAR_CHARS):
        raise _too_long(param, MAX_GRAMMAR_CHARS)
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise InvalidRequest(
            f"{param}: the schema has a value that is nested too deep", param=param
        ) from error


def _cleaned(schema: Any) -> Any:
    """Return `schema` without annotations, which the library would refuse as unknown rules, and
    without options for the library that a client may have added.
    """
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "x-guidance" or (key == "format" and str(value) not in _CHECKED_FORMATS):
            continue
        if key == "uniqueItems" and value is False:
            continue  # says nothing
        if key in _NAMES_OF_SCHEMAS and isinstance(value, str):
            continue
        if key in PLAIN_VALUES:
            cleaned[key] = value
        elif key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            cleaned[key] = {name: _cleaned(part) for name, part in value.items()}
        else:
            cleaned[key] = _cleaned(value)
    return cleaned


def _is_longer(value: Any, limit: int) -> bool:
    """Return whether the names and texts in a JSON value have more than `limit` characters."""
    waiting = [value]
    while waiting and limit >= 0:
        match waiting.pop():
            case str(text):
                limit -= len(text)
            case dict(fields):
                limit -= sum(map(len, fields)) + len(fields)
                waiting += fields.values()
            case list(items):
                limit -= len(items)
                waiting += items
    return limit < 0


def _check_length(text: str, param: str, limit: int) -> None:
    if len(text) > limit:
        raise _too_long(param, limit)


def _too_long(param: str, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the text is longer than the limit of {limit} characters; send a shorter one",
        param=param,
    )


def _check(text: str, param: str) -> None:
    _check_length(text, param, MAX_GRAMMAR_CHARS)
    fault = _FAULTS.of(text)
    if fault:
        raise InvalidRequest(f"{param}: {fault}", param=param)


class _Faults:
    """The faults of the last grammars, kept by digest because a grammar may have a million
    characters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: BoundedMap[bytes, str] = BoundedMap(MAX_KNOWN_FAULTS)

    def of(self, text: str) -> str:
        """Return the fault of a grammar in one line, "" when it can be followed."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        with self._lock:
            known = self._known.use(digest)
        if known is not None:
            return known
        fault = run_deep(lambda: _fault(text))
        with self._lock:
            self._known[digest] = fault
        return fault


_FAULTS = _Faults()


def _fault(text: str) -> str:
    grammar = llguidance.LLMatcher.grammar_from_lark(text)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return _first_line(messages[0]) if is_error and messages else ""


_WHERE = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")


def _first_line(message: str) -> str:
    """Return a fault in one line, without its position in our grammar around the client's."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "cannot be followed"
    first = _WHERE.sub("", lines[0])
    details = [line for line in lines[1:] if line.startswith("error: ")]
    return " ".join([first, *details])[:300]
