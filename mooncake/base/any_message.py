"""The union of all messages, which the codec decodes. New messages are added here."""

from __future__ import annotations

from mooncake.base.messages import (
    AbortTask,
    AskCluster,
    BlockEvents,
    BlocksPushed,
    ClusterTold,
    DecodeTask,
    DoubtPeers,
    Drain,
    GatewayNews,
    KVReady,
    LoadReport,
    PeerLost,
    PeersHeard,
    PinBlocks,
    PinGranted,
    Prefetch,
    PrefillTask,
    PushEnded,
    PutEnd,
    PutGranted,
    PutStart,
    Refused,
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
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    FindHomes,
    FindReplicas,
    ForgetBlocks,
    HomesFound,
    PinsSet,
    PoolState,
    RemoveBlocks,
    ReplicasFound,
    SetPins,
    TakenOver,
    TakeOver,
)

AnyMessage = (
    WorkerHello | LoadReport | BlockEvents | StepOutputs | Welcome | PeerLost | Drain
    | PrefillTask | Reserved | DecodeTask | KVReady | PushEnded | AbortTask | PutGranted
    | PinGranted | PutStart | PutEnd | PinBlocks | Unpin | DoubtPeers | WhoAreYou
    | PeersHeard | BlocksPushed | Refused
    | Replicate | Prefetch | GatewayNews | FindBlocks | RemoveBlocks | SetPins | AskPool
    | BlocksFound | BlocksRemoved | PinsSet | PoolState
    | FindReplicas | ReplicasFound | FindHomes | HomesFound | TakeOver | TakenOver
    | StopPrefetch | DescribeBlocks | BlocksDescribed | ForgetBlocks | AskCluster | ClusterTold
)  # fmt: skip
"""The tagged union that travels on a channel."""
