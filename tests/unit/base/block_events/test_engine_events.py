"""Block events as other engines send them: the forms of two releases of vLLM, and wrong ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import ProtocolError
from mooncake.base.block_events.engine_events import (
    ClearedBlocks,
    RemovedBlocks,
    StoredBlocks,
    read_engine_events,
)

NAME = b"h" * 32


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 0])


def test_events_are_maps() -> None:
    stored = {
        "type": "BlockStored", "block_hashes": [NAME, 7], "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": [["salt"], None], "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", "session_id": "one",
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}
    found = read_engine_events(batch(stored, removed, {"type": "AllBlocksCleared"}))
    assert found == [
        StoredBlocks(
            block_hashes=[NAME, 7], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2,
            medium="GPU", extra_keys=[["salt"], None], group_idx=0,
        ),
        RemovedBlocks(block_hashes=[7], medium="CPU"),
        ClearedBlocks(),
    ]  # fmt: skip


def test_events_are_lists_as_earlier_releases_send_them() -> None:
    found = read_engine_events(
        batch(
            ["BlockStored", [5], 4, [1, 2], 2, None],
            ["BlockStored", [6], 5, [1, 2], 2, None, "GPU"],
            ["BlockRemoved", [5]],
            ["AllBlocksCleared"],
        )
    )
    assert found == [
        StoredBlocks(block_hashes=[5], parent_block_hash=4, token_ids=[1, 2], block_size=2),
        StoredBlocks(
            block_hashes=[6], parent_block_hash=5, token_ids=[1, 2], block_size=2, medium="GPU"
        ),
        RemovedBlocks(block_hashes=[5]),
        ClearedBlocks(),
    ]


def test_kinds_that_are_not_known_are_left_out() -> None:
    assert read_engine_events(batch({"type": "BlockMoved"}, ["More", 1])) == []
    assert read_engine_events(msgspec.msgpack.encode([1.0, [], 3, "later"])) == []


STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([1.0]),
        b"\x91" * 5000 + b"\xc0",
        batch(7),
        batch([]),
        batch({**STORED, "token_ids": [1]}),
        batch({**STORED, "token_ids": [1, -2]}),
        batch({**STORED, "token_ids": [1, 2**32]}),
        batch({**STORED, "block_size": 0}),
        batch({**STORED, "block_hashes": ["x"]}),
        batch({**STORED, "block_hashes": [b"x" * 1000]}),
        batch({**STORED, "medium": "x" * 1000}),
        batch({"type": "BlockRemoved", "block_hashes": [1], "medium": "x" * 1000}),
        batch({**STORED, "extra_keys": []}),
        batch({"type": "BlockRemoved"}),
    ],
)
def test_what_is_no_batch_is_refused(wrong: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        read_engine_events(wrong)
    assert len(refused.value.message) < 300
