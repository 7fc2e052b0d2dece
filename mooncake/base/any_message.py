"""All messages there are, as the codec knows them. A new one is added here."""

from __future__ import annotations

from mooncake.base.messages import (
    AbortTask,
    BlockEvents,
    DecodeTask,
    DoubtPeers,
    Drain,
    GatewayNews,
    KVReady,
    LoadReport,
    PeerLost,
    PinBlocks,
    PinGranted,
    Prefetch,
    PrefillTask,
    PushEnded,
    PutEnd,
    PutGranted,
    PutStart,
    Replicate,
    Reserved,
    StepOutputs,
    StopPrefetch,
    Unpin,
    Welcome,
    WhoAreYou,
    WorkerHello,
)
from mooncake.base.pool_messages import (
    AskPool,
    BlocksDescribed,
    BlocksFound,
    BlocksKept,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    FindHolders,
    FindHomes,
    ForgetBlocks,
    HoldersFound,
    HomesFound,
    KeepBlocks,
    PoolState,
    RemoveBlocks,
    TakenOver,
    TakeOver,
)

AnyMessage = (
    WorkerHello | LoadReport | BlockEvents | StepOutputs | Welcome | PeerLost | Drain
    | PrefillTask | Reserved | DecodeTask | KVReady | PushEnded | AbortTask | PutGranted
    | PinGranted | PutStart | PutEnd | PinBlocks | Unpin | DoubtPeers | WhoAreYou
    | Replicate | Prefetch | GatewayNews | FindBlocks | RemoveBlocks | KeepBlocks | AskPool
    | BlocksFound | BlocksRemoved | BlocksKept | PoolState
    | FindHolders | HoldersFound | FindHomes | HomesFound | TakeOver | TakenOver
    | StopPrefetch | DescribeBlocks | BlocksDescribed | ForgetBlocks
)  # fmt: skip
"""The tagged union that travels on a channel."""
