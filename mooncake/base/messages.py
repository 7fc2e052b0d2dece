"""The messages between workers, grouped by receiver: tagged structs, one codec (`rpc.codec`), no
pickle.

Conventions: `attempt` counts the placements of one request; a message of an older attempt is
ignored. A worker is named by a `WorkerRef`; its `epoch` is new at every start. Every message that
needs an answer carries the `WorkerRef` to answer to and a `ticket`; the `Answer` repeats both.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake import __version__
from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import BlockPlaces
from mooncake.base.kv_parts import KvPart
from mooncake.base.large_settings import LargeSettings, SettingName
from mooncake.base.request import (
    Failure,
    FinishInfo,
    FinishReason,
    GenerateRequest,
    RequestOutput,
)
from mooncake.base.work_span import WorkSpan

PROTOCOL_VERSION = 7
"""What messages mean. It grows with a change that a former release would misread."""
OLDEST_PROTOCOL_VERSION = 7
"""The first version with which this release still works together, in both directions."""


class Role(str, Enum):
    """The role of a process in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    GATEWAY = "gateway"
    CLIENT = "client"
    """Uses the pool and serves no requests."""


class Tier(str, Enum):
    """Where a replica of a block lies."""

    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all messages."""


class Answer(Message, frozen=True):
    """The base of answers to a message with a ticket."""

    asker: WorkerRef
    """Tickets begin anew with each boot: another boot at the same address ignores the answer."""
    ticket: int


class _Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of values inside messages that are distinguished by a tag."""


class WorkerRef(msgspec.Struct, frozen=True, array_like=True):
    """One boot of one worker, and the address of its channel."""

    worker_id: str
    epoch: str
    address: str


class Release(msgspec.Struct, frozen=True, array_like=True):
    """What a process runs, and which protocol versions it speaks."""

    name: str
    version: int
    oldest: int

    def speaks_with(self, other: Release) -> bool:
        """Whether each of the two understands the other's version."""
        return self.oldest <= other.version and other.oldest <= self.version

    def __str__(self) -> str:
        return f"release {self.name} (protocol versions {self.oldest} to {self.version})"


OWN_RELEASE = Release(__version__, PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION)
UNNAMED_RELEASE = Release("0.1.0 or before", 6, 6)
"""Of a process that does not say."""


def is_former(worker: WorkerRef, present: WorkerRef) -> bool:
    """Return whether `worker` is an earlier epoch of `present`."""
    return worker.worker_id == present.worker_id and worker.epoch != present.epoch


# ---------------------------------------- to the gateway (and its Conductor)


class CostSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured step: its size and its duration."""

    num_new_tokens: int
    num_context_tokens: int
    """The sum over sequences of the tokens that each new token attends to before this step."""
    num_sequences: int
    seconds: float
    """Of the slowest stage, where a step goes through several."""


class WorkerHello(Message, frozen=True, tag="hello"):
    """A worker is up. Repeated when a gateway asks or was lost, until `Welcome` comes."""

    worker: WorkerRef
    role: Role
    node_id: str
    """Workers on one node share its pool and its shared memory."""
    host: str
    pid: int
    layout_fingerprint: str
    block_tokens: int
    num_blocks: int
    """HBM pages of an engine; DRAM blocks of a kvstore."""
    block_bytes: int = 0
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    num_stages: int = 1
    """Through which each step of an engine goes, one after the other."""
    expert_group: str = ""
    """The same of all workers that share routed experts: when one of them ends, all do. Empty: it
    has its own.
    """
    profile: list[CostSample] = []
    """Steps measured at start; the Conductor fits its cost models to them."""
    health_url: str = ""
    """Where probes ask its process; empty for a thread of the gateway's process."""
    release: Release = UNNAMED_RELEASE
    transports: list[str] = []
    """The transports by which it moves KV to and from other processes."""


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's state at the time of a report."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    num_context_tokens: int = 0
    """Tokens in the KV of running sequences."""
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_cached_blocks: int = 0
    """Free blocks that still hold reusable content."""
    draining: bool = False
    """The worker wants to leave: what others can do is not given to it."""
    lends: bool = False
    """An engine that leaves: its blocks can be read as a pool node's, until it is relieved."""
    counters: dict[str, float] = {}
    """Counts since start, by name (`blocks_fetched`, `preemptions`, …), for /metrics."""
    expert_rows: list[int] = []
    """Rows of each routed expert that this worker computed in the last window, of all layers; none
    where it has all experts to itself.
    """


