"""Adds bodies and replies to the OpenAPI document. Routes read and write these themselves, so
FastAPI does not know them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"
_EVENTS = {"type": "string", "description": "Server-sent events, with stream=true."}


def operation(
    body: type[BaseModel] | None,
    reply: type[msgspec.Struct] | None,
    error: type[msgspec.Struct],
    *,
    stream: bool = False,
) -> dict[str, Any]:
    """Return a route's `openapi_extra`: its JSON body, its reply (also as a stream, if it has one;
    None: the route describes it itself), and the body of every status other than 200.
    """
    content: dict[str, Any] = {"application/json": _schema(reply)} if reply is not None else {}
    if stream:
        content["text/event-stream"] = {"schema": _EVENTS}
    described: dict[str, Any] = {
        "responses": {
            **({"200": {"description": "The answer.", "content": content}} if content else {}),
            "default": {
                "description": "What is wrong with the request, or with the server.",
                "content": {"application/json": _schema(error)},
            },
        }
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": _schema(body)},
        }
    return described


def add_schemas(
    document: dict[str, Any],
    bodies: list[type[BaseModel]],
    replies: list[type[msgspec.Struct]],
) -> None:
    """Put the schemas of `bodies` and `replies`, and all they refer to, into `document`."""
    _, of_bodies = models_json_schema(
        [(kind, "validation") for kind in bodies], ref_template=_REFERENCE
    )
    _, of_replies = msgspec.json.schema_components(
        replies, ref_template=_REFERENCE.replace("{model}", "{name}")
    )
    known = document.setdefault("components", {}).setdefault("schemas", {})
    known.update(of_bodies.get("$defs", {}))
    if twice := known.keys() & of_replies.keys():
        raise AssertionError(f"a body and a reply have the same name: {sorted(twice)}")
    known.update(of_replies)


def _schema(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": _REFERENCE.format(model=kind.__name__)}}
