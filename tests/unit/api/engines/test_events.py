"""Events of engines, cut however the bytes come, and the usage in them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.engines.events import Counted, EventCutter, data_of, error_in

EVENTS = [
    b"data: {}\n\n",
    b": comment\n\n",
    b"event: x\r\ndata: 1\r\ndata: 2\r\n\r\n",
    b"data:a\n\n",
]


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_events_are_the_same_however_they_are_cut(places: list[int]) -> None:
    whole = b"".join(EVENTS) + b"data: unfinished\n"
    bounds = [0, *sorted(place % len(whole) for place in places), len(whole)]
    cutter = EventCutter()
    assert [each for a, b in pairwise(bounds) for each in cutter.feed(whole[a:b])] == EVENTS
    assert cutter.rest() == b"data: unfinished\n"
    assert cutter.num_waiting == len(cutter.rest())


def test_the_data_of_an_event() -> None:
    assert [data_of(each) for each in EVENTS] == [b"{}", b"", b"1\n2", b"a"]


def test_errors_are_told_from_answers() -> None:
    assert error_in(b'{"error": {"message": "dead", "code": 500}}') == "dead"
    assert error_in(b'{"type": "error", "error": "x"}') == "x"
    assert error_in(b'{"choices": [{"delta": {"content": "\\"error\\""}}]}') is None
    assert error_in(b'{"error": null}') is None
    assert error_in(b'{"error"') is None


@pytest.mark.parametrize(
    ("data", "counted", "alone"),
    [
        (
            b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, '
            b'"prompt_tokens_details": {"cached_tokens": 3}}}',
            Counted(5, 2, 3), True,
        ),
        (
            b'{"choices": [{}], "usage": {"prompt_tokens": 5, "completion_tokens": 2, '
            b'"prompt_tokens_details": null}}',
            Counted(5, 2), False,
        ),
        (
            b'{"type": "message_start", "message": {"usage": {"input_tokens": 5, '
            b'"output_tokens": 0, "cache_read_input_tokens": 4}}}',
            Counted(5, 0, 4), False,
        ),
        (b'{"choices": [{"finish_reason":"length"}], "usage": null}',
         Counted(is_length=True), False),
        (b'{"usage": {"prompt_tokens": "5", "completion_tokens": -1}}', Counted(), False),
        (b'{"usage": {"prompt_tokens": 1%s}}' % (b"0" * 400), Counted(), False),
        (b'{"usage": [', Counted(), False),
        (b'["usage"]', Counted(), False),
    ],
)  # fmt: skip
def test_usage_is_read_and_nothing_wrong_is(data: bytes, counted: Counted, alone: bool) -> None:
    found = Counted()
    assert found.take(data) is alone
    assert found == counted
