"""Schemas that would lead their reader too deep, or nowhere, and those that only look so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from mooncake.api.constrained.grammar import ToolRule, json_rule, lark_text, tool_rules
from mooncake.api.constrained.schema_graph import (
    MAX_DEPTH,
    MAX_NAME_PATTERNS,
    MAX_NESTING,
    MAX_OPTIONAL,
    MAX_PARTS,
    MAX_PROPERTIES,
    check_schema,
    follow_reference,
)
from mooncake.api.text.answer import Marker
from mooncake.base import InvalidRequest

Wrap = Callable[[dict[str, Any]], dict[str, Any]]

WRAPS: list[Wrap] = [
    lambda inner: inner,
    lambda inner: {"type": "object", "properties": {"x": inner}},
    lambda inner: {"type": "array", "prefixItems": [inner]},
    lambda inner: {"anyOf": [inner, {"type": "integer"}]},
]


def chain(length: int, wrap: Wrap, defs: str = "$defs") -> dict[str, Any]:
    """Return a schema of so many definitions, each of which leads to the next."""
    named = {f"a{i}": wrap({"$ref": f"#/{defs}/a{i + 1}"}) for i in range(length)}
    return {defs: named | {f"a{length}": {"type": "string"}}, "$ref": f"#/{defs}/a0"}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("length", [1_000, 2_400])
def test_a_way_down_that_would_overflow_the_stack_is_refused(wrap: Wrap, length: int) -> None:
    """Without the check the process ends with a segmentation fault: at 900 to 2,400."""
    with pytest.raises(InvalidRequest, match="x: the schema is too deep"):
        json_rule(chain(length, wrap), "x")


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_as_deep_as_allowed_compiles(wrap: Wrap) -> None:
    length = MAX_DEPTH // 3 - 2
    assert "a0" in json_rule(chain(length, wrap), "x")


def test_a_reference_of_very_many_steps_is_not_followed() -> None:
    """To split one of 16 MB would hold Python's lock, and with it the event loop."""
    around: dict[str, Any] = {}
    around["a"] = around
    assert follow_reference("#" + "/a" * 1_000, around) is around
    assert follow_reference("#" + "/a" * 2_000, around) is None
    with pytest.raises(InvalidRequest, match="there is no '#/a/a"):
        check_schema({"$ref": "#" + "/a" * 2_000}, "x")


@pytest.mark.parametrize("defs", ["definitions", "x-mine", "properties", "$defs/0"])
def test_definitions_lie_anywhere(defs: str) -> None:
    schema = chain(3_000, WRAPS[0], defs)
    if defs == "$defs/0":
        schema = {"$defs": [schema[defs]], "$ref": schema["$ref"]}
    with pytest.raises(InvalidRequest, match="too deep"):
        check_schema(schema, "x")


def test_pointers_are_unescaped() -> None:
    schema = {"$defs": {"a/b~c d": {"type": "integer"}}, "$ref": "#/%24defs/a~1b~0c%20d"}
    check_schema(schema, "x")
    assert "integer" in json_rule(schema, "x")


def test_a_cycle_counts_once() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    check_schema(tree, "x")
    ring: dict[str, Any] = {
        f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{(i + 1) % 40}"}}} for i in range(40)
    }
    check_schema({"$defs": ring, "$ref": "#/$defs/a7"}, "x")


def test_a_large_cycle_counts_whole_wherever_it_is_entered() -> None:
    size = MAX_DEPTH
    both_ways = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{(i + step) % size}"} for step in (1, -1)]}
        for i in range(size)
    }
    with pytest.raises(InvalidRequest, match="too deep"):
        check_schema({"$defs": both_ways, "$ref": "#/$defs/a0"}, "x")


def test_wide_is_not_deep() -> None:
    names = {f"a{i}": {"$ref": "#/$defs/one"} for i in range(1_000)}
    one = {"$defs": {"one": {"type": "string"}}}
    check_schema({"properties": names, "required": list(names)} | one, "x")


def test_nesting_has_a_limit() -> None:
    for depth, allowed in ((MAX_NESTING - 1, True), (MAX_NESTING, False), (5_000, False)):
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"items": schema}
        if allowed:
            assert "items" in json_rule(schema, "x")
        else:
            with pytest.raises(InvalidRequest, match="nested more than"):
                json_rule(schema, "x")


