"""A peer that refused is asked again by one request at a time; the others hear what it said."""

from __future__ import annotations

import pytest

from mooncake.transfer.net.directory import MAX_REMEMBERED, PROBE_S, PeerHealth
from mooncake.transfer.net.retries import BreakerLimits

KEY = ("10.0.0.7:4301", "engine-7")
LIMITS = BreakerLimits(first_s=1.0, longest_s=4.0)


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.health = PeerHealth(LIMITS, lambda: self.now)

    def fail(self, reason: str = "wrong cluster secret") -> None:
        """Let one attempt through, which must be, and fail."""
        assert self.health.refusal(KEY) is None
        self.health.failed(KEY, reason)


@pytest.fixture
def world() -> World:
    return World()


def test_a_peer_that_has_not_failed_is_always_asked(world: World) -> None:
    assert [world.health.refusal(KEY) for _ in range(3)] == [None] * 3
    world.health.unknown(KEY)
    world.health.reached(KEY)
    assert world.health.refusal(KEY) is None


def test_one_request_finds_out_and_the_others_are_told_why_not(world: World) -> None:
    world.fail("wrong cluster secret")
    assert world.health.refusal(KEY) is None, "the first time it may be tried again at once"
    assert world.health.refusal(KEY) == "wrong cluster secret", "while that one finds out"
    assert world.health.refusal(("10.0.0.8:4301", "engine-7")) is None
    world.health.failed(KEY, "version 1 is not 2")
    assert world.health.refusal(KEY) == "version 1 is not 2"
    world.now += 1.0
    assert world.health.refusal(KEY) is None
    world.health.reached(KEY)
    assert [world.health.refusal(KEY) for _ in range(3)] == [None] * 3


def test_it_is_asked_ever_more_seldom_and_never_given_up(world: World) -> None:
    world.fail()
    world.fail()
    for rest_s in (1.0, 2.0, 4.0, 4.0, 4.0):
        world.now += rest_s - 0.01
        assert world.health.refusal(KEY) is not None
        world.now += 0.01
        world.fail()
    world.now += 4.0
    assert world.health.refusal(KEY) is None
    world.health.reached(KEY)
    world.fail()
    assert world.health.refusal(KEY) is None, "what was before is forgotten"


def test_an_attempt_that_says_nothing_leaves_the_next_one_to_find_out(world: World) -> None:
    world.fail()
    assert world.health.refusal(KEY) is None
    world.health.unknown(KEY)
    assert world.health.refusal(KEY) is None
    assert world.health.refusal(KEY) is not None


def test_an_attempt_of_which_nothing_is_heard_does_not_stand_for_ever(world: World) -> None:
    world.fail()
    assert world.health.refusal(KEY) is None
    world.now += PROBE_S - 0.01
    assert world.health.refusal(KEY) is not None
    world.now += 0.01
    assert world.health.refusal(KEY) is None
    assert world.health.refusal(KEY) is not None


def test_what_is_remembered_is_bounded(world: World) -> None:
    for number in range(MAX_REMEMBERED + 1):
        for _ in range(2):
            world.health.failed((f"10.0.0.7:{number}", "engine"), "it does not answer")
    assert world.health.refusal(("10.0.0.7:0", "engine")) is None
    assert world.health.refusal(("10.0.0.7:1", "engine")) == "it does not answer"
