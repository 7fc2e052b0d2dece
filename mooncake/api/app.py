"""Builds the HTTP application: routes, middleware, errors, the OpenAPI document."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mooncake.api.api_server import ApiServer
from mooncake.api.backend import Backend, GatewayBackend
from mooncake.api.batches.in_process import ask
from mooncake.api.batches.service import BatchService
from mooncake.api.config import ApiConfig
from mooncake.api.errors import ApiError
from mooncake.api.http.access import RECEIPT, Access, Keyring, unlimited_keys
from mooncake.api.http.event_loop import watch_loop
from mooncake.api.http.repeats import REPLAYED
from mooncake.api.http.response import ErrorResponse
from mooncake.api.http.router import App, Router
from mooncake.api.http.tracing import AccessLog, Tracing
from mooncake.api.model import ServedModel
from mooncake.api.routes.files import batch_routes, file_routes
from mooncake.api.routes.generation import generation_routes
from mooncake.api.routes.mode import mode_routes
from mooncake.api.routes.models import model_routes
from mooncake.api.routes.operations import operation_routes
from mooncake.api.routes.page import page_routes
from mooncake.api.routes.receipts import receipt_routes
from mooncake.api.running_calls import Serving
from mooncake.base import (
    Clock,
    IdSource,
    InternalError,
    MonotonicClock,
    MooncakeError,
    SystemIds,
)
from mooncake.telemetry.events import BatchesSeen, Recorder, Recorders
from mooncake.telemetry.health import Vitals
from mooncake.telemetry.receipts import Receipts
from mooncake.telemetry.traces import Tracer

_log = logging.getLogger(__name__)

_ERROR_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError"}


_ROUTES = (
    generation_routes, model_routes, receipt_routes, operation_routes, mode_routes, page_routes,
)  # fmt: skip


def create_app(
    backend: Backend,
    model: ServedModel,
    config: ApiConfig,
    *,
    ids: IdSource | None = None,
    clock: Clock | None = None,
    recorder: Recorder | None = None,
    recent: Callable[[], Any] | None = None,
    vitals: Callable[[], Sequence[Vitals]] | None = None,
    tracer: Tracer | None = None,
    receipts: Receipts | None = None,
    control: GatewayBackend | None = None,
) -> App:
    """Return the ASGI application.

    Its `state.api_server` is the `ApiServer` (which explains `recent`, `vitals`, `receipts` and
    `control`), its `state.keyring` the `Keyring`, its `state.batches` the `BatchService`, if
    `config` has a directory for it. `recorder` gets an event, timed by `clock`, for every request
    that a key's limit refuses or that has no valid key, and for each hold of the event loop.
    `tracer` chooses the calls that are traced; it gets the events of `backend`.
    """
    clock = clock or MonotonicClock()
    ids = ids or SystemIds()
    api_server = ApiServer(
        backend,
        model,
        config,
        ids=ids,
        recent=recent,
        vitals=vitals,
        receipts=receipts,
        control=control,
    )
    recorder = recorder or Recorders()
    batches = None
    if config.batch_dir is not None:
        seen = partial(_record_batches, recorder, clock)
        batches = BatchService(
            api_server, Path(config.batch_dir), ask=lambda *asked: ask(app, *asked), seen=seen
        )
    router = Router()
    for routes in _ROUTES:
        router.include(routes(api_server))
    router.include(file_routes(batches))
    router.include(batch_routes(api_server, batches))
    app = App(router)
    app.state.batches = batches
    if tracer is not None:
        app.add_middleware(Tracing, tracer=tracer, clock=clock, model_name=api_server.names[0])
    finish_app(app, api_server, config, ids=ids, clock=clock, recorder=recorder)
    return app


def finish_app(
    app: Starlette,
    serving: Serving,
    config: ApiConfig,
    *,
    ids: IdSource,
    clock: Clock,
    recorder: Recorder,
) -> None:
    """Put around the routes of `app` what every API server has: errors as clients expect them, keys
    and their limits, web origins, a log of requests. `serving` becomes `app.state.api_server`.
    """
    app.state.api_server = serving
    app.state.watch_loop = lambda: watch_loop(clock, recorder, lambda: serving.num_calls)
    app.state.keyring = keyring = Keyring(unlimited_keys(config.api_keys), config.keys)
    app.add_exception_handler(MooncakeError, _on_mooncake_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)
    app.add_middleware(
        Access,
        keyring=keyring,
        ids=ids,
        clock=clock,
        recorder=recorder,
        config=config,
    )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", REPLAYED, RECEIPT],
        )
    if config.access_log:
        app.add_middleware(AccessLog, clock=clock)  # the last one added is the outermost
    # Starlette would make all this when the first request comes, which would wait for it.
    app.middleware_stack = app.build_middleware_stack()


def _record_batches(
    recorder: Recorder, clock: Clock, num_batches: int, num_asked: int, num_left: int
) -> None:
    recorder.record(
        BatchesSeen(
            at_s=clock.now(),
            num_batches=num_batches,
            num_lines_asked=num_asked,
            num_lines_left=num_left,
        )
    )


async def _on_mooncake_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, MooncakeError)
    return ErrorResponse(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _ERROR_TYPES.get(error.status_code, "BadRequestError")
    message = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code in _ERROR_TYPES and request.app.state.api_server.config.docs:
        message += "; /docs shows what there is"
    response = ErrorResponse(ApiError(error.status_code, kind, message))
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=499)  # the client is gone and does not read it


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ErrorResponse(InternalError("the server failed on this request; its log says why"))
