"""What anybody may ask of a pool node besides reading and writing, and what it answers. Of the same
kind as `messages`, which has the rules.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import Message, Tier, WorkerLoad, WorkerRef


class Keep(str, Enum):
    """How a pool keeps a block that nobody uses."""

    NO = "no"
    """As its eviction policy has it."""
    SOFT = "soft"
    """Evicted after all others."""
    HARD = "hard"
    """Never evicted; it takes room of its tenant, and of what a node keeps so at most."""


# ---------------------------------------------------------------- to kvstore


class FindBlocks(Message, frozen=True, tag="find"):
    """Ask what is stored, without holding or using it: answered by `BlocksFound`."""

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class RemoveBlocks(Message, frozen=True, tag="remove"):
    """Take blocks out of all tiers for good, but for those with a hard pin: answered by
    `BlocksRemoved` once no boot of the node will find them. Readers keep what they read until they
    have read it. From a gateway: what was removed while the node was away.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class KeepBlocks(Message, frozen=True, tag="keep"):
    """Keep blocks in DRAM until told otherwise, whoever said so and whether it still lives:
    answered by `BlocksKept`. A node that was started again has forgotten.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]
    keep: Keep
    epoch: str = ""
    """Of the boot that is meant; another one does nothing. Empty: whichever it is."""
    lift: bool = False
    """Bring up first what lies on SSD only."""


class DescribeBlocks(Message, frozen=True, tag="describe"):
    """Ask what a node has of blocks, without holding or using it: answered by `BlocksDescribed`."""

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class AskPool(Message, frozen=True, tag="ask_pool"):
    """Ask a pool node how it is doing: answered by `PoolState`."""

    asker: WorkerRef
    ticket: int


class FindHolders(Message, frozen=True, tag="find_holders"):
    """Ask a gateway which pool nodes hold a run of blocks, and which there are: answered by
    `HoldersFound`.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]
    every: bool = False
    """Name all there are."""


class TakeOver(Message, frozen=True, tag="take_over"):
    """A node that drains has these blocks of one tenant, and nobody else: copy them as your own.
    Answered by `TakenOver`.
    """

    source: WorkerRef
    ticket: int
    keys: list[BlockKey]
    tenant: str = ""
    keep: Keep = Keep.NO
    """How they are to be kept, as far as there is room for it."""
    reused: bool = False
    """They have been asked for more than once: worth more than blocks that have not."""


# ---------------------------------------------------------------- to a gateway


class FindHomes(Message, frozen=True, tag="find_homes"):
    """A node that drains asks which of its blocks are elsewhere too, and who could take the others:
    answered by `HomesFound`.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class ForgetBlocks(Message, frozen=True, tag="forget_blocks"):
    """Tell a gateway that blocks are being removed from all nodes: one that is away hears of it
    when it comes back. Answered by `HoldersFound` with every node there is now.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


# ---------------------------------------------------------------- to those who asked


class TakenOver(Message, frozen=True, tag="taken_over"):
    """Those of the blocks asked for that lie here now."""

    ticket: int
    store: WorkerRef
    keys: list[BlockKey]
    is_full: bool = False
    """There is no room for more of their kind."""


class Home(msgspec.Struct, frozen=True, array_like=True):
    """A pool node that stays."""

    store: WorkerRef
    num_free_blocks: int
    """When it last reported."""


class HomesFound(Message, frozen=True, tag="homes"):
    """Where blocks of a node that drains are, or could be. A hint: nodes know what they hold."""

    ticket: int
    elsewhere: list[bool]
    """Whether a pool node that stays holds it too; of each block asked for."""
    homes: list[Home]


class BlocksFound(Message, frozen=True, tag="found"):
    """The fastest tier of each block asked for; None: not stored."""

    ticket: int
    store: WorkerRef
    tiers: list[Tier | None]


class HoldersFound(Message, frozen=True, tag="holders"):
    """Some pool nodes that live, those that hold most of the run first, and how many of its leading
    blocks each holds. A hint: nodes know best what they hold.
    """

    ticket: int
    stores: list[WorkerRef]
    num_blocks: list[int]


class BlocksRemoved(Message, frozen=True, tag="removed"):
    """Whether each block named was here and is gone for good."""

    ticket: int
    store: WorkerRef
    removed: list[bool]
    left: list[bool]
    """Whether it is here still, or may be again: a hard pin is on it, or its disk could not erase
    it.
    """


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """What a node has of one block in one tier."""

    tier: Tier
    num_bytes: int
    keep: Keep = Keep.NO
    num_readers: int = 0
    """That hold it now, the node itself included."""


class BlocksDescribed(Message, frozen=True, tag="described"):
    """What a node has of each block asked for, the fastest tier first."""

    ticket: int
    store: WorkerRef
    copies: list[list[BlockCopy]]


class BlocksKept(Message, frozen=True, tag="kept"):
    """Whether each block is kept as was asked for; False: it is not in DRAM, there is no more room
    for hard pins, or another boot was meant.
    """

    ticket: int
    store: WorkerRef
    kept: list[bool]


class DrainProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the blocks of a node that drains have been copied to others."""

    over: bool
    """No more are copied: all that can be have been, or the time is up."""
    num_copied: int = 0
    num_elsewhere: int = 0
    """Lay on other nodes too."""
    num_left: int = 0
    """Only here, in DRAM or on SSD."""
    num_left_on_ssd: int = 0
    """Of those, on a disk: the next boot finds them."""


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant with a quota has of one tier of a node."""

    tenant: str
    tier: Tier
    num_blocks: int
    """Reserved or stored."""
    max_blocks: int


class PoolState(Message, frozen=True, tag="pool_state"):
    """One pool node, as it is now."""

    ticket: int
    store: WorkerRef
    load: WorkerLoad
    layout_fingerprint: str
    block_bytes: int
    num_ssd_blocks: int = 0
    num_ssd_stored: int = 0
    num_pinned: int = 0
    """Blocks in DRAM that somebody reads."""
    num_quarantined: int = 0
    num_hard_pinned: int = 0
    num_soft_pinned: int = 0
    draining: bool = False
    drained: bool = False
    """Its process may be ended: nothing is open, nobody else takes more of its blocks, and what was
    worth a disk is there.
    """
    drain: DrainProgress | None = None
    """Of a node that drains."""
    tenants: tuple[TenantUse, ...] = ()
    """Those that have a quota."""