class LoadReport(Message, frozen=True, tag="load"):
    """The heartbeat, sent every `report_interval_s`."""

    worker: WorkerRef
    load: WorkerLoad
    samples: list[CostSample] = []
    """Steps measured since the last report (at most 64)."""
    block_nos: dict[Tier, int] = {}
    """The number of each tier's last block events, which shows when they were lost."""
    clock_s: float = 0.0
    """What the worker's own clock shows: the times of its `WorkSpan`s are by it."""


class BlockEvents(Message, frozen=True, tag="blocks"):
    """Blocks that a worker has stored or removed, numbered so that a gap is noticed."""

    worker: WorkerRef
    tier: Tier
    sequence_no: int
    stored: list[BlockKey] = []
    removed: list[BlockKey] = []
    snapshot: bool = False
    """`stored` is the whole inventory, which replaces everything known before."""


class StepOutputs(Message, frozen=True, tag="outputs"):
    """The tokens of one step, for all sequences of one gateway."""

    worker: WorkerRef
    outputs: list[RequestOutput]

    def smaller(self) -> list[StepOutputs]:
        """Return messages to send instead of this one, which is longer than a message may be: its
        halves. One output that is too long by itself ends its request, and says what to do.
        """
        if len(self.outputs) > 1:
            middle = len(self.outputs) // 2
            parts = [self.outputs[:middle], self.outputs[middle:]]
        else:
            parts = [
                [_ended_too_long(each)] for each in self.outputs if each.finish is not _TOO_LONG
            ]
        return [StepOutputs(worker=self.worker, outputs=part) for part in parts]


def _ended_too_long(output: RequestOutput) -> RequestOutput:
    return RequestOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        start=output.start,
        finish=_TOO_LONG,
    )


_TOO_LONG = FinishInfo(
    reason=FinishReason.ERROR,
    failure=Failure.invalid(
        "what this request returns for one step is longer than a message between processes may "
        "be: ask for fewer log-probabilities, or send a shorter prompt"
    ),
)


class DoubtPeers(Message, frozen=True, tag="doubt"):
    """These peers have held resources here for long. The gateway sends `PeerLost` for each that is
    not in the cluster: the first `PeerLost` may have been lost, or the gateway may have restarted.

    Another gateway that sends this hears nothing of these workers, and is sent `PeersHeard`.
    """

    worker: WorkerRef
    peers: list[WorkerRef]


# ------------------------------------------------ between gateways of one cluster


class Booking(_Value, frozen=True, tag="booking"):
    """The predicted use of workers by a request that was placed."""

    request_id: str
    computing: WorkerRef
    """The worker that computes the prompt: a prefill worker, or `decode` itself."""
    decode: WorkerRef
    keys: bytes
    """Keys of all full blocks of the prompt, concatenated: similar requests find the prefix before
    it is stored.
    """
    sources: tuple[BlockSource, ...]
    num_tokens: int
    num_new_tokens: int
    """Tokens to be computed."""
    prefill_s: float
    """Predicted seconds of fetching and computing."""
    ttft_s: float
    num_blocks: int
    """Blocks on decode when the request ends."""


class BookingOver(_Value, frozen=True, tag="booking_over"):
    """A booking has ended, or its prompt is computed (`prefill_only`)."""

    request_id: str
    prefill_only: bool = False


class GatewayNews(Message, frozen=True, tag="gateway"):
    """The bookings and ends of a gateway since its last message, in order. Sent with each change
    and every second.
    """

    gateway: WorkerRef
    gateways: list[WorkerRef]
    """The other gateways it knows."""
    news: list[Booking | BookingOver] = []
    open: list[str] | None = None
    """Sometimes: the ids of all requests it has booked; bookings that are not listed have ended."""
    send_all: bool = False
    """The sender does not know the receiver's bookings and asks for all of them."""
    release: Release = UNNAMED_RELEASE
    turn: float = 0.0
    """The latest turn that it knows to be served: turns of all gateways are compared by engines."""


class PeersHeard(Message, frozen=True, tag="heard"):
    """The answer to `DoubtPeers` of another gateway: the workers that are heard here, and not."""

    gateway: WorkerRef
    heard: list[WorkerRef] = []
    unheard: list[WorkerRef] = []


# ---------------------------------------------------------------- to any worker


