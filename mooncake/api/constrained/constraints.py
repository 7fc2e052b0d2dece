"""Turns the form that a request wants for its answer (`response_format`, `structured_outputs`,
tools) into the grammar that constrains its tokens. Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mooncake.api.constrained.grammar import (
    ToolRule,
    choice_rule,
    lark_text,
    regex_rule,
    schema_rule,
    tool_rules,
)
from mooncake.api.model import ServedModel
from mooncake.api.schema.chat import ChatRequest, NamedToolChoice, Tool
from mooncake.api.schema.fields import GenerationFields
from mooncake.api.text.answer import Marker
from mooncake.base import Grammar, InvalidRequest

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Form(msgspec.Struct, frozen=True):
    """The form of an answer's content: a Lark expression, or the client's own grammar."""

    rule: str = ""
    grammar: str = ""
    param: str = ""
    schema: Any = None
    """The schema of which the rule follows only a part; None = the rule is exact."""


class Constraint(msgspec.Struct, frozen=True):
    """The grammar of an answer, and the schemas that it does not follow as a whole. What is made
    under these schemas is checked when it is finished.
    """

    grammar: Grammar | None = None
    answer: Any = None
    """The schema of the answer's text; None = nothing to check."""
    tools: dict[str, Any] = {}
    """Name of a tool -> the schema of its arguments."""
    param: str = ""
    """The field that most of the grammar comes from."""


class Thinking(msgspec.Struct, frozen=True):
    """The markers of a model's reasoning (token ids), whose text is not constrained."""

    begin: int | None = None
    """The token that begins reasoning; None = the model may not begin to reason here."""
    end: int | None = None
    is_open: bool = False
    """True if the prompt ends inside a think block."""

    @property
    def is_possible(self) -> bool:
        """Whether the answer may hold reasoning."""
        return self.is_open or self.begin is not None


def answer_form(fields: GenerationFields) -> Form | None:
    """Return the form that the request asks for; None = any text.

    Raises:
        InvalidRequest: the request asks for more than one form, or for one that cannot be followed.
    """
    asked: dict[str, dict[str, Any] | None] = {
        "response_format": _response_format(fields),
        "structured_outputs": _structured_outputs(fields),
        "guided_json": None if fields.guided_json is None else {"json": fields.guided_json},
        "guided_regex": None if fields.guided_regex is None else {"regex": fields.guided_regex},
        "guided_choice": None if fields.guided_choice is None else {"choice": fields.guided_choice},
        "guided_grammar": None
        if fields.guided_grammar is None
        else {"grammar": fields.guided_grammar},
    }
    forms = [(param, form) for param, form in asked.items() if form]
    if not forms:
        return None
    if len(forms) > 1:
        names = " and ".join(param for param, _ in forms)
        raise InvalidRequest(f"{names} exclude each other; send one of them", param=forms[1][0])
    param, form = forms[0]
    [(kind, value)] = form.items()
    if kind == "grammar":
        return Form(grammar=lark_text(value, param), param=param)
    if kind == "regex":
        return Form(regex_rule(value, param), param=param)
    if kind == "choice":
        return Form(choice_rule(value, param), param=param)
    schema = _parsed(value, param)
    is_strict = _is_strict(fields, param)
    made = schema_rule(schema, param, strict=is_strict is not False, asked_strict=is_strict is True)
    return Form(made.text, param=param, schema=None if made.whole else schema)


def _is_strict(fields: GenerationFields, param: str) -> bool | None:
    """Return whether OpenAI's `response_format` has `strict: true`. Otherwise a schema that no
    grammar can follow is checked afterwards instead of refused. None: vLLM's fields, which are
    always exact.
    """
    asked = fields.response_format
    if param != "response_format" or asked is None or asked.json_schema is None:
        return None
    return asked.json_schema.strict is True


def form_constraint(form: Form | None, model: ServedModel) -> Constraint:
    """Return the constraint of an answer without reasoning: `form` holds from the first token."""
    if form is None:
        return Constraint()
    grammar = Grammar(text=_text(form), end_ids=_ends(model))
    return Constraint(grammar, form.schema, param=form.param)


