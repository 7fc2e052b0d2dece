"""Request bodies in the OpenAPI document: routes read bodies themselves, so they are added here."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what `openapi_extra` says for a route whose JSON body is a `kind`."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_schemas(document: dict[str, Any], kinds: list[type[BaseModel]]) -> None:
    """Put the schemas of `kinds` and all they refer to into `document`."""
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=_REFERENCE
    )
    known = document.setdefault("components", {}).setdefault("schemas", {})
    known.update(schemas.get("$defs", {}))