class Welcome(Message, frozen=True, tag="welcome"):
    """The gateway knows this worker; it also repeats the questions of a restarted gateway."""

    gateway: WorkerRef
    kvstore: WorkerRef | None
    """The pool of the worker's own node, if it runs."""
    send_snapshot: bool
    """Answer with `BlockEvents(snapshot=True)`."""
    gateways: list[WorkerRef] = []
    """Other gateways of this cluster: send a hello to them too."""
    relieved: bool = False
    """Others of its role have taken its place, and what they go on with: when it wants to leave, it
    may.
    """


class PeerLost(Message, frozen=True, tag="peer_lost"):
    """A worker is gone for good: what it held, wrote or read is reclaimed now."""

    worker: WorkerRef


class Drain(Message, frozen=True, tag="drain"):
    """Finish what runs, to leave. A pool node accepts no new work; an engine goes on until another
    one of its role can take its place.
    """

    next_role: Role | None = msgspec.field(default=None, name="then")
    """Then leave, and come back in this role. Only for prefill and decode."""


class Refused(Answer, frozen=True, tag="refused"):
    """The receiver of a message did not take it: the sender's credential does not allow it, or the
    two cannot work together.
    """

    message: str
    """The type of what was sent, as `PutStart`; of an unknown one its tag."""
    reason: str


class AskCluster(Message, frozen=True, tag="ask_cluster"):
    """Ask a gateway what a process must know to join; answered by `ClusterTold`."""

    asker: WorkerRef
    ticket: int


class ClusterTold(Answer, frozen=True, tag="cluster_told"):
    """What a gateway was told of its cluster, or decides of it."""

    facts: bytes
    """The bytes of `launch.cluster.facts.encode_facts`; no state machine reads them."""
    members: list[tuple[Role, str]] = []
    """The role and node of each worker, and the ids of gateways."""


class WhoAreYou(Message, frozen=True, tag="who"):
    """The gateway has restarted and does not know the sender of a message: send a hello again."""

    gateway: WorkerRef


# ---------------------------------------------------------------- to prefill


class BlockSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fetch the blocks [first, stop) of the prompt from this pool node."""

    store: WorkerRef
    first: int
    stop: int
    others: list[WorkerRef] = []
    """Pool nodes that hold this run or its beginning, to ask when `store` fails."""


class RequestTask(Message, frozen=True, kw_only=True):
    """The base of the tasks that carry a request. The large settings of its sampling may be named
    instead: then `request.sampling` has their defaults, and the worker puts them back
    (`instance.kept_settings`), or turns the task away when it does not have them.
    """

    request: GenerateRequest
    attempt: int
    gateway: WorkerRef
    output_tokens: list[int] = []
    """Already delivered by an earlier attempt."""
    sources: list[BlockSource] = []
    """Where blocks of the prompt lie, for the worker that computes it."""
    turn: float = 0.0
    """Place in the order: smaller goes first."""
    named: dict[str, SettingName] = {}
    """Field of `SamplingParams` -> the setting that belongs there."""
    settings: LargeSettings | None = None
    """Those of the named settings that this worker is sent for the first time."""


class PrefillTask(RequestTask, frozen=True, kw_only=True, tag="prefill"):
    """Compute the KV of prompt + `output_tokens`, push it to `decode`, and sample one token."""

    decode: WorkerRef
    num_replicate_blocks: int = 0
    """This many leading blocks are hot: put them into the own node's pool even if reused."""


class Reserved(Message, frozen=True, tag="reserved"):
    """Decode has reserved pages: push these blocks, which it does not hold already."""

    request_id: str
    attempt: int
    decode: WorkerRef
    parts: list[KvPart]
    """One for each memory that is to get some of them."""


# ---------------------------------------------------------------- to decode


class DecodeTask(RequestTask, frozen=True, kw_only=True, tag="decode"):
    """Reserve pages for the KV from `prefill`; without `prefill` do the whole request here."""

    prefill: WorkerRef | None


class KVReady(Message, frozen=True, tag="kv_ready"):
    """All pushed blocks have arrived and the first token is sampled: join the batch."""

    request_id: str
    attempt: int
    prefill: WorkerRef
    token: int
    num_cached_tokens: int
    pushed: bool = True
    """False: nothing was pushed, because decode had no room in time; take the blocks from the pool
    or compute them.
    """
    sources: list[BlockSource] = []
    """The places of the blocks when they were not pushed."""
    checksums: list[int] = []
    """Of each pushed block, in the order of `Reserved.indexes`; none: do not compare."""
    spans: tuple[WorkSpan, ...] = ()
    """Of a traced request: the push, for decode to pass on with its first output."""


