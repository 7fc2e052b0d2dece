"""The union of all messages, which the codec decodes. New messages are added here."""

from __future__ import annotations

from mooncake.base import messages as words
from mooncake.base import pool_messages as pool

AnyMessage = (
    words.WorkerHello | words.LoadReport | words.BlockEvents | words.StepOutputs | words.Welcome
    | words.PeerLost | words.Drain | words.RequestTask | words.Reserved
    | words.KVReady | words.PushEnded | words.AbortTask | words.PutGranted | words.PinGranted
    | words.PutStart | words.PutEnd | words.PinBlocks | words.Unpin | words.DoubtPeers
    | words.WhoAreYou | words.PeersHeard | words.BlocksPushed | words.Refused | words.Replicate
    | words.Prefetch | words.GatewayNews | pool.FindBlocks | pool.RemoveBlocks | pool.SetPins
    | pool.AskPool | pool.BlocksFound | pool.BlocksRemoved | pool.PinsSet | pool.PoolState
    | pool.FindReplicas | pool.ReplicasFound | pool.FindHomes | pool.HomesFound | pool.TakeOver
    | pool.TakenOver | words.StopPrefetch | pool.DescribeBlocks | pool.BlocksDescribed
    | pool.ForgetBlocks | words.AskCluster | words.ClusterTold | words.Restart | words.Asleep
    | words.CheckWeights | words.WeightsChecked | words.BorrowWeights
    | words.WeightsLent
)  # fmt: skip
"""The tagged union that travels on a channel."""
