"""Routes call functions with what they ask for, and the OpenAPI document says what there is."""

from __future__ import annotations

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from mooncake.api.http.router import App, Router


class Reply(msgspec.Struct):
    count: int


@pytest.fixture(scope="module")
def app() -> App:
    router, more = Router(), Router()

    @router.get("/things/{thing_id}", {"responses": {}, "parameters": [{"name": "long"}]})
    async def one_thing(request: Request, thing_id: str) -> Response:
        """Return a thing.

        It may be long.
        """
        return PlainTextResponse(f"{request.method} {thing_id}")

    @router.delete("/things/{thing_id}", {"responses": {"200": {"schema": Reply}}})
    async def remove(thing_id: str) -> Response:
        return PlainTextResponse(f"removed {thing_id}")

    @more.post("/names/{name:path}/end", {"responses": {}})
    async def name(name: str) -> Response:
        return PlainTextResponse(name)

    @more.get("/hidden")
    async def hidden() -> Response:
        return PlainTextResponse("here")

    router.include(more)
    return App(router)


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [
        ("GET", "/things/a%20b", "GET a b"),
        ("DELETE", "/things/4", "removed 4"),
        ("POST", "/names/moonshotai/Kimi-K2/end", "moonshotai/Kimi-K2"),
        ("GET", "/hidden", "here"),
    ],
)
def test_a_function_gets_what_it_asks_for(app: App, method: str, path: str, answer: str) -> None:
    assert TestClient(app).request(method, path).text == answer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("HEAD", "/hidden", 405), ("POST", "/things/4", 405), ("GET", "/things/4/5", 404)],
)
def test_nothing_else_is_answered(app: App, method: str, path: str, status: int) -> None:
    assert TestClient(app).request(method, path).status_code == status


def test_the_document_says_what_there_is(app: App) -> None:
    document = app.openapi()
    held = {"name": "thing_id", "in": "path", "required": True}
    schema = {"type": "string", "title": "Thing Id"}
    assert document["paths"] == {
        "/things/{thing_id}": {
            "get": {
                "summary": "One Thing",
                "description": "Return a thing.\n\nIt may be long.",
                "operationId": "one_thing_things__thing_id__get",
                "parameters": [{**held, "schema": schema}, {"name": "long"}],
                "responses": {},
            },
            "delete": {
                "summary": "Remove",
                "description": "",
                "operationId": "remove_things__thing_id__delete",
                "parameters": [{**held, "schema": schema}],
                "responses": {"200": {"schema": {"$ref": "#/components/schemas/Reply"}}},
            },
        },
        "/names/{name}/end": {
            "post": {
                "summary": "Name",
                "description": "",
                "operationId": "name_names__name__end_post",
                "parameters": [
                    {"name": "name", "in": "path", "required": True,
                     "schema": {"type": "string", "title": "Name"}}
                ],
                "responses": {},
            }
        },
    }  # fmt: skip
    assert set(document["components"]["schemas"]) == {"Reply"}
