"""Weaker schemas admit everything that the original admits, and grammars can follow them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import referencing
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY

from mooncake.api.constrained.grammar import json_rule, schema_rule
from mooncake.api.constrained.weakened import (
    MAX_TRIED_PATTERNS,
    NOT_FOLLOWED,
    PatternTrials,
    weaker_schemas,
)
from mooncake.base import InvalidRequest

NAMES = ["a", "ab", "b"]
PATTERNS = ["^a", "b$", "(?=a)a", "^[ab]+$", "(a)\\1"]
TYPES = ["string", "integer", "number", "array", "object", "null", "boolean"]


def keyword(name: str, values: Any) -> Any:
    return st.tuples(st.just(name), values)


def keywords(schemas: Any) -> Any:
    """Return pairs of a keyword and its value."""
    maps = st.dictionaries(st.sampled_from(NAMES), schemas, max_size=2)
    lists = st.lists(schemas, min_size=1, max_size=3)
    small = st.integers(0, 3)
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=2)
    return st.one_of(
        *(keyword(name, schemas) for name in (
            "additionalProperties", "items", "not", "if", "then", "else", "contains",
            "propertyNames", "unevaluatedProperties", "unevaluatedItems",
        )),
        *(keyword(name, lists) for name in ("allOf", "anyOf", "oneOf", "prefixItems")),
        *(keyword(name, maps) for name in ("properties", "dependentSchemas", "$defs")),
        *(keyword(name, small) for name in (
            "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
            "minimum", "maximum", "minContains", "maxContains",
        )),
        keyword(
            "patternProperties", st.dictionaries(st.sampled_from(PATTERNS), schemas, max_size=2)
        ),
        keyword("type", st.sampled_from(TYPES)),
        keyword("required", names),
        keyword("dependentRequired", st.dictionaries(st.sampled_from(NAMES), names, max_size=2)),
        keyword("uniqueItems", st.booleans()),
        keyword("pattern", st.sampled_from(PATTERNS)),
        keyword("$ref", st.sampled_from(
            ["#", "#/$defs/a", "#/properties/a", "#/anyOf/0", "#/oneOf/0", "#/not", "https://x/y"]
        )),
    )  # fmt: skip


SCHEMAS = st.recursive(
    st.booleans() | st.builds(dict),
    lambda schemas: st.lists(keywords(schemas), max_size=4).map(dict),
    max_leaves=12,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 4) | st.sampled_from(["", "a", "aa", "ab", "b"]),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(NAMES), values, max_size=3)
    ),
    max_leaves=6,
)


def is_valid(value: Any, schema: Any) -> bool | None:
    """Return whether `value` is valid, None where that has no answer."""
    checker = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    try:
        return bool(checker.is_valid(value))
    except (RecursionError, referencing.exceptions.Unresolvable):
        return None


@example({"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False}, [{"a": 1}])
@example({"patternProperties": {"(?=a)a": {}}, "additionalProperties": False}, [{"a": 1}])
@example({"oneOf": [{}, {"not": {}}]}, [1])
@example({"oneOf": [{}, {"not": {}}], "anyOf": [{"type": "integer"}]}, [1])
@example({"allOf": [{"$ref": "https://x/y"}]}, [1])
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=4))
def test_what_is_valid_stays_valid(schema: Any, values: list[Any]) -> None:
    assume(isinstance(schema, dict))
    weaker = list(weaker_schemas(schema, PatternTrials(lambda pattern: "(" not in pattern)))
    assert len(weaker) == 3
    for value in values:
        if is_valid(value, schema):
            for weak in weaker:
                shown = f"{json.dumps(value)} against {json.dumps(weak)}"
                assert is_valid(value, weak) is not False, shown


@given(SCHEMAS)
def test_a_schema_is_followed_or_refused_for_another_reason_than_a_keyword(schema: Any) -> None:
    assume(isinstance(schema, dict))
    refusal = ""
    try:
        schema_rule(schema, "x", strict=False)
    except InvalidRequest as error:
        refusal = error.message
    assert not any(word in refusal for word in ("Unimplemented", "look-around", "oneOf"))


def test_the_keywords_that_are_left_out_are_those_that_the_library_does_not_know() -> None:
    known = {
        name
        for uri in REGISTRY
        if "draft" in uri and "schema" in uri
        for name in [*REGISTRY.contents(uri).get("properties", {})]
    }
    assert known >= NOT_FOLLOWED
    annotations = {"$id", "id", "$schema", "$ref"}
    refused = set()
    for name in known - annotations:
        try:
            json_rule({name: PLAUSIBLE.get(name, {})}, "x")
        except InvalidRequest as error:
            if "Unimplemented" in error.message:
                refused.add(name)
    assert refused == NOT_FOLLOWED


PLAUSIBLE: dict[str, Any] = {
    "uniqueItems": True, "minContains": 1, "maxContains": 1, "type": "string", "enum": [1],
    "required": ["a"], "pattern": "a", "format": "date", "multipleOf": 1, "$dynamicRef": "#a",
    "$recursiveRef": "#", "$anchor": "a", "$dynamicAnchor": "a",
    "allOf": [{}], "anyOf": [{}], "oneOf": [{}], "prefixItems": [{}],
    **dict.fromkeys((f"{end}{what}" for end in ("min", "max") for what in
                     ("Length", "Items", "Properties", "imum")), 1),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ["properties", "$defs", "enum", "const"])
def test_names_that_look_like_keywords_stay(name: str) -> None:
    inner = {"uniqueItems": {"uniqueItems": True}, "not": {"type": "null"}}
    given_ = {name: [inner] if name == "enum" else inner}
    weak = next(weaker_schemas(given_, PatternTrials(bool)))
    if name in ("enum", "const"):
        assert weak == given_
    else:
        assert weak == {name: {"uniqueItems": {}, "not": {"type": "null"}}}


def test_patterns_are_tried_once_and_not_without_end() -> None:
    tried: list[str] = []

    def can_follow(pattern: str) -> bool:
        tried.append(pattern)
        return True

    trials = PatternTrials(can_follow)
    names = [str(number) for number in range(MAX_TRIED_PATTERNS + 1)]
    for _ in range(2):
        assert [trials.keep(name) for name in names] == [True] * MAX_TRIED_PATTERNS + [False]
    assert tried == names[:MAX_TRIED_PATTERNS]
