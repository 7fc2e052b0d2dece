"""Messages of the KVCache pool besides reading and writing blocks: questions to pool nodes and to
gateways, and their answers. The rules are those of `messages`. At the end stands the union of all
messages, which the codec decodes; new messages are added there.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake.base import messages as words
from mooncake.base.blocks import BlockKey
from mooncake.base.messages import Answer, Message, Tier, WorkerLoad, WorkerRef


class LastingPin(str, Enum):
    """How a pool node protects a block that no request uses. This pin outlives the client that set
    it, unlike the short pin of a reader (`PinBlocks`).
    """

    NONE = "no"
    """The block has no pin: the eviction policy decides."""
    SOFT = "soft"
    """The block is evicted after all blocks without this pin."""
    HARD = "hard"
    """The block is never evicted. It counts towards its tenant's quota, and a node has a limit on
    such blocks.
    """


# ---------------------------------------------------------------- to kvstore


class FindBlocks(Message, frozen=True, tag="find"):
    """Ask a node what it stores, without pinning or using it; answered by `BlocksFound`."""

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class RemoveBlocks(Message, frozen=True, tag="remove"):
    """Take blocks out of all tiers of a node for good, except those with a hard pin. Readers finish
    what they read. `BlocksRemoved` answers once no later boot of the node can find the blocks.

    A gateway sends this too, for blocks that were removed while the node was away.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class SetPins(Message, frozen=True, tag="set_pins"):
    """Set the lasting pins of blocks in DRAM; answered by `PinsSet`. Anyone may change them later.
    A node forgets all pins when it restarts.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]
    pin: LastingPin
    epoch: str = ""
    """The boot of the node that is meant; any other boot does nothing. Empty: any boot."""
    lift: bool = False
    """Whether the node first loads blocks that are only on its SSD."""


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
    """Ask a gateway which pool nodes hold a run of blocks, and which nodes there are.
    `ReplicasFound` answers.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]
    every: bool = False
    """Whether the answer names all pool nodes."""


class TakeOver(Message, frozen=True, tag="take_over"):
    """Ask a node to copy blocks of one tenant that only the sender has, because the sender drains.
    The copies then belong to that node. `TakenOver` answers.
    """

    source: WorkerRef
    ticket: int
    keys: list[BlockKey]
    tenant: str = ""
    pin: LastingPin = LastingPin.NONE
    """The lasting pin of the blocks. The node sets it as far as it has room for it."""
    reused: bool = False
    """Whether readers asked for the blocks more than once. Such blocks are worth more than others.
    """


# ---------------------------------------------------------------- to a gateway


class FindHomes(Message, frozen=True, tag="find_homes"):
    """A node that drains asks which of its blocks other nodes hold too, and which nodes could take
    the rest. `HomesFound` answers.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


class ForgetBlocks(Message, frozen=True, tag="forget_blocks"):
    """Tell a gateway that blocks are being removed from all nodes. The gateway tells this to a node
    that is away when it comes back. `ReplicasFound` answers, with all nodes that there are now.
    """

    asker: WorkerRef
    ticket: int
    keys: list[BlockKey]


# ---------------------------------------------------------------- answers


class TakenOver(Answer, frozen=True, tag="taken_over"):
    """The blocks among those asked for that the node stores now."""

    store: WorkerRef
    keys: list[BlockKey]
    is_full: bool = False
    """Whether the node has no room for more blocks of this kind."""


class Home(msgspec.Struct, frozen=True, array_like=True):
    """A pool node that does not drain."""

    store: WorkerRef
    num_free_blocks: int
    """The free blocks when the node last reported."""


class HomesFound(Answer, frozen=True, tag="homes"):
    """Where blocks of a node that drains are, or could go. This is a hint: only nodes know what
    they hold.
    """

    elsewhere: list[bool]
    """For each block asked for, whether a node that does not drain holds it too."""
    homes: list[Home]


class BlocksFound(Answer, frozen=True, tag="found"):
    """The fastest tier of each block asked for; None: not stored."""

    store: WorkerRef
    tiers: list[Tier | None]


class ReplicasFound(Answer, frozen=True, tag="replicas"):
    """The living pool nodes, and how many leading blocks of the run each holds. Nodes that hold
    most come first. This is a hint: only nodes know what they hold.
    """

    stores: list[WorkerRef]
    num_blocks: list[int]


class BlocksRemoved(Answer, frozen=True, tag="removed"):
    """The result for each block of a `RemoveBlocks`."""

    store: WorkerRef
    removed: list[bool]
    """Whether the node had the block, which is now gone for good."""
    left: list[bool]
    """Whether the node still has the block, or may have it again: it has a hard pin, or the disk
    could not erase it.
    """


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """What a node has of one block in one tier."""

    tier: Tier
    num_bytes: int
    pin: LastingPin = LastingPin.NONE
    num_readers: int = 0
    """How many readers have it pinned now; the node itself may be one of them."""


class BlocksDescribed(Answer, frozen=True, tag="described"):
    """The node's copies of each block asked for, the fastest tier first."""

    store: WorkerRef
    copies: list[list[BlockCopy]]


