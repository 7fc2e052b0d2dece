"""Errors have the shape, status and headers that OpenAI clients act on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.api.errors import (
    error_headers,
    error_reply,
    failure_error,
    shorten,
    unknown_field,
    validation_error,
)
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.fields import RequestBody
from mooncake.base import (
    Failure,
    InternalError,
    InvalidRequest,
    MooncakeError,
    Overloaded,
    RequestTimeout,
    Unauthorized,
    Unavailable,
)
from tests.support.api.server import ScriptedBackend, says, tiny_model


def test_shape() -> None:
    error = InvalidRequest("n: too many", param="n")
    assert json.loads(error_reply(error)) == {
        "error": {"message": "n: too many", "type": "BadRequestError", "param": "n", "code": 400}
    }


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (Overloaded("busy", retry_after_s=2.1), {"Retry-After": "3"}),
        (Overloaded("busy", retry_after_s=0.2), {"Retry-After": "1"}),
        (Unavailable("starting"), {"Retry-After": "1"}),
        (Unauthorized("key"), {"WWW-Authenticate": "Bearer"}),
        (InvalidRequest("x"), {}),
    ],
)
def test_headers(error: MooncakeError, headers: dict[str, str]) -> None:
    assert error_headers(error) == headers


def test_failures_of_the_cluster_keep_everything() -> None:
    failure = Failure(status=408, error_type="RequestTimeoutError", message="late", param="timeout")
    error = failure_error(failure)
    assert isinstance(error, RequestTimeout)
    assert (error.http_status, error.error_type) == (408, "RequestTimeoutError")
    assert (error.message, error.param, error.retry_after_s) == ("late", "timeout", None)
    odd = failure_error(Failure(status=599, error_type="Odd", message="x"))
    assert (type(odd), odd.http_status, odd.error_type) == (InternalError, 599, "Odd")


def test_an_unknown_field_is_answered_with_the_nearest_known_one() -> None:
    error = unknown_field("max_token", ["max_tokens", "min_tokens", "top_p"])
    assert (error.param, error.message) == (
        "max_token", "'max_token' is no known field; did you mean max_tokens?",
    )  # fmt: skip
    assert unknown_field("zzz", ["top_p"]).message == "'zzz' is no known field"


def refusal(body: str) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(body)
    return validation_error(caught.value, body.encode())


def test_members_of_unions_do_not_show_in_paths() -> None:
    error = refusal('{"messages": [{"role": "user", "content": [{"type": "text"}, {}]}]}')
    assert error.param == "messages[0].content[1].type"
    assert error.message == "messages[0].content[1].type: field required"


def test_alternatives_are_named_together() -> None:
    error = refusal('{"messages": [{"role": "user"}], "stop": 5}')
    assert error.message == "stop: must be a valid string or a valid array"


def test_first_of_several_wrong_fields_is_named() -> None:
    error = refusal('{"messages": [{"role": "user"}], "top_p": 7, "n": 0}')
    assert error.param in ("top_p", "n")
    assert error.message.count(":") == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[]", "the body must be an object"),
        ("{", "the body is not valid JSON: EOF while parsing an object at line 1 column 1"),
        ('{"messages": []}', "messages: must have at least 1 item"),
    ],
)
def test_what_is_wrong_is_said_once_and_of_something(body: str, message: str) -> None:
    assert refusal(body).message == message


def test_own_rules_speak_plainly() -> None:
    error = refusal('{"messages": [{"role": "user"}], "cache_salt": "a@b"}')
    assert error.message == "cache_salt: must not contain @ / \\ or NUL"


def test_values_of_clients_are_cut() -> None:
    assert shorten("a\nb") == "'a\\nb'"
    assert len(shorten("x" * 10_000)) == 200


def test_only_the_beginning_of_a_long_value_is_spelled_out() -> None:
    """Spelling out a name of 16 MB of control characters would hold the event loop."""

    class Long(str):
        def __repr__(self) -> str:
            raise AssertionError("all of it is spelled out")

    assert shorten(Long("\x7f" * 10_000)) == "'" + "\\x7f" * 49 + "\\x…"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [5] * 50_000},
        {"messages": [{"role": "user"}], "stop_token_ids": ["x"] * 50_000},
        {"messages": [{"role": "user"}], "logit_bias": dict.fromkeys(map(str, range(50_000)), "x")},
        {"messages": [{"role": "user", "content": [{}] * 50_000}]},
        {"messages": [{"role": "user"}], "documents": [5] * 50_000},
        {"messages": [{"role": "user"}], "structured_outputs": {"choice": [5] * 50_000}},
    ],
)
def test_a_body_full_of_errors_is_judged_by_the_first(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate_json(json.dumps(fields))
    assert caught.value.error_count() <= 3


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the lists and the objects of any fields in a core schema of pydantic."""
    if isinstance(node, dict):
        if node.get("type") in ("list", "dict"):
            yield node
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from containers(value)


def bodies(kind: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    yield kind
    for more in kind.__subclasses__():
        yield from bodies(more)


def test_no_field_of_any_body_can_hold_many_errors() -> None:
    """To list 100,000 errors holds Python's lock, and so the event loop, for a second."""
    create_app(ScriptedBackend(says("x")), tiny_model(), ApiConfig())  # imports all bodies
    kinds = {kind.__name__: kind for kind in bodies()}
    assert {"ChatRequest", "ResponsesRequest", "MessagesRequest", "BatchRequest"} <= kinds.keys()
    found = [each for kind in kinds.values() for each in containers(kind.__pydantic_core_schema__)]
    assert len(found) > 50
    for each in found:
        inner = each.get("items_schema" if each["type"] == "list" else "values_schema", {})
        assert each.get("fail_fast") or inner.get("type", "any") == "any", each
