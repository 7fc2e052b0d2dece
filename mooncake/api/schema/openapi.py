"""What the OpenAPI document says of bodies and replies."""

from __future__ import annotations

from collections.abc import Mapping
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
    content: dict[str, Any] = {JSON: {"schema": reply}} if reply is not None else {}
    if stream:
        content["text/event-stream"] = {"schema": _EVENTS}
    described: dict[str, Any] = {
        "responses": {
            **({"200": {"description": "The answer.", "content": content}} if content else {}),
            "default": {
                "description": "What is wrong with the request, or with the server.",
                "content": {JSON: {"schema": error}},
            },
        }
    }
    if body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": body}},
        }
    return described


def answer(media_type: str = "", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the description of a route whose answer has no schema of ours; without a media type it
    has no body.
    """
    content = {"content": {media_type: {"schema": schema or {}}}} if media_type else {}
    return {"responses": {"200": {"description": "The answer.", **content}}}


def with_schemas(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `paths` and `components` of a document. In these paths, the schema of a body or of
    a reply is its class.
    """
    kinds: dict[type, None] = {}
    shown = _referring(paths, kinds)
    bodies = [kind for kind in kinds if issubclass(kind, BaseModel)]
    replies = [kind for kind in kinds if not issubclass(kind, BaseModel)]
    _, of_bodies = models_json_schema(
        [(kind, "validation") for kind in bodies], ref_template=_REFERENCE
    )
    _, of_replies = msgspec.json.schema_components(
        replies, ref_template=_REFERENCE.replace("{model}", "{name}")
    )
    known = dict(of_bodies.get("$defs", {}))
    if twice := known.keys() & of_replies.keys():
        raise AssertionError(f"a body and a reply have the same name: {sorted(twice)}")
    return {"paths": shown, "components": {"schemas": known | of_replies}}


def _referring(described: Any, kinds: dict[type, None]) -> Any:
    """Return a description with references in place of classes, which go into `kinds`."""
    if isinstance(described, type):
        kinds[described] = None
        return {"$ref": _REFERENCE.format(model=described.__name__)}
    if isinstance(described, Mapping):
        return {name: _referring(each, kinds) for name, each in described.items()}
    if isinstance(described, list):
        return [_referring(each, kinds) for each in described]
    return described