class PinsSet(Answer, frozen=True, tag="pins_set"):
    """The result for each block of a `SetPins`."""

    store: WorkerRef
    done: list[bool]
    """Whether the block has the pin that was asked for. False: the block is not in DRAM, there is
    no room for more hard pins, or another boot was meant.
    """


class DrainProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the blocks of a node that drains have been copied to others."""

    over: bool
    """Whether the node has stopped copying: it has copied all it can, or the time is up."""
    num_copied: int = 0
    num_elsewhere: int = 0
    """Blocks that other nodes hold too."""
    num_left: int = 0
    """Blocks that only this node holds, in DRAM or on SSD."""
    num_left_on_ssd: int = 0
    """How many of these are on a disk, where the next boot finds them."""


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
    num_objects_known: int = 0
    """Blocks of the bucket that the node knows of and may read."""
    num_pinned: int = 0
    """Blocks in DRAM that readers have pinned."""
    num_quarantined: int = 0
    num_hard_pinned: int = 0
    num_soft_pinned: int = 0
    draining: bool = False
    drained: bool = False
    """Whether the process may end: no operation is open, other nodes take no more of its blocks,
    and the blocks worth keeping are on disk.
    """
    drain: DrainProgress | None = None
    """The progress of the drain, when the node drains."""
    tenants: tuple[TenantUse, ...] = ()
    """The use of each tenant that has a quota."""
    num_kept: int = 0
    """Blocks in DRAM that are kept for a time, because requests asked for it."""


AnyMessage = (
    words.WorkerHello | words.LoadReport | words.BlockEvents | words.StepOutputs | words.Welcome
    | words.PeerLost | words.Drain | words.RequestTask | words.Reserved
    | words.KVReady | words.PushEnded | words.AbortTask | words.PutGranted | words.PinGranted
    | words.PutStart | words.PutEnd | words.PinBlocks | words.Unpin | words.DoubtPeers
    | words.WhoAreYou | words.PeersHeard | words.BlocksPushed | words.Refused | words.Replicate
    | words.Prefetch | words.GatewayNews | FindBlocks | RemoveBlocks | SetPins
    | AskPool | BlocksFound | BlocksRemoved | PinsSet | PoolState
    | FindReplicas | ReplicasFound | FindHomes | HomesFound | TakeOver
    | TakenOver | words.StopPrefetch | DescribeBlocks | BlocksDescribed
    | ForgetBlocks | words.AskCluster | words.ClusterTold | words.Restart | words.Asleep
    | words.CheckWeights | words.WeightsChecked | words.BorrowWeights
    | words.WeightsLent
)  # fmt: skip
"""The tagged union that travels on a channel."""
