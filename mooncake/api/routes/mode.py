"""The routes by which operators pause a cluster, let its engines sleep, and replace its weights.
vLLM has the same for reinforcement learning. `enable-sleep-mode` opens them. Their body and their
reply are here too.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mooncake.api.api_server import ApiServer
from mooncake.api.backend import GatewayBackend
from mooncake.api.errors import ErrorReply, forbidden, shorten
from mooncake.api.http.request_body import read_body
from mooncake.api.http.response import json_response
from mooncake.api.http.router import Router
from mooncake.api.schema.fields import RequestBody
from mooncake.api.schema.openapi import operation
from mooncake.api.schema.replies import encode
from mooncake.base import InvalidRequest
from mooncake.base.cluster_mode import ClusterMode


class UpdateWeightsRequest(RequestBody):
    """The body of `POST /update_weights`."""

    path: str = Field(min_length=2, max_length=4096, pattern="^/")
    """The directory of the checkpoint on the machines of engines."""


class ModeReply(msgspec.Struct, frozen=True):
    """What operators want of the cluster."""

    is_paused: bool
    is_sleeping: bool
    sleep_level: int
    weights_path: str
    """The directory of the weights; empty: those that the cluster was started with."""
    weights_revision: str
    """The revision of these weights; empty as above."""

    @classmethod
    def of(cls, mode: ClusterMode) -> ModeReply:
        weights = mode.weights
        return cls(
            mode.paused, mode.sleep_level > 0, mode.sleep_level, weights.model, weights.revision
        )


_MODE = "mode", ("abort", "wait"), "What requests that run do: they are ended, or finish."
_LEVEL = "level", ("1", "2"), "1: weights stay in DRAM. 2: they are dropped and loaded again."

_Choice = tuple[str, tuple[str, ...], str]
"""The name of a query parameter, its values with the default first, and what they mean."""


def _parameters(*choices: _Choice) -> dict[str, Any]:
    """Return the parameters of a route for the OpenAPI document."""
    described = [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": meaning,
            "schema": {"type": "string", "enum": list(values), "default": values[0]},
        }
        for name, values, meaning in choices
    ]
    return {"parameters": described}


def _chosen(request: Request, choice: _Choice) -> str:
    """Return the value of a query parameter. Raises InvalidRequest for one that is not there."""
    name, values, _ = choice
    value = request.query_params.get(name, values[0])
    if value not in values:
        raise InvalidRequest(f"{name}: {shorten(value)} is none of {', '.join(values)}", param=name)
    return value


def mode_routes(api_server: ApiServer) -> Router:
    """Return these routes over `api_server`."""
    router = Router()
    described = operation(None, ModeReply, ErrorReply)

    def control(request: Request) -> GatewayBackend:
        """Return what carries out orders. Raises ApiError if the client may not give any."""
        if api_server.control is None or not api_server.config.enable_sleep_mode:
            raise forbidden(
                "this server was started without `enable-sleep-mode`, which its operators need to "
                "pause it, let it sleep and give it other weights"
            )
        if request.headers.get("origin") is not None and not hasattr(request.state, "key_name"):
            raise forbidden("a web page may not do this without an operator's key")
        return api_server.control

    def reply() -> Response:
        assert api_server.control is not None
        return json_response(encode(ModeReply.of(api_server.control.mode)))

    @router.post("/pause", described=described | _parameters(_MODE))
    async def pause(request: Request) -> Response:
        """Take no more requests; they get 503. Answers when none runs any more."""
        aborts = _chosen(request, _MODE) == "abort"
        await control(request).order(lambda to, done: to.pause(done, aborts=aborts))
        return reply()

    @router.post("/resume", described=described)
    async def resume(request: Request) -> Response:
        """Take requests again."""
        await control(request).order(lambda to, done: to.resume(done))
        return reply()

    @router.post("/sleep", described=described | _parameters(_LEVEL, _MODE))
    async def sleep(request: Request) -> Response:
        """Free the memory of all engines. Answers when they sleep; requests get 503 meanwhile."""
        level, aborts = int(_chosen(request, _LEVEL)), _chosen(request, _MODE) == "abort"
        await control(request).order(lambda to, done: to.sleep(level, done, aborts=aborts))
        return reply()

    @router.post("/wake_up", described=described)
    async def wake_up(request: Request) -> Response:
        """Wake all engines. Answers when they can compute again."""
        await control(request).order(lambda to, done: to.wake(done))
        return reply()

    @router.get("/is_sleeping", described=described)
    @router.get("/is_paused", described=described)
    async def mode(request: Request) -> Response:
        """Say whether the cluster is paused and whether its engines sleep."""
        control(request)
        return reply()

    @router.post(
        "/update_weights", described=operation(UpdateWeightsRequest, ModeReply, ErrorReply)
    )
    async def update_weights(request: Request) -> Response:
        """Replace the weights of all engines by those in a directory of their machines. The cluster
        must be paused or asleep. If one engine cannot serve them, all keep what they have.
        """
        orders = control(request)
        body = await read_body(request, UpdateWeightsRequest, api_server)
        await orders.order(lambda to, done: to.update_weights(body.path, done))
        return reply()

    return router