class BlocksPushed(Message, frozen=True, tag="blocks_pushed"):
    """Some blocks have arrived whole: compare them now, so that few are left when `KVReady` comes,
    which names these once more.
    """

    request_id: str
    attempt: int
    indexes: list[int]
    checksums: list[int]
    """Of each, see `kvstore.block_checksum`."""


class PushEnded(Message, frozen=True, tag="push_ended"):
    """Prefill will not write into the reserved pages any more: they may be freed."""

    request_id: str
    attempt: int
    prefill: WorkerRef
    failed: bool = False
    """Decode must tell the gateway that this attempt failed; prefill has not."""


# ---------------------------------------------------------------- to prefill and decode


class AbortTask(Message, frozen=True, tag="abort"):
    """Drop this request. There is no answer; resources are freed as soon as transfers allow."""

    request_id: str
    attempt: int
    """Applies to all attempts up to this one."""


class PutGranted(Answer, frozen=True, tag="put_granted"):
    """Room for the blocks of a `PutStart`; keys already stored (or without room) are left out."""

    store: WorkerRef
    keys: list[BlockKey]
    places: BlockPlaces


class PinGranted(Answer, frozen=True, tag="pin_granted"):
    """The leading blocks of a `PinBlocks` that are present; pinned until `Unpin`."""

    store: WorkerRef
    num_blocks: int
    places: BlockPlaces
    checksums: list[int] = []
    """Of each block, 0 where it is not known; empty: none is known."""
    more: bool = False
    """The blocks that follow are on this node's disk: unpin these, then ask for those."""
    num_from_ssd: int = 0
    """How many of the blocks came up from this node's disk and have not been read since."""


# ---------------------------------------------------------------- to kvstore


class ChainHead(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a chain before those that a message names. The same request uses them, wherever
    its worker found them: so they count as used too, and are evicted after the blocks that follow
    them.
    """

    keys: list[BlockKey] = []
    num_counted: int = 0
    """This many leading blocks were already counted as used by this request."""

    @property
    def counted(self) -> frozenset[BlockKey]:
        """The blocks already counted."""
        return frozenset(self.keys[: self.num_counted])


NO_HEAD = ChainHead()


class PutStart(Message, frozen=True, tag="put_start"):
    """Ask for room to write these blocks. Two-phase: a block is not visible before its `PutEnd`.
    Without keys it only reports that `head` was used.
    """

    writer: WorkerRef
    ticket: int
    keys: list[BlockKey]
    tenant: str = ""
    head: ChainHead = NO_HEAD


class PutEnd(Message, frozen=True, tag="put_end"):
    """The writes of a ticket have ended: `written` are complete, `dropped` are not."""

    writer: WorkerRef
    ticket: int
    written: list[BlockKey] = []
    dropped: list[BlockKey] = []
    checksums: list[int] = []
    """Of each block in `written`, if the writer has computed them; else empty."""


class PinBlocks(Message, frozen=True, tag="pin"):
    """Ask to read a run of blocks; they stay until `Unpin` or the reader is lost. An engine that
    leaves is asked, too.
    """

    reader: WorkerRef
    ticket: int
    keys: list[BlockKey]
    head: ChainHead = NO_HEAD


class Unpin(Message, frozen=True, tag="unpin"):
    """The read has ended."""

    reader: WorkerRef
    ticket: int
    corrupt: list[BlockKey] = []
    """Blocks that did not match their checksums."""


class Replicate(Message, frozen=True, tag="replicate"):
    """Copy these blocks, a run of one chain, from another pool node. The copies show in block
    events; an `asker` is answered with `TakenOver`.
    """

    source: WorkerRef
    keys: list[BlockKey]
    tenant: str = ""
    asker: WorkerRef | None = None
    ticket: int = 0


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Load this run from SSD if there is room, because a reader comes soon. There is no answer."""

    reader: WorkerRef
    ticket: int
    keys: list[BlockKey]


class StopPrefetch(Message, frozen=True, tag="stop_prefetch"):
    """The reader of this run does not come; blocks that are not being loaded stay on SSD."""

    reader: WorkerRef
    ticket: int
