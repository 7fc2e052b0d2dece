"""Publishes block events for routers outside the cluster. A block is published as stored, with its
tokens, when the first worker holds it in a kind of memory. It is published as removed when no
worker does any more.

Workers report keys and requests have tokens; this module joins the two. Pure, except for `publish`.
After a loss or a snapshot all blocks are in doubt: `tick` checks some of them at a time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mooncake.base import BlockEvents, BlockKey, Tier, unpack_tokens
from mooncake.base.block_events.kv_events import BlockRemoved, BlockStored, KvEvent
from mooncake.kvstore.index.prefix_index import Replica

MAX_BLOCKS = 262_144
"""Blocks whose tokens are kept; the ones not used for longest are reported as removed."""
DOUBTS_A_TICK = 2048
"""Blocks in doubt that are checked at a time; requests wait meanwhile."""
MEDIA = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.SSD: "STORAGE", Tier.OBJECT: "OBJECT"}
_Place = tuple[BlockKey, Tier]


class _Known(NamedTuple):
    parent: BlockKey | None
    tokens: bytes
    """The tokens, packed. A view into the request's own memory would keep all of that memory."""


class BlockFeed:
    """The blocks of the requests that pass this gateway, and what was published about them."""

    def __init__(
        self,
        replicas: Callable[[BlockKey], Sequence[Replica]],
        publish: Callable[[Sequence[KvEvent]], None],
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._replicas = replicas
        self._publish = publish
        self._max_blocks = max_blocks
        self._known: OrderedDict[BlockKey, _Known] = OrderedDict()
        self._told: dict[BlockKey, set[Tier]] = {}
        self._doubted: dict[BlockKey, None] = {}

    def learn(
        self, keys: Sequence[BlockKey], tokens: Callable[[], memoryview[int]], block_tokens: int
    ) -> None:
        """Learn the full blocks of a request. `tokens` returns the tokens of prompt and output so
        far; it is called only if a block is new.
        """
        whole: memoryview[int] | None = None
        new = []
        for index, key in enumerate(keys):
            if key in self._known:
                self._known.move_to_end(key)
                continue
            parent = keys[index - 1] if index else None
            whole = tokens() if whole is None else whole
            begin = index * block_tokens
            self._known[key] = _Known(parent, whole[begin : begin + block_tokens].tobytes())
            new.append(key)
        gone: list[_Place] = []
        while len(self._known) > self._max_blocks:
            key, _ = self._known.popitem(last=False)
            gone += [(key, tier) for tier in sorted(self._told.pop(key, ()))]
        self._tell(new, gone)

    def on_blocks(self, events: BlockEvents) -> None:
        """Check the blocks that a worker reports, after the Conductor has applied the report."""
        if events.snapshot:
            self.doubt_all()
        self._tell([*events.removed, *events.stored])

    def doubt_all(self) -> None:
        """Check all blocks again from the next tick on: a worker and what it held may be gone."""
        self._doubted = dict.fromkeys(self._told)

    def tick(self, now: float) -> float | None:
        """Check some blocks in doubt. Returns when to call again, or None if no block is in
        doubt.
        """
        some = list(itertools.islice(self._doubted, DOUBTS_A_TICK))
        for key in some:
            del self._doubted[key]
        self._tell(some)
        return now if self._doubted else None

    def _tell(
        self, keys: Iterable[BlockKey], removed: Iterable[tuple[BlockKey, Tier]] = ()
    ) -> None:
        """Publish what has changed of these blocks, and that `removed` are gone."""
        gone, come = list(removed), []
        for key in dict.fromkeys(keys):
            if key not in self._known:
                continue
            present = {replica.tier for replica in self._replicas(key)}
            told = self._told.get(key, set())
            gone += [(key, tier) for tier in sorted(told - present)]
            come += [(key, tier) for tier in sorted(present - told)]
            if present:
                self._told[key] = present
            else:
                self._told.pop(key, None)
        events = [*self._removals(gone), *self._chains(come)]
        if events:
            self._publish(events)

    def _removals(self, gone: Sequence[_Place]) -> list[KvEvent]:
        return [
            BlockRemoved(
                block_hashes=[_number(key) for key, each in gone if each is tier],
                medium=MEDIA[tier],
            )
            for tier in sorted({tier for _, tier in gone})
        ]

    def _chains(self, come: Sequence[_Place]) -> list[KvEvent]:
        """Return the blocks as chains: one event for those that follow one another."""
        events: list[KvEvent] = []
        for tier in sorted({tier for _, tier in come}):
            last: BlockKey | None = None
            for key, each in come:
                if each is not tier:
                    continue
                parent, packed = self._known[key]
                tokens = unpack_tokens(packed)
                if last is None or parent != last:
                    chain = BlockStored(
                        block_hashes=[],
                        parent_block_hash=None if parent is None else _number(parent),
                        token_ids=[],
                        block_size=len(tokens),
                        medium=MEDIA[tier],
                    )
                    events.append(chain)
                chain.block_hashes.append(_number(key))
                chain.token_ids.extend(tokens)
                last = key
        return events


def _number(key: BlockKey) -> int:
    """Return a block's name as subscribers expect it: 64 bits."""
    return int.from_bytes(key[:8], "big")
