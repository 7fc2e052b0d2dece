"""What the routes of files and batches ask: checks what clients want, and keeps to the quotas.

It owns the lanes in which the store's one thread and the readers and writers of files work, and the
runner. A tenant sees its own files and batches only.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from mooncake.api.api_server import LANE_PLACES, ApiServer
from mooncake.api.batches import store
from mooncake.api.batches.file_area import FileArea, FileWriter
from mooncake.api.batches.lines import ENDPOINTS
from mooncake.api.batches.runner import Ask, BatchRunner
from mooncake.api.batches.store import BatchRow, BatchStore, FileRow
from mooncake.api.errors import ApiError, forbidden, shorten
from mooncake.api.lane import Lane
from mooncake.api.schema.batches import (
    MAX_EXPIRY_S,
    MAX_WINDOW_H,
    MIN_EXPIRY_S,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchRequest,
    FileObject,
    RequestCounts,
)
from mooncake.base import InvalidRequest, Overloaded

PURPOSE = "batch"
MAX_FILENAME_CHARS = 256
MAX_FILES = 100_000
"""Files of one tenant: small ones take more than their bytes."""
BUSY_RETRY_S = 60.0
"""Retry advice for a tenant with too many batches."""
WRITE_BYTES = 1 << 20
"""Bytes of an upload that are written at a time."""
READ_BYTES = 1 << 16
"""Bytes of a file that are read at a time. A client that is slow to take them holds as many."""
_FILENAME = re.compile(rf"[^\x00-\x1f\x7f]{{1,{MAX_FILENAME_CHARS}}}")

Made = TypeVar("Made")


@dataclass
class NewFile:
    """A file that is being uploaded."""

    tenant: str
    file_id: str
    writer: FileWriter
    used: int
    """Bytes of the tenant's files when it began."""
    num_bytes: int = 0


