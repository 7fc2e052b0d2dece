"""A message about many blocks is worked on in pieces, and other peers are served between them."""

from __future__ import annotations

import pytest

from mooncake.base.messages import Refused
from mooncake.base.pool_messages import (
    BlocksDescribed,
    BlocksFound,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    LastingPin,
    PinsSet,
    RemoveBlocks,
    SetPins,
)
from mooncake.base.rights import MAX_KEYS
from mooncake.kvstore.node import long_work
from mooncake.kvstore.node.long_work import MAX_BEGUN, PIECE_KEYS
from tests.support.kvstore.node_world import NodeWorld, keys, worker
from tests.support.kvstore.senders import CLIENT

WRITER, READER, OTHER = worker("prefill-0"), worker("decode-0"), worker("decode-1")
EVERY = keys(*range(MAX_KEYS))
NUM_PIECES = MAX_KEYS // PIECE_KEYS

Answer = BlocksFound | BlocksDescribed | PinsSet | BlocksRemoved
QUESTIONS = {
    "find": FindBlocks(asker=READER, ticket=1, keys=EVERY),
    "describe": DescribeBlocks(asker=READER, ticket=1, keys=EVERY),
    "pin": SetPins(asker=READER, ticket=1, keys=EVERY, pin=LastingPin.SOFT),
    "remove": RemoveBlocks(asker=READER, ticket=1, keys=EVERY),
}


def answers(world: NodeWorld) -> list[Answer]:
    return [sent for _, sent in world.channel.sent if isinstance(sent, Answer)]


@pytest.mark.parametrize("kind", QUESTIONS)
def test_the_longest_question_is_answered_in_pieces(kind: str) -> None:
    """It held up all others for up to 0.3 s."""
    world = NodeWorld(num_blocks=2)
    world.put(WRITER, keys(0, 1))
    world.handle(QUESTIONS[kind])
    assert not world.node.quiet
    for _ in range(NUM_PIECES - 1):
        assert answers(world) == []
        world.node.tick(world.now)
    assert world.node.quiet
    [answer] = answers(world)
    match answer:
        case BlocksFound(tiers=tiers):
            assert (len(tiers), sum(tier is not None for tier in tiers)) == (MAX_KEYS, 2)
        case BlocksDescribed(copies=copies):
            assert (len(copies), sum(map(bool, copies))) == (MAX_KEYS, 2)
        case PinsSet(done=done):
            assert (len(done), sum(done)) == (MAX_KEYS, 2)
        case BlocksRemoved(removed=removed):
            assert (len(removed), sum(removed)) == (MAX_KEYS, 2)


def test_a_short_question_is_answered_before_a_long_one_that_came_first() -> None:
    world = NodeWorld(num_blocks=2)
    world.handle(QUESTIONS["find"])
    assert world.node.tick(world.now) == world.now, "more is due at once"
    world.handle(FindBlocks(asker=OTHER, ticket=2, keys=keys(1)))
    assert [answer.ticket for answer in answers(world)] == [2]


def test_a_block_that_comes_while_a_removal_is_under_way_is_told_of_once() -> None:
    """The removal is answered once all its blocks have been looked at, though none is left that a
    disk has to erase.
    """
    world = NodeWorld(num_blocks=2)
    world.handle(QUESTIONS["remove"])
    world.put(WRITER, keys(MAX_KEYS - 1))
    while not world.node.quiet:
        world.tick(world.now)
    [answer] = answers(world)
    assert isinstance(answer, BlocksRemoved)
    assert answer.removed == [*[False] * (MAX_KEYS - 1), True]


def test_work_is_bounded_for_each_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a message is refused, and nothing is done for it. A short one is not."""
    monkeypatch.setattr(long_work, "PIECE_KEYS", 2)
    world = NodeWorld(num_blocks=8)
    world.put(WRITER, keys(*range(5)))
    for ticket in range(MAX_BEGUN):
        world.handle(FindBlocks(asker=CLIENT, ticket=ticket, keys=keys(*range(5))))
    assert answers(world) == []
    for kind in (FindBlocks, DescribeBlocks, RemoveBlocks):
        world.handle(kind(asker=CLIENT, ticket=900, keys=keys(*range(5))))
    world.handle(SetPins(asker=CLIENT, ticket=900, keys=keys(*range(5)), pin=LastingPin.HARD))
    refused = [sent for _, sent in world.channel.sent if isinstance(sent, Refused)]
    assert [each.message for each in refused] == [
        "FindBlocks", "DescribeBlocks", "RemoveBlocks", "SetPins",
    ]  # fmt: skip
    assert {(each.asker, each.ticket) for each in refused} == {(CLIENT, 900)}
    assert "64 earlier messages are being worked on: try again" in refused[0].reason
    world.handle(FindBlocks(asker=CLIENT, ticket=901, keys=keys(1)))
    world.handle(FindBlocks(asker=OTHER, ticket=902, keys=keys(*range(5))))
    while not world.node.quiet:
        world.node.tick(world.now)
    assert [answer.ticket for answer in answers(world)] == [901, *range(MAX_BEGUN), 902]
    assert all(world.node.stores(key) for key in keys(*range(5))), "no removal has begun"
    world.handle(FindBlocks(asker=CLIENT, ticket=903, keys=keys(*range(5))))
    while not world.node.quiet:
        world.node.tick(world.now)
    assert answers(world)[-1].ticket == 903, "there is room again"


def test_a_question_about_nothing_is_answered_at_once() -> None:
    world = NodeWorld(num_blocks=2)
    world.handle(FindBlocks(asker=READER, ticket=1, keys=[]))
    assert [answer.ticket for answer in answers(world)] == [1]
