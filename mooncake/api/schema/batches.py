"""Bodies and replies of `/v1/files` and `/v1/batches`, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema

from mooncake.api.errors import shorten
from mooncake.api.schema.fields import JsonObject, RequestBody

MAX_METADATA = 16
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
MAX_WINDOW_H = 168

MAX_WORD_CHARS, MAX_VALUE_CHARS = 64, 512
Id = Annotated[str, StringConstraints(min_length=1, max_length=128)]


def _check_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    """Check the entries one after another, up to the first mistake: there may be very many."""
    if len(metadata) > MAX_METADATA:
        raise ValueError(f"must have at most {MAX_METADATA} entries")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise ValueError(f"the value of {shorten(name)} must be a string")
        if len(name) > MAX_WORD_CHARS or len(value) > MAX_VALUE_CHARS:
            raise ValueError(
                f"{shorten(name)}: a name has at most {MAX_WORD_CHARS} characters, and a value "
                f"{MAX_VALUE_CHARS}"
            )
    return metadata


Metadata = Annotated[
    dict[str, Any],
    AfterValidator(_check_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
            "propertyNames": {"maxLength": MAX_WORD_CHARS},
            "maxProperties": MAX_METADATA,
        }
    ),
]


class ExpiresAfter(JsonObject):
    """When a file is deleted."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchRequest(RequestBody):
    """Answer every line of a file that was uploaded with the purpose "batch"."""

    input_file_id: Id
    endpoint: Id
    completion_window: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,2}h$")] = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """One file. Its `status` is always "processed": a file is there once it is whole."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake of an input file."""

    code: str
    message: str
    line: int | None
    """The number of the line, from 1; null: it is of the whole file."""
    param: str | None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed."""

    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch; `failed` are those in the error file."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. A time that has not come is null."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches, the newest first."""

    object: str = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
