"""What the adapters of other APIs share on the way to the one internal request. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from mooncake.api.errors import validation_error
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.fields import SharedFields
from mooncake.base import UserError


def shared_fields(body: SharedFields) -> dict[str, Any]:
    """Return those fields that every API has, as the internal request has them, where set."""
    names = set(SharedFields.model_fields)
    return body.model_dump(include=names, exclude_unset=True, by_alias=True)


def internal_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the request of these fields.

    Raises:
        InvalidRequest: a combination that the other API's schema lets through.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error, json.dumps(fields).encode()) from error


@contextlib.contextmanager
def named_as(params: Mapping[str, str]) -> Iterator[None]:
    """Let errors name a field as the client knows it: `params` by the internal request's names."""
    try:
        yield
    except UserError as error:
        given = params.get(error.param or "", error.param)
        if error.param is not None and given is not None:
            error.message = error.message.replace(f"{error.param}:", f"{given}:", 1)
            error.param = given
        raise
