"""What a gateway tells pool nodes that come back about blocks removed meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import Role, WorkerHello, WorkerRef
from mooncake.base.rights import client_id
from mooncake.scheduler.gateway.pool_search import (
    MAX_AWAY,
    MAX_REMOVED,
    MESSAGE_BLOCKS,
    RemovedBlocks,
)

OWN = WorkerRef("gateway", "g1", "inproc://gateway")
CLIENT, OTHER = (
    WorkerRef(client_id(key) + "1", "e", f"tcp://10.0.0.7:1#{key}") for key in ("a" * 64, "b" * 64)
)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def told(removed: RemovedBlocks, name: str) -> list[bytes]:
    """Let a node come; return what it is told."""
    hello = WorkerHello(
        worker=WorkerRef(name, "e1", f"inproc://{name}"), role=Role.KVSTORE, node_id=name,
        host="h", pid=1, layout_fingerprint="test", block_tokens=4, num_blocks=1,
    )  # fmt: skip
    messages = list(removed.missed(hello))
    assert all(message.asker == OWN for message in messages)
    assert all(0 < len(message.keys) <= MESSAGE_BLOCKS for message in messages)
    return [block for message in messages for block in message.keys]


@pytest.fixture
def removed() -> RemovedBlocks:
    return RemovedBlocks(OWN)


def test_a_node_is_told_of_what_it_has_missed_and_of_nothing_else(removed: RemovedBlocks) -> None:
    assert told(removed, "kv-1") == []
    removed.on_removed(keys(1, 2), CLIENT)
    removed.on_lost("kv-1")
    removed.on_removed(keys(3, 4), CLIENT)
    removed.on_removed(keys(2, 5), CLIENT)
    assert told(removed, "kv-1") == keys(3, 4, 2, 5)
    removed.on_lost("kv-1")
    assert told(removed, "kv-1") == []


def test_an_unknown_node_is_told_everything(removed: RemovedBlocks) -> None:
    removed.on_removed(keys(*range(MESSAGE_BLOCKS + 1)), CLIENT)
    assert told(removed, "kv-2") == keys(*range(MESSAGE_BLOCKS + 1)), "in more than one message"


def test_what_is_remembered_is_bounded(removed: RemovedBlocks) -> None:
    for first in range(0, MAX_REMOVED + 1000, 1000):
        removed.on_removed(keys(*range(first, first + 1000)), CLIENT)
    assert len(told(removed, "kv-1")) == MAX_REMOVED
    for number in range(MAX_AWAY + 1):
        removed.on_lost(f"kv-{number}")
    assert told(removed, f"kv-{MAX_AWAY}") == []
    assert len(told(removed, "kv-0")) == MAX_REMOVED, "forgotten when it left: told too much"


def test_a_client_that_removes_much_makes_no_removal_of_others_be_forgotten(
    removed: RemovedBlocks,
) -> None:
    removed.on_removed(keys(1, 2), OTHER)
    for first in range(10, MAX_REMOVED + 1000, 1000):
        removed.on_removed(keys(*range(first, first + 1000)), CLIENT)
    missed = told(removed, "kv-1")
    assert len(missed) == MAX_REMOVED
    assert set(keys(1, 2)) < set(missed)


def test_messages_are_those_of_clients(removed: RemovedBlocks) -> None:
    removed.on_removed(keys(7), CLIENT)
    hello = WorkerHello(
        worker=WorkerRef("kv-1", "e1", "a"), role=Role.KVSTORE, node_id="n", host="h", pid=1,
        layout_fingerprint="test", block_tokens=4, num_blocks=1,
    )  # fmt: skip
    [message] = removed.missed(hello)
    assert msgspec.structs.asdict(message) == {"asker": OWN, "ticket": 0, "keys": keys(7)}
