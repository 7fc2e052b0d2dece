"""Lines of batches: what an input must have, which mistakes are told, what becomes of a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake.api.batches import lines
from mooncake.api.batches.lines import InputChecker, TextLine, check_line, read_line
from mooncake.base import InvalidRequest, Unauthorized

CHAT = "/v1/chat/completions"


def text(**changes: Any) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"max_tokens": 3}}
    return json.dumps(fields | changes).encode()


def checked(*texts: bytes | None, max_lines: int = 10) -> list[tuple[str, int | None]]:
    checker = InputChecker(CHAT, max_lines, 1000)
    checker.check(TextLine(number, each) for number, each in enumerate(texts, 1))
    return [(each.code, each.line) for each in checker.end()]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (b"{", "not a request of a batch"),
        (b"[]", "not a request of a batch"),
        (b"\xff", "not a request of a batch"),
        (b'{"custom_id": ' + b"[" * 100_000, "not a request of a batch"),
        (text(custom_id=1), "custom_id"),
        (text(body=[]), "body"),
        (text(custom_id=""), "custom_id"),
        (text(custom_id="x" * 513), "custom_id"),
        (text(method="GET"), "method"),
        (text(url="/v1/completions"), "url"),
        (text(body={"stream": True}), "body.stream"),
    ],
)
def test_a_wrong_line_is_refused_by_name(wrong: bytes, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_line(read_line(wrong), CHAT)


def test_a_right_line_is_taken() -> None:
    check_line(read_line(text(body={"stream": False}, more=1)), CHAT)
    check_line(read_line(text(body={"stream": None})), CHAT)


def test_mistakes_have_the_numbers_of_their_lines() -> None:
    assert checked(text(), text(custom_id="b")) == []
    assert checked() == [("empty_file", None)]
    assert checked(b"{", text(), None) == [("invalid_request", 1), ("invalid_request", 3)]
    assert checked(text(), text(custom_id="b"), text()) == [("duplicate_custom_id", 3)]


def test_the_first_hundred_mistakes_are_told() -> None:
    assert len(checked(*[b"{"] * 150, max_lines=1000)) == lines.MAX_ERRORS


def test_more_lines_than_a_batch_may_have_are_one_mistake() -> None:
    many = [text(custom_id=str(at)) for at in range(11)]
    assert checked(*many[:10]) == []
    assert checked(*many) == [("too_many_lines", None)]


def test_a_body_is_sent_in_the_class_batch_whatever_it_asks_for() -> None:
    body = {"priority": "premium", "service_tier": "priority", "n": 2, "text": "\u00e4"}
    sent = json.loads(lines.request_body(read_line(text(body=body))))
    assert sent == {"n": 2, "text": "\u00e4", "priority": "batch"}


def test_results_are_lines_of_openai() -> None:
    good = lines.answered("batch_1f", 7, "mine", 200, b'{"choices":\n[]}')
    assert (good.line, good.is_error, good.code) == (7, False, "")
    assert b"\n" not in good.text
    assert json.loads(good.text) == {
        "id": "batch_req_1f_7", "custom_id": "mine", "error": None,
        "response": {
            "status_code": 200, "request_id": "batch_req_1f_7", "body": {"choices": []}
        },
    }  # fmt: skip
    bad = lines.failed("batch_1f", 8, "mine", Unauthorized("no"))
    assert bad.is_error
    assert json.loads(bad.text)["response"]["status_code"] == 401
    none = lines.not_answered("batch_1f", 9, "mine", lines.EXPIRED)
    assert (none.is_error, none.code) == (True, "batch_expired")
    assert json.loads(none.text)["response"] is None
    assert json.loads(none.text)["error"]["code"] == "batch_expired"


def test_an_answer_without_a_body_is_still_a_line() -> None:
    assert json.loads(lines.answered("b", 1, "mine", 500, b"").text)["response"]["body"] is None
