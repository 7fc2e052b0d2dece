"""Builds the HTTP application in front of other people's engines."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.app import finish_app
from mooncake.api.engines.asked import AT_ANY, GENERATING, Asked
from mooncake.api.engines.proxy import EngineProxy
from mooncake.api.engines.relay import MAX_ATTEMPTS, Relay
from mooncake.api.http.client import RequestFailed
from mooncake.api.http.request_body import read_json
from mooncake.api.http.response import json_response, unless_gone
from mooncake.api.http.router import App, Router
from mooncake.api.routes.operations import operation_routes
from mooncake.base import Clock, IdSource, ModelNotFound, Unavailable
from mooncake.telemetry.events import Recorder


def create_engines_app(
    proxy: EngineProxy, *, ids: IdSource, clock: Clock, recorder: Recorder
) -> Starlette:
    """Return the ASGI application; its `state` is that of `create_app`. Its `watch_loop` also looks
    after the engines.
    """
    router = Router()

    async def generate(request: Request) -> Response:
        asked = await _read(request, proxy)
        asked.count_tokens()
        return Relay(proxy, asked, request.headers)

    async def at_any(request: Request) -> Response:
        asked = await _read(request, proxy)
        return await unless_gone(request, _from_any(proxy, asked, request))

    for path in GENERATING:
        router.post(path)(generate)
    for path in AT_ANY:
        router.post(path)(at_any)

    @router.get("/v1/models")
    async def models() -> Response:
        """List the models of all engines that take requests."""
        return json_response(msgspec.json.encode({"object": "list", "data": proxy.cards()}))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Describe one of these models."""
        for card in proxy.cards():
            if card["id"] == name:
                return json_response(msgspec.json.encode(card))
        raise ModelNotFound(f"The model {name[:200]!r} does not exist here", param="model")

    router.include(operation_routes(proxy))
    app = App(router)
    app.state.batches = None
    finish_app(app, proxy, proxy.config, ids=ids, clock=clock, recorder=recorder)
    watch_loop = app.state.watch_loop

    async def watch() -> None:
        await asyncio.gather(watch_loop(), proxy.watch())

    app.state.watch_loop = watch
    return app


async def _read(request: Request, proxy: EngineProxy) -> Asked:
    if proxy.draining:
        raise proxy.shutting_down()
    body, _ = await read_json(request, proxy.config)
    asked = Asked.of(request.url.path, body)
    state = request.state
    asked.run_as(
        getattr(state, "tenant", ""),
        is_operator=state.is_operator,
        seed=getattr(state, "seed", None),
    )
    return asked


async def _from_any(proxy: EngineProxy, asked: Asked, request: Request) -> Response:
    """Answer by any engine that has the model."""
    tried: list[str] = []
    while True:
        if len(tried) >= MAX_ATTEMPTS:
            raise Unavailable(f"no engine could answer ({len(tried)} tried)")
        url = proxy.fleet.least_loaded(asked.model, tried)
        try:
            with proxy.exchange(url, asked.path, asked.body(), request.headers) as exchange:
                status = await exchange.head()
                body = await exchange.whole()
        except RequestFailed:
            proxy.suspect(url)
            tried.append(url)
            continue
        if status < 500:
            return json_response(body, status)
        tried.append(url)
