"""Logprobs are spelled in the three shapes that clients know, in JSON's own numbers."""

from __future__ import annotations

import math

import pytest

from mooncake.api.generation import logprobs
from mooncake.api.generation.logprobs import FLOOR, LogprobSpeller
from mooncake.base import TokenLogprobs
from tests.support.api.server import tiny_tokenizer

SPELLER = LogprobSpeller(tiny_tokenizer(), as_ids=False)
BY_ID = LogprobSpeller(tiny_tokenizer(), as_ids=True)
HALF = "你".encode()[0]
"""The id of a token that is a third of a character."""


def test_chat_form_keeps_the_bytes_of_half_characters() -> None:
    entry = TokenLogprobs(-1.0, 2, [(97, -0.5), (HALF, -1.0)])
    [spelled] = SPELLER.chat([HALF], [entry]).content
    assert (spelled.token, spelled.bytes, spelled.logprob) == ("\ufffd", [HALF], -1.0)
    assert [(top.token, top.bytes) for top in spelled.top_logprobs] == [
        ("a", [97]),
        ("\ufffd", [HALF]),
    ]


def test_completion_form_adds_the_sampled_token_to_the_top() -> None:
    entry = TokenLogprobs(-3.0, 9, [(97, -0.5)])
    columns = SPELLER.completion([98], [entry], 5)
    assert columns.top_logprobs == [{"a": -0.5, "b": -3.0}]
    assert columns.text_offset == [5]


def test_prompt_form_has_ranks_and_every_candidate_once() -> None:
    entry = TokenLogprobs(-3.0, 9, [(97, -0.5), (98, -1.0)])
    first, second = SPELLER.by_id([1, 99], [None, entry])
    assert first is None
    assert second is not None
    assert {key: value.rank for key, value in second.items()} == {99: 9, 97: 1, 98: 2}


def test_tokens_by_id() -> None:
    entry = TokenLogprobs(-1.0, 1, [(97, -1.0)])
    assert BY_ID.chat([97], [entry]).content[0].token == "token_id:97"
    assert BY_ID.completion([97], [entry], 0).top_logprobs == [{"token_id:97": -1.0}]


def test_minus_infinity_has_a_stand_in() -> None:
    entry = TokenLogprobs(-math.inf, 5, [(97, math.nan)])
    [spelled] = SPELLER.chat([98], [entry]).content
    assert (spelled.logprob, spelled.top_logprobs[0].logprob) == (FLOOR, FLOOR)


def test_a_token_is_spelled_once_and_few_spellings_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "MAX_SPELLED", 3)
    speller = LogprobSpeller(tiny_tokenizer(), as_ids=False)
    entry = TokenLogprobs(-1.0, 1, [(97, -1.0), (98, -2.0)])
    one, same = speller.chat([97, 97], [entry, entry]).content
    assert one.bytes is same.bytes is one.top_logprobs[0].bytes
    for token in range(60, 90):
        assert speller.chat([token], [entry]).content[0].bytes == [token]
        assert len(speller._spelled) <= 3
