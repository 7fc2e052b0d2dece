"""What the OpenAPI document says of bodies and replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"
JSON = "application/json"
_EVENTS = {"type": "string", "description": "Server-sent events, with stream=true."}


def operation(
    body: type[BaseModel] | None,
    reply: type[msgspec.Struct] | None,
    error: type[msgspec.Struct],
    *,
    stream: bool = False,
) -> dict[str, Any]:
    """Return the description of a route: its JSON body, its reply (also as a stream, if it has one;
    None: the route describes it itself), and the body of every status other than 200.
    """
    content: dict[str, Any] = {JSON: _schema(reply)} if reply is not None else {}
    if stream:
        content["text/event-stream"] = {"schema": _EVENTS}
    described: dict[str, Any] = {
        "responses": {
            **({"200": {"description": "The answer.", "content": content}} if content else {}),
            "default": {
                "description": "What is wrong with the request, or with the server.",
                "content": {JSON: _schema(error)},
            },
        }
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: _schema(body)},
        }
    return described


def answer(media_type: str = "", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the description of a route whose answer has no schema of ours; without a media type it
    has no body.
    """
    content = {"content": {media_type: {"schema": schema or {}}}} if media_type else {}
    return {"responses": {"200": {"description": "The answer.", **content}}}


def add_schemas(
    document: dict[str, Any],
    bodies: Sequence[type[BaseModel]],
    replies: Sequence[type[msgspec.Struct]],
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
