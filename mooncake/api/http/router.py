"""Routes: which function answers a method at a path, and what the OpenAPI document says about it.

A function takes `request`, if it wants it, and by name what the braces of its path hold.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mooncake import __version__
from mooncake.api.schema.openapi import with_schemas

Answers = Callable[..., Awaitable[Response]]

_BRACES = re.compile(r"{(\w+)(?::\w+)?}")
"""What a request's path has there, with the kind that says whether that may hold slashes."""


class Router:
    """Collects routes."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.paths: dict[str, dict[str, Any]] = {}
        """The `paths` of the OpenAPI document (see `openapi.with_schemas`)."""

    def get(
        self, path: str, described: Mapping[str, Any] | None = None
    ) -> Callable[[Answers], Answers]:
        """Have a function answer GET. `described`: what the OpenAPI document says about it besides
        its name, its docstring and its path; None: the document leaves the route out.
        """
        return self._adding("GET", path, described)

    def post(
        self, path: str, described: Mapping[str, Any] | None = None
    ) -> Callable[[Answers], Answers]:
        """Have a function answer POST; see `get`."""
        return self._adding("POST", path, described)

    def delete(
        self, path: str, described: Mapping[str, Any] | None = None
    ) -> Callable[[Answers], Answers]:
        """Have a function answer DELETE; see `get`."""
        return self._adding("DELETE", path, described)

    def include(self, other: Router) -> None:
        """Take over all routes of `other`."""
        self.routes += other.routes
        for path, operations in other.paths.items():
            self.paths.setdefault(path, {}).update(operations)

    def _adding(
        self, method: str, path: str, described: Mapping[str, Any] | None
    ) -> Callable[[Answers], Answers]:
        def add(answers: Answers) -> Answers:
            route = Route(path, _endpoint(answers), methods=[method])
            route.methods = {method}  # Starlette adds HEAD
            self.routes.append(route)
            if described is not None:
                shown = _BRACES.sub(r"{\1}", path)
                operation = _operation(answers, method, path, described)
                self.paths.setdefault(shown, {})[method.lower()] = operation
            return answers

        return add


class App(Starlette):
    """The ASGI application of a router."""

    def __init__(self, router: Router) -> None:
        super().__init__(routes=router.routes)
        self._paths = router.paths

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return {
            "openapi": "3.1.0",
            "info": {"title": "Mooncake", "version": __version__},
            **with_schemas(self._paths),
        }


def _endpoint(answers: Answers) -> Callable[[Request], Awaitable[Response]]:
    takes_request = "request" in inspect.signature(answers).parameters

    async def endpoint(request: Request) -> Response:
        given = {"request": request} if takes_request else {}
        return await answers(**given, **request.path_params)

    return endpoint


def _operation(
    answers: Answers, method: str, path: str, described: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the document says about a route. Generated clients name their functions by
    `operationId`.
    """
    name = str(getattr(answers, "__name__", ""))
    shown = re.sub(r"\W", "_", name + _BRACES.sub(r"{\1}", path))
    held = [
        {
            "name": each, "in": "path", "required": True,
            "schema": {"type": "string", "title": _title(each)},
        }
        for each in _BRACES.findall(path)
    ]  # fmt: skip
    operation = {
        "summary": _title(name),
        "description": inspect.getdoc(answers) or "",
        "operationId": f"{shown}_{method.lower()}",
        **described,
    }
    if parameters := [*held, *described.get("parameters", [])]:
        operation["parameters"] = parameters
    return operation


def _title(name: str) -> str:
    return name.replace("_", " ").title()
