"""The cost of a JSON text is that of its values, however it is written and cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.config import ApiConfig
from mooncake.api.http.request_body import (
    DIGITS_COST,
    ITEM_COST,
    NODE_COST,
    NUM_DIGITS,
    PIECE_CHARS,
    JsonCost,
)

TEXTS = st.text(alphabet='\\",:[]{}\n é你', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS | st.integers(50, 300).map(lambda digits: 10**digits),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


def cost_of(*parts: bytes) -> int:
    cost = JsonCost()
    for part in parts:
        cost.add(part)
    return cost.total


def plain_cost(value: Any) -> int:
    """Return the same from what was parsed."""
    if isinstance(value, int):
        return DIGITS_COST * (len(str(abs(value))) // NUM_DIGITS)
    if not isinstance(value, list | dict):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    num_nodes = 1 + (len(items) if isinstance(value, dict) else 0)
    commas = max(0, len(items) - 1)
    return NODE_COST * num_nodes + ITEM_COST * commas + sum(plain_cost(item) for item in items)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.lists(st.integers(0, 400)))
def test_it_is_exact_at_every_cut(
    value: Any, escaped: bool, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    bounds = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    assert cost_of(*parts) == cost_of(text) == plain_cost(value)


@given(st.lists(VALUES, max_size=3))
def test_texts_in_strings_cost_what_they_hold(values: list[Any]) -> None:
    cost, texts = JsonCost(), [json.dumps(value) for value in values]
    assert sum(cost.texts(texts)) == sum(map(len, texts))
    assert cost.total == sum(map(plain_cost, values))


def test_long_texts_in_strings_are_looked_at_in_pieces() -> None:
    """Looking at 8 MB of quotes as a whole would hold the event loop for a third of a second."""
    pieces = list(JsonCost().texts(['"' * 1_000_000, "é" * 1_000_000]))
    assert sum(pieces) == 3_000_000
    assert max(pieces) <= 2 * PIECE_CHARS


def test_escapes_cut_in_two() -> None:
    text = rb'["\\", "\"[[[", "\\\"[[[", ""]'
    assert json.loads(text)
    every = [text[at : at + 1] for at in range(len(text))]
    assert cost_of(*every) == cost_of(text) == NODE_COST + 3 * ITEM_COST


def test_it_counts_up_to_the_first_mistake() -> None:
    assert cost_of(rb"[1,2,3\"[[[[") >= NODE_COST + 2 * ITEM_COST
    assert cost_of(b'[1,2,"', b"[[[[") == NODE_COST + 2 * ITEM_COST


def test_a_body_of_long_numbers_is_too_large() -> None:
    """These parsed for 0.1 s, and were refused as token ids in 0.4 s, in the event loop."""
    number = b"9" * 4300
    body = b"[" + b",".join([number] * 3800) + b"]"
    assert len(body) <= ApiConfig().max_body_bytes
    assert cost_of(body) > ApiConfig().max_body_cost
    assert cost_of(*(number[at : at + 7] for at in range(0, 4300, 7))) == cost_of(number) > 0
