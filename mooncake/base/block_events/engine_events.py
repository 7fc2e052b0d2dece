"""Block events of other engines, as vLLM publishes them: parsed and checked. Holds no state."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from mooncake.base.errors import ProtocolError

BlockName = int | Annotated[bytes, msgspec.Meta(max_length=128)]
"""How an engine names a block: its hash, or the last 64 bits of it."""
Medium = Annotated[str, msgspec.Meta(max_length=128)]
"""Where an engine holds a block, such as "GPU"."""


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that the engine can reuse from now on, each behind the one before."""

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None = None
    """The name of the block before the first; None: there is none."""
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    """The tokens of all blocks, `block_size` each."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    medium: Medium | None = None
    extra_keys: list[list[Any] | None] | None = None
    """What the hash of each block covers besides tokens, such as a salt. None: nothing, or the
    engine does not tell.
    """
    group_idx: int | None = None


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that this medium of the engine does not hold any more."""

    block_hashes: list[BlockName]
    medium: Medium | None = None
    group_idx: int | None = None


class ClearedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The engine holds no block any more."""


EngineEvent = StoredBlocks | RemovedBlocks | ClearedBlocks

_KINDS: dict[str, type[EngineEvent]] = {
    "BlockStored": StoredBlocks, "BlockRemoved": RemovedBlocks, "AllBlocksCleared": ClearedBlocks,
}  # fmt: skip
_IN_ORDER = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""The fields of events that are lists: earlier releases of vLLM send such, the tag first."""


def read_engine_events(batch: bytes) -> list[EngineEvent]:
    """Return the events of one batch: msgpack `[time, events, ...]`. Kinds of events that are not
    known are left out.

    Raises:
        ProtocolError: it is no such batch; the message says what is wrong.
    """
    try:
        found = msgspec.msgpack.decode(batch)
        if not (isinstance(found, list) and len(found) > 1 and isinstance(found[1], list)):
            raise ProtocolError("a batch of block events is not a list of a time and events")
        read = [_event(each) for each in found[1]]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a batch of block events cannot be read: {error}") from None
    return [event for event in read if event is not None]


def _event(found: Any) -> EngineEvent | None:
    if isinstance(found, list) and found and isinstance(found[0], str):
        kind = found[0]
        fields = dict(zip(_IN_ORDER.get(kind, ()), found[1:], strict=False))
    elif isinstance(found, dict):
        kind = str(found.get("type"))
        fields = found
    else:
        raise ProtocolError("a block event is neither a list nor a map")
    if kind not in _KINDS:
        return None
    event = msgspec.convert(fields, _KINDS[kind])
    if isinstance(event, StoredBlocks):
        _check(event)
    return event


def _check(event: StoredBlocks) -> None:
    if len(event.token_ids) != event.block_size * len(event.block_hashes):
        raise ProtocolError(
            f"{len(event.block_hashes)} blocks of {event.block_size} tokens come with "
            f"{len(event.token_ids)} tokens"
        )
    if event.extra_keys is not None and len(event.extra_keys) != len(event.block_hashes):
        raise ProtocolError("the extra keys of a block event are not one for each block")
