"""Removes blocks from one node for good. A request is answered once no later boot of the node can
find them.

Pure; owned by the node. Readers finish what they read; disks take their time to erase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mooncake.base import BlockKey
from mooncake.base.pool_messages import BlocksRemoved, RemoveBlocks
from mooncake.base.rights import client_key
from mooncake.kvstore.node.blocks import NodeBlocks, NodePorts
from mooncake.kvstore.node.long_work import LongWork

MAX_REMOVALS = 4096
"""Requests that may wait for disks. When there are more, the newest is told to try again."""
MAX_REMOVED_KEYS = 1 << 20
"""Blocks that all these requests may name together."""
CLIENT_PART = 4
"""All pool clients that share a credential may have this part of both: a quarter."""


@dataclass(slots=True, eq=False)
class _Removal:
    """One request that waits until disks hold no trace of its blocks that can still be erased."""

    request: RemoveBlocks
    was_here: set[BlockKey] = field(default_factory=set)
    left: set[BlockKey] = field(default_factory=set)
    fading: set[BlockKey] = field(default_factory=set)
    begun: bool = False
    """Whether all its blocks have been looked at."""


def _is_full(waiting: Sequence[_Removal], request: RemoveBlocks, part: int) -> bool:
    """Return whether so many requests wait that one more exceeds 1/`part` of the bounds."""
    num_keys = sum(len(each.request.keys) for each in waiting) + len(request.keys)
    is_long = bool(waiting) and num_keys > MAX_REMOVED_KEYS // part
    return is_long or len(waiting) >= max(1, MAX_REMOVALS // part)


class Removals:
    """Removes blocks of one node on request. A block with a hard pin is not removed."""

    def __init__(self, ports: NodePorts, blocks: NodeBlocks, long_work: LongWork) -> None:
        self._ports = ports
        self._long_work = long_work
        self._blocks = blocks
        self._tiering = blocks.tiering
        self._removals: dict[_Removal, None] = {}
        """The requests that are not answered yet, in the order in which they came."""
        self._waiting_for: dict[BlockKey, dict[_Removal, None]] = {}
        """The requests that wait for disks, by each of their blocks."""

    def on_remove(self, request: RemoveBlocks, now: float) -> None:
        """Remove blocks; no reader finds them from now on. The request is refused, and nothing is
        removed, while too many requests wait for disks.
        """
        client = client_key(request.asker)
        own = [each for each in self._removals if client_key(each.request.asker) == client]
        waiting = list(self._removals)
        if _is_full(waiting, request, 1) or (client and _is_full(own, request, CLIENT_PART)):
            reason = f"{len(self._removals)} removals wait for the disks of this node: try again"
            self._long_work.refuse(request, reason)
            return
        if self._long_work.refuses(request):
            return
        removal = _Removal(request)
        self._removals[removal] = None

        def remove(keys: Sequence[BlockKey], now: float) -> None:
            for key in keys:
                self._remove(key, removal, now)
            self._settle(removal, keys)

        def answer(_now: float) -> None:
            removal.begun = True
            self._settle(removal, ())

        self._long_work.begin(request, list(dict.fromkeys(request.keys)), remove, answer, now)

    def _remove(self, key: BlockKey, removal: _Removal, now: float) -> None:
        """Remove one block, unless it has a hard pin."""
        if self._blocks.dram.is_hard_pinned(key):
            removal.left.add(key)
            return
        self._tiering.tombstones.add(key, removal.request.asker, now)
        self._blocks.replicator.forget(key)
        if self._blocks.dram.condemn(key):
            removal.was_here.add(key)
            self._blocks.gone([key])
        if self._tiering.remove(key):
            removal.was_here.add(key)
        removal.fading.add(key)
        self._waiting_for.setdefault(key, {})[removal] = None

    def on_scanned(self, erasing: list[BlockKey]) -> None:
        """Note that a disk was scanned; it now erases these blocks, which were removed before."""
        for key in erasing:
            for removal in self._waiting_for.get(key, ()):
                removal.was_here.add(key)
                removal.fading.add(key)
        if not self._tiering.ssd.num_closed:
            for removal in list(self._removals):
                self._settle(removal, ())

    def settle(self, keys: Iterable[BlockKey]) -> None:
        """Answer the requests that wait for no disk any more. Call it with the blocks of each
        operation of a disk that has ended.
        """
        for key in keys:
            for removal in list(self._waiting_for.get(key, ())):
                self._settle(removal, [key])

    def _settle(self, removal: _Removal, keys: Iterable[BlockKey]) -> None:
        """Note which of these blocks no longer fade, and answer the request when none does. A disk
        that is not scanned yet may hold any block. Out of a bucket a block is erased whether it was
        listed or not.
        """
        for key in keys:
            if key in removal.fading and not self._tiering.is_fading(key):
                removal.fading.discard(key)
                if self._tiering.is_stuck(key):
                    removal.left.add(key)
        if removal.begun and not removal.fading and not self._tiering.ssd.num_closed:
            self._answer(removal)

    def _answer(self, removal: _Removal) -> None:
        request, gone = removal.request, removal.was_here - removal.left
        del self._removals[removal]
        for key in dict.fromkeys(request.keys):
            waiting = self._waiting_for.get(key, {})
            if waiting.pop(removal, self) is None and not waiting:
                del self._waiting_for[key]
        self._ports.counters["blocks_removed"] += len(gone)
        answer = BlocksRemoved(
            asker=request.asker,
            ticket=request.ticket,
            store=self._ports.worker,
            removed=[key in gone for key in request.keys],
            left=[key in removal.left for key in request.keys],
        )
        self._ports.channel.send(request.asker.address, answer)

    def check_integrity(self) -> None:
        """Raise AssertionError when a request waits for what will not come."""
        for removal in self._removals:
            is_begun = removal.begun and not self._tiering.ssd.num_closed
            assert removal.fading or not is_begun, "nothing is waited for"
            assert all(map(self._tiering.is_fading, removal.fading))
            assert all(removal in self._waiting_for[key] for key in removal.fading)
        assert all(each in self._removals for some in self._waiting_for.values() for each in some)