def test_size_has_a_limit() -> None:
    most = {"anyOf": [{} for _ in range(MAX_PARTS - 2)]}
    assert check_schema(most, "x") == MAX_PARTS
    with pytest.raises(InvalidRequest, match="objects and lists"):
        check_schema({"anyOf": [*most["anyOf"], {}]}, "x")


def test_an_object_declares_few_properties() -> None:
    """The time to compile them grows with their square."""
    half, other = (
        {"properties": {key: {} for key in names}, "required": names}
        for names in ([f"{which}{n}" for n in range(MAX_PROPERTIES // 2)] for which in "ab")
    )
    more: dict[str, Any] = {"properties": {"c": {}}, "required": ["c"]}
    check_schema({"allOf": [half, {"$ref": "#/$defs/b"}], "$defs": {"b": other}}, "x")
    check_schema({"anyOf": [half | {"title": "a"}, other, more]}, "x")
    wide = {"properties": half["properties"] | other["properties"] | more["properties"]}
    wide["required"] = list(wide["properties"])
    for schema in (
        wide,
        {"items": wide},
        {"allOf": [half, other, more]},
        {"$ref": "#/$defs/b", "allOf": [half], "$defs": {"b": other | {"allOf": [more]}}},
    ):
        with pytest.raises(InvalidRequest, match="more than 1000 properties"):
            check_schema(schema, "x")


@pytest.mark.parametrize("num_required", [0, 9])
def test_what_may_be_missing_can_be_followed(num_required: int) -> None:
    """The library gives up 500 of them, and not before the first of their names may come."""
    names = [f"p{number}" for number in range(num_required + MAX_OPTIONAL)]
    schema = {
        "properties": {name: {"type": "integer"} for name in names},
        "required": names[:num_required],
    }
    text = lark_text(f"start: answer\nanswer: {json_rule(schema, 'x')}", "x")
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(text), log_level=0
    )
    answer = dict.fromkeys((*names[:num_required], names[200], names[-1]), 1)
    for byte in json.dumps(answer).encode():
        assert matcher.consume_token(byte), matcher.get_error()[:99]
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()[:99]
    assert matcher.is_accepting()
    schema["required"] = names[: max(0, num_required - 1)]
    schema["properties"]["one more"] = {}
    with pytest.raises(InvalidRequest, match="more than 450 properties of one object may be"):
        json_rule(schema, "x")


def test_an_object_requires_and_is_given_few_properties() -> None:
    """They are compiled as those that it declares."""
    names = [f"a{n}" for n in range(MAX_PROPERTIES)]
    declared: dict[str, Any] = {"properties": {name: {} for name in names}}
    given = dict.fromkeys(names, 1)
    check_schema(declared | {"required": names, "enum": [given, [given]]}, "x")
    for schema in (
        {"required": [*names, "more"]},
        declared | {"required": ["more"]},
        {"allOf": [declared, {"required": names}]},
        {"const": given | {"more": 1}},
        {"items": {"enum": ["a", {"b": [given | {"more": 1}]}]}},
    ):
        with pytest.raises(InvalidRequest, match="more than 1000 properties"):
            check_schema(schema, "x")


def test_an_object_has_few_patterns_of_names() -> None:
    half = [{f"^{which}{n}$": {} for n in range(MAX_NAME_PATTERNS // 2)} for which in "ab"]
    check_schema({"allOf": [{"patternProperties": each} for each in half]}, "x")
    for schema in (
        {"patternProperties": half[0] | half[1] | {"^c$": {}}},
        {"patternProperties": half[0] | {"^c$": {}}, "allOf": [{"patternProperties": half[1]}]},
    ):
        with pytest.raises(InvalidRequest, match="more than 100 patternProperties"):
            check_schema(schema, "x")


def test_values_that_a_schema_gives_count() -> None:
    assert check_schema({"enum": ["a"] * 3 * MAX_PARTS, "const": 1}, "x") == 1
    assert check_schema({"const": [1, {"a": [2]}]}, "x") == 1 + 4
    for given in ({"const": [0] * MAX_PARTS}, {"enum": [[0]] * MAX_PARTS}):
        with pytest.raises(InvalidRequest, match="more than 10000 objects and lists"):
            check_schema({"items": given}, "x")


def test_the_schemas_of_all_tools_share_the_limit() -> None:
    ids = {marker: number for number, marker in enumerate(Marker)}
    names = {f"a{number}": {"type": "string"} for number in range(498)}
    object_ = {"properties": names, "required": list(names)[:49]}
    tools = [ToolRule(f"t{number}", object_) for number in range(21)]
    assert tool_rules(tools[:20], ids, many=True, opened=False)[1] == []
    with pytest.raises(InvalidRequest, match="together") as refused:
        tool_rules(tools, ids, many=True, opened=False)
    assert refused.value.param == "tools"
    tools[-1] = ToolRule("t20", object_, strict=False)
    _, weakened = tool_rules(tools, ids, many=True, opened=False)
    assert weakened == tools[-1:], "the last one is not followed, and so it is checked"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/none", "$defs": {}},
        {"$ref": "other.json"},
        {"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}},
        {"$ref": "#/const/a", "const": {"a": {}}},
        {"$ref": "#/anyOf/7", "anyOf": [{}]},
        {"$ref": "#/type", "type": "object"},
    ],
)
def test_references_to_nothing_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="references look like"):
        json_rule(schema, "x")


def test_values_are_no_schemas() -> None:
    """What only looks like a keyword is a value, or a name."""
    for schema in (
        {"const": {"$ref": "anything"}},
        {"enum": [{"$ref": "#/nowhere"}]},
        {"type": "object", "properties": {"$id": {"type": "string"}, "id": {"type": "string"}}},
        {"type": "string", "format": ["date"]},
    ):
        assert json_rule(schema, "x").startswith("%json")


def test_names_of_schemas_do_not_move_references() -> None:
    """With `$id` a reference would be taken from there, past the check."""
    inner = {"$id": "http://x/y", **chain(1_000, WRAPS[0])}
    decoys = {f"a{i}": {} for i in range(1_001)}
    schema = {"$defs": {**decoys, "inner": inner}, "$ref": "#/$defs/inner"}
    assert "$id" not in json_rule(schema, "x")
    text = lark_text(f"start: %json {json_rule(schema, 'x').removeprefix('%json ')}", "x")
    assert "$id" not in text


def test_schemas_in_a_grammar_are_checked_as_others_are() -> None:
    with pytest.raises(InvalidRequest, match="too deep"):
        lark_text(f'start: "<" %json {json.dumps(chain(1_000, WRAPS[0]))} ">"', "x")
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        lark_text('start: %json {"type": }', "x")
    named = {"$id": "http://x/y", "type": "string", "x-guidance": {"whitespace_flexible": False}}
    text = lark_text(f"start: %json {json.dumps(named)}", "x")
    assert "$id" not in text
    assert "whitespace_flexible" in text


def test_rules_within_each_other_are_bounded() -> None:
    def rules(count: int) -> str:
        return "\n".join([*(f"r{i}: r{i + 1}" for i in range(count)), f'r{count}: "a:b"'])

    assert lark_text(f"start: r0\n{rules(400)}", "x")
    with pytest.raises(InvalidRequest, match="more than 500 rules"):
        lark_text(f"start: r0\n{rules(3_000)}", "x")


@pytest.mark.parametrize("token", ["<think>", "<|im_end|>", "<[7]>"])
def test_special_tokens_are_refused_but_may_be_spelled(token: str) -> None:
    with pytest.raises(InvalidRequest, match="special tokens"):
        lark_text(f'start: {token} "a"', "x")
    assert lark_text(f'start: "{token}" // as {token}', "x")


BOMB = " & ".join(f"/([a-z ]*{letter}[a-z ]{{12}})*/" for letter in "abcdefghij")


@pytest.mark.parametrize(
    "grammar",
    [
        f"start: A\nA: {BOMB}",
        'start: A\nA: ~"x"',
        "start: A\nA: ~/[a-z]*/",
        f'start: A\n# a remark with " and /\nA: {BOMB}',
        f"start: A B\nB: /a\nb/\nA: {BOMB}\nC: /c/",
        'start: "%json {" A\nA: ~"}"',
        'start: A %json {"const": "\\""} A\nA: ~"}"',
        'start: A %regex {"substring_chars": "\\" /"} A\nA: ~"}"',
    ],
)
def test_intersections_and_complements_are_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="intersections and complements"):
        lark_text(grammar, "x")


def test_ampersands_and_tildes_in_strings_patterns_and_schemas_are_text() -> None:
    grammar = 'start: "a & ~b" A %json {"const": "c & ~d"} "e" ~ 2..3 // & ~\nA: /[&~]+/ # & ~'
    assert lark_text(grammar, "x").endswith("# & ~")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "%json {" <[5]> "}"',
        "start: A <[5]> B\nA: /a\nb/\nB: /c/",
        'start: "a" # a remark with " and /\n | <[5]> "b"',
        'start: %json {"const": "\\""} <[5]>',
    ],
)
def test_no_spelling_hides_special_tokens(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="special tokens"):
        lark_text(grammar, "x")


