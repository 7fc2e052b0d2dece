"""A sequence's view of its tokens, its block keys, and when a request is over."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.base import pack_tokens
from mooncake.base.blocks import block_keys
from mooncake.base.request import FinishInfo, FinishReason, request_finish
from mooncake.engine.sequence import Sequence
from tests.support.engine.engines import request

STOPPED_BY_9 = FinishInfo(reason=FinishReason.STOP, stop_token_id=9)
LENGTH = FinishInfo(reason=FinishReason.LENGTH)


def test_tokens_are_prompt_then_output() -> None:
    sequence = Sequence(1, request([1, 2, 3]), output_tokens=[4, 5])
    assert sequence.num_tokens == 5
    for start in range(6):
        for stop in range(start, 6):
            assert sequence.tokens_between(start, stop) == [1, 2, 3, 4, 5][start:stop]


def test_wants_what_the_request_wants_unless_told() -> None:
    assert Sequence(1, request([1], max_tokens=7)).max_new_tokens == 7
    assert Sequence(1, request([1], max_tokens=7), max_new_tokens=1).max_new_tokens == 1
    assert Sequence(1, request([1, 2], max_tokens=7)).num_final_computed == 8


@pytest.mark.parametrize(("tenant", "salt"), [("", ""), ("t", ""), ("", "s")])
def test_keys_grow_with_the_tokens_and_equal_those_made_at_once(tenant: str, salt: str) -> None:
    order = request([1, 2, 3], tenant=tenant)
    order = type(order)(
        request_id="r",
        prompt=pack_tokens(order.prompt_tokens),
        sampling=order.sampling,
        tenant=tenant,
        cache_salt=salt,
    )
    sequence = Sequence(1, order)
    for token in range(4, 30):
        tokens = sequence.tokens_between(0, sequence.num_tokens)
        assert sequence.extend_keys("fp", 4) == block_keys("fp", tokens, 4, tenant, salt)
        sequence.output_tokens.append(token)


def test_dropping_the_kv_keeps_the_tokens() -> None:
    sequence = Sequence(1, request([1, 2]), output_tokens=[3], pages=[5, 6], num_computed=2)
    assert sequence.drop_kv() == [5, 6]
    assert (sequence.pages, sequence.num_computed, sequence.num_missing) == ([], 0, 3)


def test_prompt_logprobs_are_collected_by_the_first_attempt_only() -> None:
    order = request([1, 2], num_prompt_logprobs=0)
    assert Sequence(1, order).prompt_logprobs == [None]
    assert Sequence(1, order, output_tokens=[9]).prompt_logprobs is None
    assert Sequence(1, request([1, 2])).prompt_logprobs is None


@pytest.mark.parametrize(
    ("outputs", "settings", "max_model_len", "want"),
    [
        ([5], {}, 100, None),
        ([5, 6, 7, 8], {}, 100, LENGTH),
        ([5, 9], {"stop_token_ids": frozenset({9})}, 100, STOPPED_BY_9),
        ([9, 5], {"stop_token_ids": frozenset({9})}, 100, None),
        ([5, 6, 7, 9], {"stop_token_ids": frozenset({9})}, 100, STOPPED_BY_9),
        ([5, 9], {"stop_token_ids": frozenset({9}), "min_tokens": 2}, 100, None),
        ([5, 6, 9], {"stop_token_ids": frozenset({9}), "min_tokens": 2}, 100, STOPPED_BY_9),
        ([5, 6], {}, 4, LENGTH),
        ([5, 6], {}, 5, None),
        ([], {"stop_token_ids": frozenset({9})}, 100, None),
    ],
)
def test_when_a_request_is_over(
    outputs: list[int],
    settings: dict[str, Any],
    max_model_len: int,
    want: FinishInfo | None,
) -> None:
    order = request([1, 2], max_tokens=4, **settings)
    assert request_finish(order, outputs, max_model_len) == want
