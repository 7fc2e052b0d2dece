"""Messages of the KVCache pool besides reading and writing blocks: questions to pool nodes and to
gateways, and their answers. The rules are those of `messages`.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import Answer, Message, Tier, WorkerLoad, WorkerRef


class LastingPin(str, Enum):
    """How a pool node protects a block that no request uses. It outlives the client that set it,
    other than the short pin of a reader (`PinBlocks`).
    """

    NONE = "no"
    """The eviction policy decides."""
    SOFT = "soft"
    """Evicted after all others."""
    HARD = "hard"
    """Never evicted. Such blocks count towards their tenant's quota, and a node has a limit on
    them.
    """


# ---------------------------------------------------------------- to kvstore


class FindBlocks(Message, frozen=True, tag="find"):
    """Ask a node what it stores, without pinning or using it; answered by `BlocksFound`."""

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class RemoveBlocks(Message, frozen=True, tag="remove"):
    """Take blocks out of all tiers of a node for good, except those with a hard pin; answered by
    `BlocksRemoved` once no later boot of the node can find them. Readers finish what they read.
    From a gateway: what was removed while the node was away.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class SetPins(Message, frozen=True, tag="set_pins"):
    """Set the lasting pins of blocks in DRAM, which anyone may change later; answered by
    `PinsSet`. A node that was started again has none.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]
    pin: LastingPin
    epoch: str = ""
    """The boot of the node that is meant; another one does nothing. Empty: any."""
    lift: bool = False
    """Whether blocks that are on SSD only are brought up first."""


class DescribeBlocks(Message, frozen=True, tag="describe"):
    """Ask a node for its copies of blocks, without pinning or using them; answered by
    `BlocksDescribed`.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class AskPool(Message, frozen=True, tag="ask_pool"):
    """Ask a pool node for its figures; answered by `PoolState`."""

    asker: WorkerRef
    ticket: int


class FindReplicas(Message, frozen=True, tag="find_replicas"):
    """Ask a gateway which pool nodes hold a run of blocks, and which nodes there are; answered by
    `ReplicasFound`.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]
    every: bool = False
    """Whether all nodes are to be named."""


class TakeOver(Message, frozen=True, tag="take_over"):
    """Asks a node to copy blocks of one tenant that only the sender has, which drains; the copies
    are the node's own from then on. Answered by `TakenOver`.
    """

    source: WorkerRef
    ticket: int
    keys: list[BlockKey]
    tenant: str = ""
    pin: LastingPin = LastingPin.NONE
    """Their lasting pin, which is set as far as the node has room for it."""
    reused: bool = False
    """Whether they were asked for more than once: they are worth more than blocks that were not."""


# ---------------------------------------------------------------- to a gateway


class FindHomes(Message, frozen=True, tag="find_homes"):
    """A node that drains asks which of its blocks other nodes hold too, and which nodes could take
    the others; answered by `HomesFound`.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class ForgetBlocks(Message, frozen=True, tag="forget_blocks"):
    """Tell a gateway that blocks are being removed from all nodes, so that it tells a node that is
    away when that comes back. Answered by `ReplicasFound` with all nodes there are now.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


# ---------------------------------------------------------------- answers


class TakenOver(Answer, frozen=True, tag="taken_over"):
    """Those of the blocks asked for that the node stores now."""

    store: WorkerRef
    keys: list[BlockKey]
    is_full: bool = False
    """Whether the node has no room for more blocks of their kind."""


class Home(msgspec.Struct, frozen=True, array_like=True):
    """A pool node that does not drain."""

    store: WorkerRef
    num_free_blocks: int
    """When it last reported."""


class HomesFound(Answer, frozen=True, tag="homes"):
    """Where blocks of a node that drains are, or could go: a hint, as only nodes know what they
    hold.
    """

    elsewhere: list[bool]
    """Of each block asked for, whether a node that does not drain holds it too."""
    homes: list[Home]


class BlocksFound(Answer, frozen=True, tag="found"):
    """The fastest tier of each block asked for; None: not stored."""

    store: WorkerRef
    tiers: list[Tier | None]


class ReplicasFound(Answer, frozen=True, tag="replicas"):
    """Pool nodes that live, those that hold most of the run first, and how many of its leading
    blocks each holds. A hint: only nodes know what they hold.
    """

    stores: list[WorkerRef]
    num_blocks: list[int]


class BlocksRemoved(Answer, frozen=True, tag="removed"):
    """What became of each block of a `RemoveBlocks`."""

    store: WorkerRef
    removed: list[bool]
    """Whether it was here and is gone for good."""
    left: list[bool]
    """Whether it is here still, or may be again: a hard pin is on it, or its disk could not erase
    it.
    """


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """What a node has of one block in one tier."""

    tier: Tier
    num_bytes: int
    pin: LastingPin = LastingPin.NONE
    num_readers: int = 0
    """Readers that have it pinned now; the node itself may be one."""


class BlocksDescribed(Answer, frozen=True, tag="described"):
    """The copies that a node has of each block asked for, the fastest tier first."""

    store: WorkerRef
    copies: list[list[BlockCopy]]


class PinsSet(Answer, frozen=True, tag="pins_set"):
    """What became of each block of a `SetPins`."""

    store: WorkerRef
    done: list[bool]
    """Whether it has the pin asked for; False: it is not in DRAM, there is no room for more hard
    pins, or another boot was meant.
    """


class DrainProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the blocks of a node that drains have been copied to others."""

    over: bool
    """Whether no more are copied: all that can be have been, or the time is up."""
    num_copied: int = 0
    num_elsewhere: int = 0
    """Blocks that other nodes hold too."""
    num_left: int = 0
    """Blocks that only this node holds, in DRAM or on SSD."""
    num_left_on_ssd: int = 0
    """Of those, blocks on a disk: the next boot finds them."""


class TenantUse(msgspec.Struct, frozen=True, array_like=True):
    """How many blocks a tenant with a quota has in one tier of a node."""

    tenant: str
    tier: Tier
    num_blocks: int
    """Reserved or stored."""
    max_blocks: int


class PoolState(Answer, frozen=True, tag="pool_state"):
    """The figures of one pool node now."""

    store: WorkerRef
    load: WorkerLoad
    layout_fingerprint: str
    block_bytes: int
    num_ssd_blocks: int = 0
    num_ssd_stored: int = 0
    num_pinned: int = 0
    """Blocks in DRAM that are pinned by readers."""
    num_quarantined: int = 0
    num_hard_pinned: int = 0
    num_soft_pinned: int = 0
    draining: bool = False
    drained: bool = False
    """Whether the process may be ended: nothing is open, other nodes take no more of its blocks,
    and what was worth a disk is there.
    """
    drain: DrainProgress | None = None
    """Of a node that drains."""
    tenants: tuple[TenantUse, ...] = ()
    """Tenants that have a quota."""