class BatchService:
    """The files and batches of one directory."""

    def __init__(
        self,
        api_server: ApiServer,
        directory: Path,
        *,
        ask: Ask,
        seen: Callable[[int, int, int], None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`ask` and `seen`: see `BatchRunner`.

        Raises:
            ConfigError: the directory cannot be used.
        """
        self._api_server = api_server
        self._config = api_server.config
        self._wall_s = wall_s
        self._area = FileArea(directory / "files")
        self._store = BatchStore(directory / "batches.sqlite")
        self._storing = Lane("storing-batches", 1, LANE_PLACES)
        self._reading = Lane("reading-files", 2, LANE_PLACES)
        self._uploading: Counter[str] = Counter()
        """Tenant -> bytes of its files that are being uploaded here."""
        self._owner = "-".join(filter(None, (self._config.gateway_id, api_server.new_id()[:8])))
        self.runner = BatchRunner(
            api_server,
            self._store,
            self._area,
            storing=self._storing,
            reading=self._reading,
            ask=ask,
            owner=self._owner,
            wall_s=wall_s,
            seen=seen,
        )

    async def close(self) -> None:
        """Close threads and database. The runner has ended."""
        self._reading.close()
        await self._storing.run(self._store.close)
        self._storing.close()

    async def _stored(self, tenant: str, work: Callable[[], Made]) -> Made:
        return await self._storing.run(work, tenant)

    # ------------------------------------------------------------ files

    async def begin_file(self, tenant: str, num_bytes: int) -> NewFile:
        """Begin a file of about this many bytes.

        Raises:
            ApiError: it is too large, or the files of the tenant are.
        """
        if num_bytes > self._config.max_batch_file_bytes:
            raise self._too_large()
        if await self._stored(tenant, partial(self._store.num_files, tenant)) >= MAX_FILES:
            raise forbidden(f"you have {MAX_FILES} files, the most that are kept; delete some")
        used = await self._stored(tenant, partial(self._store.used_bytes, tenant))
        if used + num_bytes > self._config.max_tenant_batch_bytes:
            raise self._full(used)
        file_id = f"file-{self._api_server.new_id()}"
        return NewFile(tenant, file_id, self._area.writer(file_id, self._owner), used)

    async def write(self, file: NewFile, piece: bytes) -> None:
        """Add a piece to a new file. Raises ApiError once it is too large, or all that its tenant
        uploads is.
        """
        file.num_bytes += len(piece)
        self._uploading[file.tenant] += len(piece)
        if file.num_bytes > self._config.max_batch_file_bytes:
            raise self._too_large()
        if file.used + self._uploading[file.tenant] > self._config.max_tenant_batch_bytes:
            raise self._full(file.used)
        await self._reading.run(partial(file.writer.write, piece), file.tenant)

    async def add_file(self, file: NewFile, filename: str, kept_s: int) -> FileObject:
        """Make a new file, which has been written, whole. It is deleted after `kept_s`.

        Raises:
            ApiError: the files of the tenant take too much together.
        """
        await self._reading.run(file.writer.finish, file.tenant)
        now = int(self._wall_s())
        row = FileRow(
            id=file.file_id,
            tenant=file.tenant,
            purpose=PURPOSE,
            filename=filename if _FILENAME.fullmatch(filename) else "upload.jsonl",
            num_bytes=file.writer.num_bytes,
            created_s=now,
            expires_s=now + kept_s,
        )
        add = partial(self._store.add_file, row, self._config.max_tenant_batch_bytes)
        used = await self._stored(file.tenant, add)
        if used is not None:
            await self._reading.run(partial(self._area.delete, row.id), file.tenant)
            raise self._full(used)
        return _file_object(row)

    async def discard_file(self, file: NewFile) -> None:
        """Delete what was written of a new file, unless it is whole. Call it once for each."""
        self._uploading[file.tenant] -= file.num_bytes
        if not self._uploading[file.tenant]:
            del self._uploading[file.tenant]
        await self._reading.run(file.writer.discard, file.tenant)

    async def file(self, tenant: str, file_id: str) -> FileObject:
        """Return a file. Raises ApiError if the tenant has no such file."""
        row = await self._stored(tenant, partial(self._store.file, tenant, file_id))
        if row is None:
            raise _no_file(file_id)
        return _file_object(row)

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileObject], bool]:
        """Return a page of files, and whether more follow."""
        look = partial(
            self._store.files, tenant, purpose=purpose, after=after, limit=limit + 1,
            newest_first=newest_first,
        )  # fmt: skip
        rows = await self._stored(tenant, look)
        return [_file_object(row) for row in rows[:limit]], len(rows) > limit

    async def read(self, tenant: str, file_id: str, offset: int) -> bytes:
        """Return the next bytes of a file that the tenant has; b"" at its end."""
        return await self._reading.run(
            partial(self._area.read, file_id, offset, READ_BYTES), tenant
        )

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises ApiError if there is none, or an open batch reads it."""
        gone = await self._stored(tenant, partial(self._store.delete_file, tenant, file_id))
        if isinstance(gone, str):
            raise ApiError(
                409,
                "ConflictError",
                f"{file_id} is the input of {gone}, which has not ended; cancel that first",
            )
        if not gone:
            raise _no_file(file_id)
        await self._reading.run(partial(self._area.delete, file_id), tenant)

    def _too_large(self) -> ApiError:
        limit = f"{self._config.max_batch_file_bytes} bytes (`max-batch-file-bytes`)"
        return ApiError(
            413, "RequestTooLargeError", f"the file is larger than the limit of {limit}; split it"
        )

    def _full(self, used: int) -> ApiError:
        return forbidden(
            f"your files take {used} bytes, and with this one they would take more than "
            f"{self._config.max_tenant_batch_bytes} (`max-tenant-batch-bytes`); delete some"
        )

    # ------------------------------------------------------------ batches

    async def add_batch(self, tenant: str, key_name: str | None, body: BatchRequest) -> BatchObject:
        """Take a batch of a tenant that runs with the API key `key_name`.

        Raises:
            MooncakeError: a field is wrong, there is no such file, or the tenant has too many.
        """
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint: must be one of {', '.join(ENDPOINTS)}, not {shorten(body.endpoint)}"
                + ("; this server has no embeddings" if "embeddings" in body.endpoint else ""),
                param="endpoint",
            )
        num_hours = int(body.completion_window[:-1])
        if num_hours > MAX_WINDOW_H:
            raise InvalidRequest(
                f"completion_window: must be from 1h to {MAX_WINDOW_H}h", param="completion_window"
            )
        file = await self.file(tenant, body.input_file_id)
        if file.purpose != PURPOSE:
            raise InvalidRequest(
                f"input_file_id: {file.id} has the purpose {file.purpose!r}; upload the input with "
                f"purpose={PURPOSE!r}",
                param="input_file_id",
            )
        used = await self._stored(tenant, partial(self._store.used_bytes, tenant))
        if used > self._config.max_tenant_batch_bytes:  # by answers: one input makes many
            raise forbidden(
                f"your files take {used} bytes, more than {self._config.max_tenant_batch_bytes} "
                "(`max-tenant-batch-bytes`); delete some before the next batch"
            )
        now = int(self._wall_s())
        expiry = body.output_expires_after
        row = BatchRow(
            id=f"batch_{self._api_server.new_id()}",
            tenant=tenant,
            key_name=key_name,
            endpoint=body.endpoint,
            input_file_id=file.id,
            input_bytes=file.bytes,
            completion_window=body.completion_window,
            metadata=msgspec.json.encode(body.metadata).decode(),
            output_kept_s=MAX_EXPIRY_S if expiry is None else expiry.seconds,
            created_s=now,
            expires_s=now + 3600 * num_hours,
        )
        limit = self._config.max_tenant_batches
        if not await self._stored(tenant, partial(self._store.add_batch, row, limit)):
            raise Overloaded(
                f"you have {limit} batches that have not ended (`max-tenant-batches`); wait until "
                "one ends, or cancel one",
                retry_after_s=BUSY_RETRY_S,
            )
        if await self._stored(tenant, partial(self._store.file, tenant, file.id)) is None:
            # It was deleted before the batch was there to keep it.
            await self._stored(tenant, partial(self._store.cancel, tenant, row.id, now))
            raise _no_file(file.id)
        self.runner.wake()
        return _batch_object(row)

    async def batch(self, tenant: str, batch_id: str) -> BatchObject:
        """Return a batch. Raises ApiError if the tenant has no such batch."""
        row = await self._stored(tenant, partial(self._store.batch, tenant, batch_id))
        if row is None:
            raise _no_batch(batch_id)
        return _batch_object(row)

    async def batches(
        self, tenant: str, *, after: str | None, limit: int
    ) -> tuple[list[BatchObject], bool]:
        """Return a page of batches, the newest first, and whether more follow."""
        look = partial(self._store.batches, tenant, after=after, limit=limit + 1)
        rows = await self._stored(tenant, look)
        return [_batch_object(row) for row in rows[:limit]], len(rows) > limit

    async def cancel(self, tenant: str, batch_id: str) -> BatchObject:
        """Ask for the end of a batch. Raises ApiError if there is none, or it cannot be cancelled
        any more.
        """
        cancel = partial(self._store.cancel, tenant, batch_id, self._wall_s())
        row = await self._stored(tenant, cancel)
        if row is None:
            raise _no_batch(batch_id)
        if row.status not in (store.CANCELLING, store.CANCELLED):
            raise ApiError(
                409,
                "ConflictError",
                f"{batch_id} is {row.status}: only a batch that is validating or in_progress can "
                "be cancelled",
            )
        self.runner.wake()
        return _batch_object(row)


def expiry_of(anchor: str | None, seconds: str | None) -> int:
    """Return for how many seconds an uploaded file is kept, by the fields of its form.

    Raises:
        InvalidRequest: a field is wrong.
    """
    if anchor is None and seconds is None:
        return MAX_EXPIRY_S
    if anchor not in (None, "created_at"):
        raise InvalidRequest(
            f"expires_after: the anchor must be created_at, not {shorten(anchor)}",
            param="expires_after",
        )
    text = seconds or ""
    is_number = text.isdecimal() and len(text) <= len(str(MAX_EXPIRY_S))
    if not (is_number and MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S):
        raise InvalidRequest(
            f"expires_after: seconds must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, not "
            f"{shorten(text)}",
            param="expires_after",
        )
    return int(text)


def _no_file(file_id: str) -> ApiError:
    return ApiError(
        404, "NotFoundError", f"no file {shorten(file_id)} is here; it may have expired"
    )


def _no_batch(batch_id: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"no batch {shorten(batch_id)} is here")


def _file_object(row: FileRow) -> FileObject:
    return FileObject(
        id=row.id,
        bytes=row.num_bytes,
        created_at=row.created_s,
        filename=row.filename,
        purpose=row.purpose,
        expires_at=row.expires_s,
    )


def _batch_object(row: BatchRow) -> BatchObject:
    def ended(status: str) -> int | None:
        return row.ended_s if row.status == status else None

    errors = msgspec.json.decode(row.errors, type=list[BatchError])
    return BatchObject(
        id=row.id,
        endpoint=row.endpoint,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=row.input_file_id,
        completion_window=row.completion_window,
        status=row.status,
        output_file_id=row.output_file_id if row.ended_s is not None else None,
        error_file_id=row.error_file_id if row.ended_s is not None else None,
        created_at=row.created_s,
        in_progress_at=row.in_progress_s,
        expires_at=row.expires_s,
        finalizing_at=row.finalizing_s,
        completed_at=ended(store.COMPLETED),
        failed_at=ended(store.FAILED),
        expired_at=ended(store.EXPIRED),
        cancelling_at=row.cancelling_s,
        cancelled_at=ended(store.CANCELLED),
        request_counts=RequestCounts(
            total=row.num_total, completed=row.num_completed, failed=row.num_failed
        ),
        metadata=msgspec.json.decode(row.metadata, type=dict[str, str] | None),
    )