def all_of(count: int) -> dict[str, Any]:
    parts = [{"pattern": f"^([a-z ]*{letter}[a-z ]{{12}})*$"} for letter in "abcdefghij"[:count]]
    return {"type": "string", "allOf": parts}


@pytest.mark.parametrize(
    "schema",
    [
        all_of(4),
        {**all_of(3), "format": "email"},
        {"$defs": {"a": all_of(2)}, "allOf": [{"$ref": "#/$defs/a"}, all_of(2)]},
        {"properties": {"b": {"anyOf": [{"type": "null"}, all_of(4)]}}},
        {"$defs": {"a": {**all_of(4), "anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    ],
)
def test_intersections_of_many_patterns_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="more than 3 patterns"):
        json_rule(schema, "x")


def test_alternatives_of_many_patterns_are_not_intersections() -> None:
    assert json_rule({"type": "string", "anyOf": all_of(10)["allOf"]}, "x")
    assert json_rule({"type": "object", "properties": {"a": all_of(3)}}, "x")
    plain = {"type": "object", "properties": {"pattern": all_of(3), "format": all_of(3)}}
    assert json_rule(plain, "x")


@pytest.mark.parametrize("name", ["allOf", "anyOf", "oneOf"])
def test_members_may_be_booleans(name: str) -> None:
    assert json_rule({"type": "string", name: [True, False][: 1 if name == "allOf" else 2]}, "x")
    assert check_schema({name: [False, 5, {"pattern": "a"}]}, "x") == 3


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"allOf": ["x", 7, None]}, "schema must be an object"),
        ({"anyOf": 7}, "anyOf"),
        ({"oneOf": "xx"}, "oneOf"),
        ({"const": json.loads("[" * 900 + "]" * 900)}, "recursion limit|nested too deep"),
    ],
)
def test_what_is_no_schema_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        json_rule(schema, "x")


