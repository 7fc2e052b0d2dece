"""What all translators of other APIs to the internal request share. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from mooncake.api.errors import validation_error
from mooncake.api.schema.fields import JsonObject, SharedFields
from mooncake.base import UserError

Body = TypeVar("Body", bound=JsonObject)


def shared_fields(body: SharedFields) -> dict[str, Any]:
    """Return the fields of `body` that every API has and that are set, by their JSON names."""
    names = set(SharedFields.model_fields)
    return body.model_dump(include=names, exclude_unset=True, by_alias=True)


def validated(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Return the body with these fields.

    Raises:
        InvalidRequest: a field is wrong; the message names it.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error, fields) from error


@contextlib.contextmanager
def named_as(params: Mapping[str, str]) -> Iterator[None]:
    """Make errors name a field by the name that the client knows.

    `params`: name in the internal request -> name in the client's API.
    """
    try:
        yield
    except UserError as error:
        given = params.get(error.param or "", error.param)
        if error.param is not None and given is not None:
            error.message = error.message.replace(f"{error.param}:", f"{given}:", 1)
            error.param = given
        raise
