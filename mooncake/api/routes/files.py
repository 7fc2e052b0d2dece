"""`/v1/batches`: many requests in one file, answered when the cluster has room; and `/v1/files`,
which they read and write. Also what the routes of lists share: pages, and a service that may be
off.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mooncake.api.api_server import ApiServer
from mooncake.api.batches.service import (
    PURPOSE,
    READ_BYTES,
    WRITE_BYTES,
    BatchService,
    NewFile,
    expiry_of,
)
from mooncake.api.errors import ApiError, ErrorReply, shorten
from mooncake.api.http.request_body import FormSplitter, Head, boundary_of, read_body
from mooncake.api.http.response import check_class, json_response, tenant_of
from mooncake.api.http.router import Router
from mooncake.api.schema.batches import (
    BatchList,
    BatchObject,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import encode
from mooncake.base import InvalidRequest, Priority

JSONL = "application/jsonl"
MAX_FILES = 1000
MAX_WORD_BYTES = 256
FORM_BYTES = 64 << 10
"""Bytes that a form may have besides its file."""
_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": PURPOSE},
                    "expires_after[anchor]": {"const": "created_at"},
                    "expires_after[seconds]": {"type": "integer"},
                },
                "required": ["file", "purpose"],
            }
        }
    },
}
_CONTENT = operation(None, None, ErrorReply)
_CONTENT["responses"]["200"] = {
    "description": "The file.",
    "content": {JSONL: {"schema": {"type": "string", "format": "binary"}}},
}


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


def file_routes(batches: BatchService | None) -> Router:
    """Return the routes of files; without `batches` they say what turns them on."""
    router = Router()

    @router.post(
        "/v1/files",
        described=operation(None, FileObject, ErrorReply) | {"requestBody": _FORM},
    )
    async def upload(request: Request) -> Response:
        """Take a file of JSON lines, for a batch. It is written to the disk as it arrives."""
        made = await _upload(request, needed(batches))
        request.state.is_complete = True  # a repeat with the same Idempotency-Key gets this answer
        return json_response(encode(made))

    @router.get(
        "/v1/files",
        described=operation(None, FileList, ErrorReply)
        | {
            "parameters": [
                AFTER,
                limit_parameter(MAX_FILES),
                parameter("order", {"enum": ["asc", "desc"]}),
                parameter("purpose", {"type": "string"}),
            ]
        },
    )
    async def files(request: Request) -> Response:
        """List the files of the key's tenant."""
        asked = request.query_params
        order = asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: must be asc or desc", param="order")
        data, has_more = await needed(batches).files(
            tenant_of(request),
            purpose=asked.get("purpose"),
            after=asked.get("after"),
            limit=limit_of(request, MAX_FILES, MAX_FILES),
            newest_first=order == "desc",
        )
        ids: list[str | None] = [each.id for each in data]
        ids = ids or [None]
        page = FileList(data=data, first_id=ids[0], last_id=ids[-1], has_more=has_more)
        return json_response(encode(page))

    @router.get("/v1/files/{file_id}", described=operation(None, FileObject, ErrorReply))
    async def file(request: Request, file_id: str) -> Response:
        """Describe one file."""
        return json_response(encode(await needed(batches).file(tenant_of(request), file_id)))

    @router.delete("/v1/files/{file_id}", described=operation(None, FileDeleted, ErrorReply))
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file that no open batch reads."""
        await needed(batches).delete_file(tenant_of(request), file_id)
        return json_response(encode(FileDeleted(id=file_id)))

    @router.get("/v1/files/{file_id}/content", described=_CONTENT)
    async def content(request: Request, file_id: str) -> Response:
        """Return the content of a file."""
        service, tenant = needed(batches), tenant_of(request)
        found = await service.file(tenant, file_id)

        async def pieces() -> AsyncIterator[bytes]:
            for offset in range(0, found.bytes, READ_BYTES):
                yield await service.read(tenant, file_id, offset)

        headers = {"content-length": str(found.bytes)}
        return StreamingResponse(pieces(), media_type=JSONL, headers=headers)

    return router


async def _upload(request: Request, service: BatchService) -> FileObject:
    """Read the form of an upload, its file straight to the disk."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise ApiError(
            415,
            "UnsupportedMediaTypeError",
            "a file is sent as a form: Content-Type: multipart/form-data with a boundary, and the "
            "fields purpose and file",
        )
    length = request.headers.get("content-length", "0")
    num_bytes = max(0, int(length[:18]) - FORM_BYTES) if length.isdecimal() else 0
    request.state.in_flight.add_bytes(WRITE_BYTES)
    file = await service.begin_file(tenant_of(request), num_bytes)
    form = _Form(service, file)
    try:
        splitter = FormSplitter(boundary)
        async for piece in request.stream():
            for part in splitter.feed(piece):
                await form.add(part)
        if not splitter.ended:
            raise InvalidRequest("the form ends before its last boundary")
        filename = await form.end()
        words = form.words
        if words.get("purpose") != PURPOSE:
            raise InvalidRequest(f"purpose: must be {PURPOSE!r}", param="purpose")
        kept_s = expiry_of(words.get("expires_after[anchor]"), words.get("expires_after[seconds]"))
        return await service.add_file(file, filename, kept_s)
    finally:
        await service.discard_file(file)