def test_a_value_as_deep_as_can_be_read_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deep"):
        json_rule({"const": deep}, "x")


def test_an_error_can_be_written_whatever_the_schema_is_called() -> None:
    with pytest.raises(InvalidRequest, match="refers to itself") as refused:
        json_rule({"$ref": "#/\ud800", "\ud800": {"$ref": "#/\ud800"}}, "x")
    assert refused.value.message.encode()


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        ("start: A\nA: " + '\\"' * 49_000, "string"),
        ("start: A\nA: " + "\\/" * 49_000, "pattern"),
        ('start: "a\n"', "string"),
        ('start: "a\\', "string"),
        ("start: /a", "pattern"),
    ],
)
def test_strings_and_patterns_end(grammar: str, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the grammar has a {kind} that does not end"):
        lark_text(grammar, "x")


def gbnf(count: int, padding: int) -> str:
    """Return a chain of rules, each of which the converter understands one round later."""
    rules = [f"r{n} ::= {'[a] ' * padding}r{n + 1}" for n in range(count - 2)]
    return "\n".join(["root ::= r0", *rules, f'r{count - 2} ::= "a"\n'])


def test_gbnf_is_converted_within_bounds() -> None:
    assert lark_text(gbnf(20, 2), "x").startswith("%llguidance")
    with pytest.raises(
        InvalidRequest, match=r"500 rules; a GBNF .* may have 107: write it in Lark"
    ):
        lark_text(gbnf(500, 20), "x")
    with pytest.raises(InvalidRequest, match=r"600 rules; .* may have 500: write it in Lark"):
        lark_text(gbnf(600, 0), "x")


def test_empty_lines_are_read_once() -> None:
    with pytest.raises(InvalidRequest, match="No 'root' rule"):
        lark_text("\n" * 99_000, "x")
    assert lark_text("\n" * 5000 + 'start: "a"', "x")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" / <|im_end|>',
        'start: b\nb: "x" " <|im_end|>\n',
        'start: "a" / & "b"',
        'start: "a\\" <[2]>',
        "start: /a\\/ <[2]>",
        'start: "a" /\n%json {}',
    ],
)
def test_nothing_hides_behind_strings_and_patterns_without_an_end(grammar: str) -> None:
    with pytest.raises(InvalidRequest):
        lark_text(grammar, "x")
