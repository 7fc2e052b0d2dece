"""How a request asks for an answer of a certain form: OpenAI's `response_format`, vLLM's
`structured_outputs` and its older `guided_*` fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class JsonSchemaFormat(BaseModel):
    """The `json_schema` of a response format."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Accepted; the schema is always kept to."""


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's way to ask for an answer of a certain form; exactly one of the fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark or GBNF."""
    json_object: bool | None = None
    structural_tag: Any = None
