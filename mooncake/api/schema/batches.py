"""Bodies and replies of `/v1/files` and `/v1/batches`, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import Field, StringConstraints

from mooncake.api.schema.fields import JsonObject, RequestBody

MAX_METADATA = 16
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
MAX_WINDOW_H = 168

Word = Annotated[str, StringConstraints(max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class ExpiresAfter(JsonObject):
    """When a file is deleted."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchRequest(RequestBody):
    """Answer every line of a file that was uploaded with the purpose "batch"."""

    input_file_id: Id
    endpoint: Id
    completion_window: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,2}h$")] = "24h"
    metadata: Annotated[dict[Word, Value], Field(max_length=MAX_METADATA)] | None = None
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
