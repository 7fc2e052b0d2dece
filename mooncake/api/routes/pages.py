"""What the routes of files and of batches share: pages of lists, and a service that may be off."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from mooncake.api.batches.service import BatchService
from mooncake.api.errors import ApiError, shorten
from mooncake.base import InvalidRequest


def needed(batches: BatchService | None) -> BatchService:
    """Return the service; raise ApiError, with the flag that turns it on, if there is none."""
    if batches is None:
        raise ApiError(
            404,
            "NotFoundError",
            "this server keeps no files and batches: start it with a directory for them "
            "(`batch-dir`)",
        )
    return batches


def parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a word in the query."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


AFTER = parameter("after", {"type": "string", "description": "Begin after the one with this id."})


def limit_parameter(most: int) -> dict[str, Any]:
    """Return the description of the length of a page."""
    return parameter("limit", {"type": "integer", "minimum": 1, "maximum": most})


def limit_of(request: Request, default: int, most: int) -> int:
    """Return how long a page the client wants. Raises InvalidRequest for a wrong number."""
    given = request.query_params.get("limit")
    if given is None:
        return default
    is_number = given.isascii() and given.isdecimal() and len(given) <= len(str(most))
    if not (is_number and 1 <= int(given) <= most):
        raise InvalidRequest(
            f"limit: must be a number from 1 to {most}, not {shorten(given)}", param="limit"
        )
    return int(given)
