"""Every field that a POST route takes has a dearest value, so that the walk of all prices
(tests/integration/serve/test_prices.py) leaves none out.
"""

from __future__ import annotations

from typing import Any

from mooncake.api.app import create_app
from mooncake.api.bounds import PRICES
from mooncake.api.config import ApiConfig
from tests.support.api.dearest import ROUTES, rows_of_routes
from tests.support.api.server import ScriptedBackend, says, tiny_model

NOT_WALKED = ("/v1/batches", "/update_weights")
"""Routes that read no text and compute nothing. Batches, and routes whose body is no JSON, have
their bounds in tests/integration/api/test_batches.py; new weights are for operators alone.
"""


def bodies() -> dict[str, set[str]]:
    """Return the fields of each POST route with a JSON body, as the served document lists them."""
    document: dict[str, Any] = create_app(
        ScriptedBackend(says("x")), tiny_model(), ApiConfig()
    ).openapi()
    found: dict[str, set[str]] = {}
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody", {"content": {}})
        content = body["content"].get("application/json")
        if content is not None and path not in NOT_WALKED:
            name = content["schema"]["$ref"].rpartition("/")[2]
            found[path] = set(document["components"]["schemas"][name]["properties"])
    return found


def test_every_field_of_the_document_has_a_dearest_value() -> None:
    declared = {path: set(route.fields) for path, route in ROUTES.items()}
    assert declared == bodies()


def test_every_field_with_a_price_has_a_value_above_its_bound() -> None:
    generating = {path: route for path, route in ROUTES.items() if "count" not in path}
    for path, route in generating.items():
        for name in PRICES.keys() & route.fields.keys():
            assert route.above(name) is not None, f"{path}: {name}"


def test_a_walk_sends_every_row_to_one_of_its_routes_at_least() -> None:
    every = [(path, name) for path, route in ROUTES.items() for name in route.fields]
    assert sorted(rows_of_routes(each=True)) == sorted(every)
    some = [*rows_of_routes(each=False)]
    assert {*some} < {*every}
    sent = {(name, id(ROUTES[path].fields[name])) for path, name in some}
    assert sent == {(name, id(ROUTES[path].fields[name])) for path, name in every}
    assert {path for path, _ in some} == {*ROUTES}
