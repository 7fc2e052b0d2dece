"""Calls of a client of the pool: what was asked of one node, and how their answers come.

Values and records; the client owns which are open and when they end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mooncake.base import BlockKey, MooncakeError, Tier, TransferError, WorkerRef
from mooncake.base.messages import Replicate
from mooncake.base.pool_messages import (
    AskPool,
    BlocksDescribed,
    BlocksFound,
    BlocksKept,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    HoldersFound,
    KeepBlocks,
    PoolState,
    RemoveBlocks,
    TakenOver,
)
from mooncake.kvstore.block_memory import BlockMemory, Places

Question = FindBlocks | RemoveBlocks | KeepBlocks | DescribeBlocks | AskPool | Replicate
Answer = (
    BlocksFound | BlocksRemoved | BlocksKept | BlocksDescribed
    | PoolState | HoldersFound | TakenOver
)  # fmt: skip

Wrote = Callable[[list[BlockKey] | MooncakeError], None]
"""The blocks that were written; the others were there already, or there was no room."""
Got = Callable[[int | MooncakeError], None]
"""How many blocks, from the first on, lie in our memory, verified where the pool gave checksums."""
Found = Callable[[list[Tier | None] | MooncakeError], None]
Kept = Callable[[BlocksKept | MooncakeError], None]
Removed = Callable[[list[bool] | MooncakeError], None]
Here = Callable[[list[BlockKey] | MooncakeError], None]
"""Those of the blocks that lie at a node now."""
Stated = Callable[[PoolState | MooncakeError], None]
Held = Callable[[HoldersFound | MooncakeError], None]


@dataclass(frozen=True)
class Attempt:
    """Where a call goes, and how long it may take, when that is not for the client to choose."""

    store: WorkerRef
    deadline_s: float
    answer_by_s: float = float("inf")
    """The node must have answered by then, if that is sooner; then bytes may move."""


@dataclass
class Call:
    """What was asked of one pool node and has not ended."""

    at: Attempt
    fail: Callable[[MooncakeError], None]
    batch_id: int | None = None

    @property
    def answer_by_s(self) -> float:
        """When it is given up unless something was granted."""
        return min(self.at.deadline_s, self.at.answer_by_s)


@dataclass(kw_only=True)
class Put(Call):
    """Blocks from memory to a node."""

    memory: BlockMemory
    blocks: dict[BlockKey, int] = field(default_factory=dict)
    """Key -> byte offset in that memory."""
    granted: list[BlockKey] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    done: Wrote = lambda _written: None


@dataclass(kw_only=True)
class Get(Call):
    """A run of blocks from a node to memory, in pieces where it comes up from disks."""

    places: Places
    """Of this piece and those to come, as are the keys."""
    keys: list[BlockKey] = field(default_factory=list)
    num_arrived: int = 0
    """In the pieces before."""
    num_blocks: int = 0
    more: bool = False
    """The node has blocks behind this piece."""
    checksums: list[int] = field(default_factory=list)
    done: Got = lambda _count: None

    def advance(self) -> None:
        """This piece has arrived whole: turn to the next."""
        self.num_arrived += self.num_blocks
        self.keys, self.places = self.keys[self.num_blocks :], self.places[self.num_blocks :]
        self.batch_id, self.more = None, False
        self.at = replace(self.at, answer_by_s=self.at.deadline_s)  # the node has answered

    def end(self, answer: int | MooncakeError) -> None:
        """Tell what has come of it; what came before an error counts."""
        if isinstance(answer, int):
            self.done(self.num_arrived + answer)
        else:
            self.done(self.num_arrived or answer)

    def looked_at(self) -> tuple[int | MooncakeError, list[BlockKey]]:
        """Return how many blocks, from the first on, are what was promised, and one that is not."""
        memory, offsets = self.places.memory, self.places.offsets
        try:
            for number, checksum in enumerate(self.checksums[: self.num_blocks]):
                if checksum and memory.checksum(offsets[number]) != checksum:
                    return number, [self.keys[number]]
        except TransferError as error:  # of a device
            return error, []
        return self.num_blocks, []


@dataclass
class Ask(Call):
    """A question without bytes."""

    done: Callable[[Answer], None] = lambda _answer: None