def chat_constraint(
    body: ChatRequest,
    model: ServedModel,
    ids: Mapping[Marker, int],
    thinking: Thinking,
) -> Constraint:
    """Return the constraint of a chat answer; `ids` are the tool markers, empty without tools to
    call.

    Raises:
        InvalidRequest: the request contradicts itself or cannot be followed.
    """
    form = answer_form(body)
    if not ids:
        if form is None:
            return Constraint()
        held = _held(_text(form), model, thinking, [])
        return Constraint(held, form.schema, param=form.param)
    tools = chosen_tools(body)
    forced = body.tool_choice not in (None, "auto")
    if form is not None and form.grammar:
        raise InvalidRequest(
            f"{form.param}: not together with tools; leave one of them out",
            param=form.param,
        )
    many = body.parallel_tool_calls is not False
    rules, weakened = tool_rules(tools, ids, many=many, opened=not forced)
    to_check = {tool.name: tool.schema for tool in weakened}
    triggers = [ids[Marker.SECTION_BEGIN]]
    if not forced:
        triggers.append(ids[Marker.CALL_BEGIN])
    if forced or form is not None:
        start = "start: calls"
        answer = None
        if not forced and form is not None:
            start = f"start: calls | answer\nanswer: {form.rule}"
            answer = form.schema
        held = _held("\n".join([start, *rules]), model, thinking, triggers)
        param = "tools" if form is None or len(form.rule) < sum(map(len, rules)) else form.param
        return Constraint(held, answer, to_check, param)
    grammar = Grammar(
        text="\n".join(["start: calls", *rules]),
        end_ids=_ends(model),
        free=True,
        optional=True,
        triggers=triggers,
    )
    return Constraint(grammar, tools=to_check, param="tools")


def chosen_tools(body: ChatRequest) -> list[ToolRule]:
    """Return the tools that may be called under `tool_choice`.

    Raises:
        InvalidRequest: a name is declared twice, or the chosen name is not declared.
    """
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    [(twice, count)] = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise InvalidRequest(
            f"tools: {twice[:100]!r} is declared twice; give each tool a name of its own",
            param="tools",
        )
    if isinstance(body.tool_choice, NamedToolChoice):
        wanted = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == wanted]
        if not tools:
            raise InvalidRequest(
                f"tool_choice: no tool is named {wanted[:100]!r}", param="tool_choice"
            )
    return [
        ToolRule(tool.function.name, _arguments_schema(tool), tool.function.strict)
        for tool in tools
    ]


def _arguments_schema(tool: Tool) -> Any:
    """Return the schema of a call's arguments, which are an object."""
    function = tool.function
    if function.parameters is None:
        return _ANY_OBJECT if function.strict is False else _NO_ARGUMENTS
    given = function.parameters
    return given if "type" in given else {**given, **_ANY_OBJECT}


def _held(text: str, model: ServedModel, thinking: Thinking, triggers: Sequence[int]) -> Grammar:
    """Return a grammar for the whole answer after its reasoning."""
    return Grammar(
        text=text,
        end_ids=_ends(model),
        free=thinking.is_open,
        triggers=list(triggers),
        think_begin=None if thinking.is_open else thinking.begin,
        think_end=thinking.end,
    )


def _text(form: Form) -> str:
    return form.grammar or f"start: answer\nanswer: {form.rule}"


def _ends(model: ServedModel) -> list[int]:
    if not model.eos_token_ids:
        raise InvalidRequest("this model names no end token, so it cannot follow a grammar")
    return list(model.eos_token_ids)


def _response_format(fields: GenerationFields) -> dict[str, Any] | None:
    asked = fields.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"json": _ANY_OBJECT}
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format: json_schema.schema is missing; send the JSON schema of the answer",
            param="response_format",
        )
    return {"json": asked.json_schema.schema_}


_REFUSED = {
    "structural_tag": "declare tools, or send a grammar",
    "whitespace_pattern": "send a grammar",
    "disable_any_whitespace": "send a grammar, or a regex",
    "disable_additional_properties": "write additionalProperties: false into the schema",
}
"""Fields of `structured_outputs` that would change tokens -> what to do instead."""


def _structured_outputs(fields: GenerationFields) -> dict[str, Any] | None:
    asked = fields.structured_outputs
    if asked is None:
        return None
    param = "structured_outputs"
    for name, advice in _REFUSED.items():
        if getattr(asked, name) not in (None, False):
            raise InvalidRequest(f"{param}.{name} is not supported: {advice}", param=param)
    given: dict[str, Any] = {
        "json": asked.json_,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
    }
    found = {kind: value for kind, value in given.items() if value is not None}
    if asked.json_object:
        found["json_object"] = True
    if len(found) != 1:
        raise InvalidRequest(
            f"{param}: send exactly one of json, regex, choice, grammar, json_object",
            param=param,
        )
    return {"json": _ANY_OBJECT} if "json_object" in found else found


def _parsed(schema: Any, param: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: the schema is not valid JSON", param=param) from error