class _Form:
    """The fields of one upload: words in memory, the file in pieces of `WRITE_BYTES`."""

    def __init__(self, service: BatchService, file: NewFile) -> None:
        self._service = service
        self._file = file
        self._field: Head | None = None
        self._filename: str | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.words: dict[str, str] = {}

    async def add(self, part: Head | bytes) -> None:
        """Add a head, or bytes of the field whose head came last."""
        if isinstance(part, Head):
            await self._end_field()
            self._field = part
            if part.name == "file":
                if self._filename is not None:
                    raise InvalidRequest("file: one file is uploaded at a time", param="file")
                self._filename = part.filename or "upload.jsonl"
            return
        self._pieces.append(part)
        self._num_bytes += len(part)
        if self._is_file:
            if self._num_bytes >= WRITE_BYTES:
                await self._write()
        elif self._num_bytes > MAX_WORD_BYTES:
            name = self._field.name if self._field is not None else ""
            raise InvalidRequest(f"{name[:64]}: has more than {MAX_WORD_BYTES} bytes")

    async def end(self) -> str:
        """End the last field; return the name of the file."""
        await self._end_field()
        if self._filename is None:
            raise InvalidRequest("file: is missing in the form", param="file")
        return self._filename

    @property
    def _is_file(self) -> bool:
        return self._field is not None and self._field.name == "file"

    async def _end_field(self) -> None:
        if self._is_file:
            await self._write()
        elif self._field is not None:
            self.words[self._field.name] = b"".join(self._pieces).decode("utf-8", "replace")
        self._field, self._pieces, self._num_bytes = None, [], 0

    async def _write(self) -> None:
        data, self._pieces, self._num_bytes = b"".join(self._pieces), [], 0
        await self._service.write(self._file, data)


MAX_BATCHES = 100


def batch_routes(api_server: ApiServer, batches: BatchService | None) -> Router:
    """Return the routes of batches; without `batches` they say what turns them on."""
    router = Router()

    @router.post("/v1/batches", described=operation(BatchRequest, BatchObject, ErrorReply))
    async def create(request: Request) -> Response:
        """Answer every line of an uploaded file, in the class batch."""
        service = needed(batches)
        check_class(request.scope["state"], Priority.BATCH)
        body = await read_body(request, BatchRequest, api_server)
        key_name = getattr(request.state, "key_name", None)
        made = await service.add_batch(tenant_of(request), key_name, body)
        request.state.is_complete = True  # a repeat with the same Idempotency-Key gets this answer
        return json_response(encode(made))

    @router.get(
        "/v1/batches",
        described=operation(None, BatchList, ErrorReply)
        | {"parameters": [AFTER, limit_parameter(MAX_BATCHES)]},
    )
    async def list_batches(request: Request) -> Response:
        """List the batches of the key's tenant, the newest first."""
        data, has_more = await needed(batches).batches(
            tenant_of(request),
            after=request.query_params.get("after"),
            limit=limit_of(request, 20, MAX_BATCHES),
        )
        ids: list[str | None] = [each.id for each in data]
        ids = ids or [None]
        page = BatchList(data=data, first_id=ids[0], last_id=ids[-1], has_more=has_more)
        return json_response(encode(page))

    @router.get("/v1/batches/{batch_id}", described=operation(None, BatchObject, ErrorReply))
    async def batch(request: Request, batch_id: str) -> Response:
        """Describe one batch: its status, how many lines are answered, its files."""
        return json_response(encode(await needed(batches).batch(tenant_of(request), batch_id)))

    @router.post(
        "/v1/batches/{batch_id}/cancel", described=operation(None, BatchObject, ErrorReply)
    )
    async def cancel(request: Request, batch_id: str) -> Response:
        """End a batch early. Lines without an answer end in its error file."""
        return json_response(encode(await needed(batches).cancel(tenant_of(request), batch_id)))

    return router
