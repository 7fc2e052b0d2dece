"""Policies are coroutines that await calls: each is answered once, whoever answers and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mooncake.base import MooncakeError, Unavailable
from mooncake.kvstore.client.calls import Call, run, together


class Asked:
    """Calls that wait until the test answers them."""

    def __init__(self) -> None:
        self.open: list[Callable[[int], None]] = []
        self.ended: list[object] = []

    def call(self) -> Call[int]:
        return Call(self.open.append)


def test_a_policy_goes_on_with_each_answer_and_ends_once() -> None:
    asked = Asked()

    async def policy() -> int:
        return await asked.call() + await asked.call()

    run(policy(), asked.ended.append)
    asked.open.pop()(3)
    assert asked.ended == []
    asked.open.pop()(4)
    assert asked.ended == [7]


def test_calls_that_are_answered_at_once_need_no_second_event() -> None:
    ended: list[object] = []

    async def policy() -> int:
        return sum([await Call[int](lambda done: done(1)) for _ in range(3)])

    run(policy(), ended.append)
    assert ended == [3]


def test_calls_together_are_answered_in_their_order() -> None:
    asked = Asked()

    async def policy() -> list[int]:
        return await together([asked.call(), asked.call()]) + await together([])

    run(policy(), asked.ended.append)
    first, second = asked.open
    second(2)
    assert asked.ended == []
    first(1)
    assert asked.ended == [[1, 2]]


@pytest.mark.parametrize("after_a_call", [False, True])
def test_an_error_on_purpose_is_the_answer_and_any_other_is_raised(after_a_call: bool) -> None:
    asked = Asked()

    async def policy(error: Exception) -> None:
        if after_a_call:
            await asked.call()
        raise error

    def end(error: Exception) -> None:
        run(policy(error), asked.ended.append)
        if after_a_call:
            asked.open.pop()(0)

    end(Unavailable("no node"))
    [answer] = asked.ended
    assert isinstance(answer, MooncakeError)
    with pytest.raises(ValueError, match="a wrong place"):
        end(ValueError("a wrong place"))
