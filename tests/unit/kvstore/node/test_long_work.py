"""A message about many blocks is worked on in pieces, and other peers are served between them."""

from __future__ import annotations

import pytest

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
from mooncake.kvstore.node.long_work import MAX_BEGUN, PIECE_KEYS, LongWork
from tests.support.kvstore.node_world import NodeWorld, keys, worker

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


def test_work_is_bounded_and_each_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest is finished at once."""
    monkeypatch.setattr(long_work, "PIECE_KEYS", 2)
    work, seen, ended = LongWork(), list[bytes](), list[int]()
    for number in range(MAX_BEGUN + 1):
        work.begin(
            keys(*range(5)), lambda part, _: seen.extend(part),
            lambda _, number=number: ended.append(number), 1.0,
        )  # fmt: skip
    assert ended == [0]
    while work.tick(1.0) is not None:
        pass
    assert ended == list(range(MAX_BEGUN + 1))
    assert len(seen) == 5 * (MAX_BEGUN + 1)
    assert work.quiet


def test_a_question_about_nothing_is_answered_at_once() -> None:
    world = NodeWorld(num_blocks=2)
    world.handle(FindBlocks(asker=READER, ticket=1, keys=[]))
    assert [answer.ticket for answer in answers(world)] == [1]
