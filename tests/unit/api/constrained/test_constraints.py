"""What a request asks of its answer's form, and the grammar that comes of it; refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.api.constrained.constraints import (
    Constraint,
    Thinking,
    answer_form,
    chat_constraint,
    form_constraint,
)
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.base import Grammar, InvalidRequest
from tests.support.api.grammars import (
    ARGUMENT,
    CALL,
    CALL_END,
    END,
    SECTION,
    SECTION_END,
    TOKENIZER,
    marker_ids,
    refused_at,
    special,
    tiny_grammars,
)
from tests.support.api.server import tiny_model

MODEL = tiny_model()
GRAMMARS = tiny_grammars()
INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ALWAYS_THINKS = Thinking(begin=special("<think>"), end=special("</think>"))


def tool(name: str = "go", parameters: Any = INT, **extra: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **extra}
    return {"type": "function", "function": function}


def chat(thinking: Thinking | None = None, **fields: Any) -> Grammar | None:
    return constraint(thinking, **fields).grammar


def constraint(thinking: Thinking | None = None, **fields: Any) -> Constraint:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    calls = bool(body.tools) and body.tool_choice != "none"
    return chat_constraint(body, MODEL, marker_ids() if calls else {}, thinking or Thinking())


def fits(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    return refused_at(GRAMMARS, grammar, TOKENIZER.encode(text)) is None


def call(arguments: str, name: str = "go", index: int = 0) -> str:
    return f"{CALL}functions.{name}:{index}{ARGUMENT}{arguments}{CALL_END}"


def test_nothing_asked_is_no_grammar() -> None:
    assert chat() is None
    assert chat(response_format={"type": "text"}) is None
    assert chat(tools=[tool()], tool_choice="none") is None
    assert form_constraint(answer_form(CompletionRequest(prompt="x")), MODEL) == Constraint()


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": INT}}},
            '{"a": 1}',
            '{"a": "1"}',
        ),
        ({"structured_outputs": {"json": INT}}, '{"a":1,"b":2}', "{}" + END),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "12", "x"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "^[ab]+/\\d$"}}, "ab/1", "ab1"),
        ({"structured_outputs": {"choice": ['say "hi"\n', "no"]}}, 'say "hi"\n', "sax"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "b", "c"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /x+/'}}, "axx", "a" + END),
        ({"guided_json": INT}, '{"a":1}', "[]"),
        ({"guided_regex": "a|b"}, "a", "c"),
        ({"guided_choice": ["a", "b"]}, "a", "c"),
        ({"guided_grammar": 'start: "a"'}, "a", "b"),
    ],
)
def test_every_way_to_ask(asked: dict[str, Any], good: str, bad: str) -> None:
    completion = CompletionRequest.model_validate({"prompt": "x", **asked})
    for grammar in (chat(**asked), form_constraint(answer_form(completion), MODEL).grammar):
        assert fits(grammar, good + END)
        assert not fits(grammar, bad)


def response_format(schema: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **extra}}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"uniqueItems": True, "type": "array"}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"$ref": "https://example.com/x.json"}, "example.com"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        ({"type": "frob"}, "frob"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match="response_format: ") as refused:
        chat(response_format=response_format(asked, strict=True))
    assert message in refused.value.message
    assert "at 2(" not in refused.value.message
    parameters = {"type": "object", "properties": {"x": asked}}
    with pytest.raises(InvalidRequest, match="tools: go: parameters: ") as refused:
        chat(tools=[tool(parameters=parameters, strict=True)])
    assert refused.value.param == "tools: go: parameters"


WEAKENED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "array", "uniqueItems": True, "maxItems": 2}, "[1,1]", "[1,1,1"),
    ({"not": {"type": "string"}, "enum": ["a", 1]}, '"a"', '"b'),
    ({"type": "string", "if": {}, "then": {"minLength": 3}}, '"a"', "1"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", '"'),
    ({"type": "string", "pattern": "(?=a)b", "maxLength": 2}, '"zz"', '"zzz"'),
    ({"type": "object", "properties": {"a": {"$ref": "https://a.b/c"}}}, '{"a":1}', "["),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "null"}, "null", "1"),
    (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "null"}, "b$": {"type": "null"}},
            "properties": {"n": {"type": "integer"}},
            "additionalProperties": False,
        },
        '{"n":1,"ab":5}',
        '{"n":null',
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}, "required": ["a"]}, '{"a":1}', "{}"),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 2}, "[1]", "{"),
    ({"type": "object", "propertyNames": {"maxLength": 1}, "maxProperties": 1}, '{"ab":1}', "["),
    ({"allOf": [{"type": "string", "pattern": f"[{letter}]"} for letter in "abcdef"]}, '"x"', "1"),
    ({"$schema": "https://example.com/mine", "type": "null"}, "null", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), WEAKENED, ids=lambda value: str(value)[:40])
def test_a_format_that_is_not_strict_follows_what_can_be_followed(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    completion = {"prompt": "x", "response_format": response_format(schema)}
    form = answer_form(CompletionRequest.model_validate(completion))
    for asked in ({}, {"strict": False}):
        made = constraint(response_format=response_format(schema, **asked))
        assert made == form_constraint(form, MODEL)
        assert made.answer == schema
        assert fits(made.grammar, good + END)
        assert not fits(made.grammar, bad + END)
    for exact in (
        {"response_format": response_format(schema, strict=True)},
        {"guided_json": schema},
        {"structured_outputs": {"json": schema}},
    ):
        with pytest.raises(InvalidRequest):
            chat(**exact)


HINT = "without `strict: true` an answer is held to what can be followed"


@pytest.mark.parametrize(
    ("schema", "can_be_weakened"),
    [({**INT, "not": {"const": 3}}, True), ({"type": "frob"}, False), ({"$ref": "#/no"}, False)],
)
def test_a_refusal_of_strict_says_what_comes_of_leaving_it_out(
    schema: dict[str, Any], can_be_weakened: bool
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    for asked in (
        {"response_format": response_format(schema, strict=True)},
        {"tools": [tool(parameters=parameters, strict=True)]},
    ):
        with pytest.raises(InvalidRequest) as refused:
            chat(**asked)
        assert (HINT in refused.value.message) is can_be_weakened
    with pytest.raises(InvalidRequest) as refused:
        chat(guided_json=schema)
    assert HINT not in refused.value.message, "it has no `strict`"


@pytest.mark.parametrize("strict", [None, False, True])
def test_what_a_grammar_follows_is_not_checked_again(strict: bool | None) -> None:
    made = constraint(
        response_format=response_format({**INT, "uniqueItems": False}, strict=strict),
        tools=[tool(strict=strict)],
    )
    assert made.answer is None
    assert made.tools == {}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"uniqueItems": True, "type": "frob"}, "frob"),
        ({"not": {}, "$ref": "#/nowhere"}, "/nowhere"),
        ({"not": {}, "required": "a"}, "required"),
        ({"not": {}, "minLength": -1}, "minLength"),
        ({"uniqueItems": True, "allOf": 5}, "allOf"),
    ],
)
def test_a_wrong_schema_is_refused_for_what_is_wrong(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(response_format=response_format(schema))
    assert message in refused.value.message


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"uniqueItems": True}
    for _ in range(150):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested"):
        chat(response_format=response_format(schema))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength"),
    ],
)
def test_what_nothing_fits_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}, "whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "or a regex"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "into the"),
        ({"structured_outputs": {"choice": []}}, "at least one choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "none of them empty"),
        ({"structured_outputs": {"json": "{"}}, "not valid JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "a JSON schema must be an object"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs: "),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "missing"),
        ({"structured_outputs": {"grammar": "start: <|im_end|>"}}, "special tokens"),
        ({"structured_outputs": {"grammar": "start: <[2]>"}}, "special tokens"),
        ({"response_format": {"type": "json_schema"}}, "schema is missing"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "exclude each other"),
        ({"tools": [tool(), tool()]}, "declared twice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "no tool is named 'no'",
        ),
        ({"tools": [tool()], "guided_grammar": 'start: "a"'}, "not together with tools"),
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**asked)
    assert message in refused.value.message


class TestTools:
    def test_free_text_stays_free_and_calls_are_held(self) -> None:
        grammar = chat(tools=[tool(), tool("a.b-c", None)])
        assert fits(grammar, 'any {"text" at all' + END)
        assert fits(grammar, "hm" + SECTION + call('{"a":1}') + SECTION_END + END)
        assert fits(grammar, SECTION + call("{}", "a.b-c", 1) + SECTION_END + END)
        for wrong in (call('{"a":"1"}'), call("{}", "other"), call('{"x":1}', "a.b-c")):
            assert not fits(grammar, SECTION + wrong)

    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "go"}}]
    )
    def test_a_forced_call(self, choice: Any) -> None:
        grammar = chat(tools=[tool(), tool("other")], tool_choice=choice)
        assert not fits(grammar, "text")
        assert fits(grammar, SECTION + call('{"a":1}') + SECTION_END + END)
        assert fits(grammar, SECTION + call('{"a":1}', "other")) is (choice == "required")

    def test_only_one_call_when_they_may_not_be_parallel(self) -> None:
        grammar = chat(tools=[tool()], parallel_tool_calls=False)
        once = SECTION + call('{"a":1}')
        assert fits(grammar, once + SECTION_END + END)
        assert not fits(grammar, once + CALL)
        assert fits(chat(tools=[tool()]), once + CALL)

    @pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}])
    def test_without_strict_only_what_can_be_followed_is(self, strict: dict[str, Any]) -> None:
        names = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
        schema = {"type": "object", "properties": {"names": names}, "required": ["names"]}
        made = constraint(tools=[tool(parameters=schema, **strict), tool("other", **strict)])
        assert made.tools == {"go": schema}
        assert fits(made.grammar, SECTION + call('{"names":["a","a"]}'))
        for wrong in ('{"names":[1', "{}" + CALL_END, "["):
            assert not fits(made.grammar, SECTION + CALL + "functions.go:0" + ARGUMENT + wrong)
        assert not fits(made.grammar, SECTION + call('{"a":"1"}', "other"))

    def test_strict_false_takes_schemas_of_which_nothing_can_be_followed(self) -> None:
        wrong = {"type": "object", "properties": {"a": {"type": "frob"}}}
        made = constraint(tools=[tool(parameters=wrong, strict=False)])
        assert made.tools == {"go": wrong}
        assert fits(made.grammar, SECTION + call('{"a":[]}'))
        assert not fits(made.grammar, SECTION + call("[]"))
        with pytest.raises(InvalidRequest, match="frob"):
            chat(tools=[tool(parameters=wrong)])

    def test_strict_false_without_parameters_is_any_object(self) -> None:
        grammar = chat(tools=[tool(parameters=None, strict=False)])
        assert fits(grammar, SECTION + call('{"zzz":[]}'))
        assert not fits(grammar, SECTION + call("[]"))

    def test_parameters_without_a_type_are_an_object(self) -> None:
        grammar = chat(tools=[tool(parameters={"properties": {"a": {"type": "null"}}})])
        assert fits(grammar, SECTION + call('{"a":null}'))
        assert not fits(grammar, SECTION + call("[]"))

    def test_an_answer_of_a_form_or_calls(self) -> None:
        grammar = chat(tools=[tool()], response_format={"type": "json_object"})
        assert fits(grammar, '{"x":1}' + END)
        assert fits(grammar, SECTION + call('{"a":1}') + SECTION_END + END)
        assert not fits(grammar, "text")

    def test_calls_out_of_an_open_think_block(self) -> None:
        thinking = Thinking(end=special("</think>"), is_open=True)
        grammar = chat(thinking, tools=[tool()], tool_choice="required")
        section = SECTION + call('{"a":1}') + SECTION_END + END
        assert fits(grammar, "hm" + section)
        assert fits(grammar, "hm</think>" + section)
        assert not fits(grammar, "hm</think>text")
        assert not fits(grammar, "hm" + END)


def test_the_model_may_think_first() -> None:
    asked = {"response_format": {"type": "json_object"}}
    assert fits(chat(ALWAYS_THINKS, **asked), "<think>[</think>{}" + END)
    assert fits(chat(ALWAYS_THINKS, **asked), "{}" + END)
    assert not fits(chat(**asked), "<think>")


def test_remarks_and_foreign_options_are_no_rules() -> None:
    schema = {
        "type": "object",
        "x-guidance": {"lenient": True},
        "properties": {
            "format": {"type": "string", "format": "int64", "x-guidance": {"lenient": True}},
            "x-guidance": {"type": "integer", "title": "a name like any other"},
        },
        "required": ["format", "x-guidance"],
        "$comment": "c",
        "examples": [{"format": "x"}],
    }
    grammar = chat(guided_json=schema)
    assert fits(grammar, '{"format":"q","x-guidance":1}' + END)
    assert not fits(grammar, '{"format":"q","x-guidance":"')


def test_white_space_between_tokens_is_bounded() -> None:
    grammar = chat(guided_json=INT)
    assert fits(grammar, "{" + " " * 40 + '"a":1}')
    assert not fits(grammar, "{" + " " * 41)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "y" * 1_000_001},
        {"enum": ["y" * 1_000] * 1_001},
        {"properties": {"y" * 1_000_001: {}}},
        {"items": [{"pattern": "y" * 600_000}, {"pattern": "y" * 600_000}]},
    ],
)
def test_a_schema_that_is_too_long_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    """Writing 16 MB would hold Python's lock for 60 ms, several times for the tools of a call."""

    def write(*_: Any) -> str:
        raise AssertionError("it is written")

    monkeypatch.setattr("mooncake.api.constrained.grammar.json.dumps", write)
    body = CompletionRequest(prompt="a", guided_json=schema)
    with pytest.raises(InvalidRequest, match="longer than the limit of 1000000 characters"):
        answer_form(body)
