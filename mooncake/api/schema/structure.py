"""The fields that ask for an answer in a certain form: OpenAI's `response_format` and vLLM's
`structured_outputs`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mooncake.api.schema.json_object import JsonObject


class JsonSchemaFormat(JsonObject):
    """The `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """True: a schema that no grammar can follow as a whole is refused. Otherwise the part that can
    be followed is, and the finished answer is checked against the whole (`schema_errors`).
    """


class ResponseFormat(JsonObject):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(JsonObject):
    """vLLM's way to ask for an answer in a certain form. Exactly one of the fields must be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark or GBNF."""
    json_object: bool | None = None
    structural_tag: Any = None
