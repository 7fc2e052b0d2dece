"""The messages between workers, grouped by receiver: tagged structs, one codec (`rpc.codec`), no
pickle.

Conventions: `attempt` counts the placements of one request; a message of an older attempt is
ignored. A worker is named by a `WorkerRef`; its `epoch` is new at every start. Every message that
needs an answer carries the `WorkerRef` to answer to and a `ticket`; the `Answer` repeats both.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from mooncake import __version__
from mooncake.base.blocks import BlockKey
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.kv_layout import BlockPlaces, KvPart, SegmentRef
from mooncake.base.large_settings import LargeSettings, SettingName
from mooncake.base.request import (
    Failure,
    FinishInfo,
    FinishReason,
    GenerateRequest,
    RequestOutput,
    WorkSpan,
)

PROTOCOL_VERSION = 8
"""The version of the protocol. It grows with each change that an older release would misread."""
OLDEST_PROTOCOL_VERSION = 8
"""The oldest protocol version with which this release works together, in both directions."""


class Role(str, Enum):
    """The role of a process in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    GATEWAY = "gateway"
    CLIENT = "client"
    """Uses the pool and serves no requests."""
    EXPERTS = "experts"
    """Holds routed experts for decode workers, and gets no requests itself."""


class Tier(str, Enum):
    """Where a replica of a block lies, the nearest place first."""

    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"
    OBJECT = "object"
    """A bucket of an object store, which several nodes may share."""

    @property
    def is_below_dram(self) -> bool:
        """True if a pool node has to load blocks from here before they are read."""
        return self in (Tier.SSD, Tier.OBJECT)

    @property
    def nearness(self) -> int:
        """The place in the order of the tiers; 0 is the nearest."""
        return _TIERS.index(self)


_TIERS = tuple(Tier)


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all messages."""


class Answer(Message, frozen=True):
    """The base of answers to a message with a ticket."""

    asker: WorkerRef
    """Tickets begin anew with each boot, so another boot at the same address ignores the answer."""
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
"""The release of a process that names none."""


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
    """The duration of the slowest stage, where a step goes through several."""
    num_streams: int = 0
    """The sequences that compute one token after their last, not a chunk of a prompt. The fields
    above include them, and so do the two below with the tokens that they compute and attend to.
    """
    num_stream_tokens: int = 0
    """One each, and their drafts."""
    num_stream_context_tokens: int = 0

    def of_streams(self) -> CostSample:
        """Return the sample of a step whose sequences were all streams."""
        return msgspec.structs.replace(
            self,
            num_streams=self.num_sequences,
            num_stream_tokens=self.num_new_tokens,
            num_stream_context_tokens=self.num_context_tokens,
        )


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
    max_gap_s: float | None = None
    """An engine plans its steps by this and the next two; see `EngineConfig`."""
    max_gap_is_target: bool = False
    first_token_s: float | None = None
    num_stages: int = 1
    """The number of stages that each step of an engine goes through, one after the other."""
    expert_group: str = ""
    """An id common to all workers that share routed experts: when one of them ends, all of them do.
    Empty: the worker has experts of its own.
    """
    profile: list[CostSample] = []
    """Steps measured at start; the Conductor fits its cost models to them."""
    health_url: str = ""
    """The address where probes ask the worker's process; empty for a thread of the gateway's
    process.
    """
    release: Release = UNNAMED_RELEASE
    transports: list[str] = []
    """The transports by which it moves KV to and from other processes."""
    mode: ClusterMode = ClusterMode()
    """The mode in which it was told to come back; that of a new process is empty."""


class Asleep(Message, frozen=True, tag="asleep"):
    """An engine sleeps: it holds no pages and is no member. It repeats this until it is woken. The
    gateway answers with `Welcome`, which names other gateways.
    """

    worker: WorkerRef
    role: Role
    node_id: str
    host: str
    pid: int
    level: int
    """1: its weights are in DRAM. 2: they are dropped, also where level 1 was asked for and this
    worker cannot keep them.
    """
    mode: ClusterMode
    """The mode in which it was told to sleep."""
    health_url: str = ""


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
    """The worker wants to leave, so the gateway gives it no work that others can do."""
    lends: bool = False
    """The engine wants to leave. Until it is relieved, others can read its blocks like a pool
    node's.
    """
    counters: dict[str, float] = {}
    """Counts since start, by name (`blocks_fetched`, `preemptions`, …), for /metrics."""
    expert_rows: list[int] = []
    """Rows that this worker computed for each routed expert in the last window, over all layers.
    Empty when the worker holds all experts itself.
    """


class LoadReport(Message, frozen=True, tag="load"):
    """The heartbeat, sent every `report_interval_s`."""

    worker: WorkerRef
    load: WorkerLoad
    samples: list[CostSample] = []
    """Steps measured since the last report (at most 64)."""
    block_nos: dict[Tier, int] = {}
    """The number of the last `BlockEvents` of each tier. A gap shows that events were lost."""
    clock_s: float = 0.0
    """The time on the worker's own clock. The times of its `WorkSpan`s are by the same clock."""
    fetched: list[str] = []
    """Requests that have ended their fetches since the last report (at most 1,024). The others are
    known by their first tokens.
    """


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
        halves. An output that is too long by itself becomes an error that says what to do.
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
    """The sender names peers that have held its resources for long. The gateway sends `PeerLost`
    for each that is not in the cluster. The first `PeerLost` may have been lost, or the gateway may
    have restarted.

    A gateway also sends it to another gateway when it hears nothing of these workers; `PeersHeard`
    answers.
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
    """The keys of all full blocks of the prompt, concatenated. Similar requests find the prefix by
    them before it is stored.
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
    """Sent now and then: the ids of all requests that it has booked. Other bookings have ended."""
    send_all: bool = False
    """The sender does not know the receiver's bookings and asks for all of them."""
    release: Release = UNNAMED_RELEASE
    turn: float = 0.0
    """The latest turn that it knows to be served. Engines compare the turns of all gateways."""
    offered: list[float] = []
    """What it was asked for since it started, as sums (`scheduler.scaling.demand.Offered`)."""
    mode: ClusterMode = ClusterMode()


class PeersHeard(Message, frozen=True, tag="heard"):
    """The answer to another gateway's `DoubtPeers`: which of the workers this gateway hears
    from.
    """

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
    """Other workers of its role have taken its place and its work, so it may leave when it wants
    to.
    """


class PeerLost(Message, frozen=True, tag="peer_lost"):
    """A worker is gone for good. The receiver reclaims at once what that worker held, wrote or
    read. A worker to which this is said of itself may have been cut off.
    """

    worker: WorkerRef
    replaced: bool = False
    """Said to `worker` itself: another one has its name now."""


class Drain(Message, frozen=True, tag="drain"):
    """Finish the running work, then leave. A pool node accepts no new work. An engine goes on until
    another one of its role can take its place.
    """

    next_role: Role | None = msgspec.field(default=None, name="then")
    """Leave and come back in this role. Only for prefill and decode."""


class Restart(Message, frozen=True, tag="restart"):
    """Finish the running work, leave, and come back as `mode` says: awake or asleep, over its
    weights. Repeated until it takes effect.
    """

    worker: WorkerRef
    """The boot that is meant; a later one ignores it."""
    mode: ClusterMode


class NextLife(msgspec.Struct, frozen=True):
    """How a worker comes back after it has left; it travels inside a process only."""

    role: Role | None = None
    """The worker's new role; None: it keeps its role."""
    mode: ClusterMode | None = None
    """The new mode of the cluster; None: the mode stays."""


class CheckWeights(Message, frozen=True, tag="check_weights"):
    """Ask an engine that sleeps whether it could serve the checkpoint in a directory of its
    machine. It reads names and shapes, and hashes files that were not hashed before.
    """

    asker: WorkerRef
    ticket: int
    model: str
    revision: str = ""
    """The revision that others have found there."""
    lenders: list[WorkerRef] = []
    """Engines that lend these weights to one without files; empty: only files are looked for."""


class WeightsChecked(Answer, frozen=True, tag="weights_checked"):
    """The answer to `CheckWeights`."""

    worker: WorkerRef
    revision: str = ""
    fingerprint: str = ""
    """The fingerprint of the KV layout under these weights."""
    error: str = ""
    """Why it cannot serve them; empty: it can."""
    borrows: bool = False
    """True if the engine has no files of the weights, and can read those of another engine."""


class BorrowWeights(Message, frozen=True, tag="borrow_weights"):
    """Ask an engine to let us read the files of the weights that it serves, or has checked to serve
    them next.
    """

    asker: WorkerRef
    ticket: int
    revision: str
    """The revision of the weights that are wanted."""


class LentFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of weights that may be read from registered memory, from the region's beginning."""

    name: str
    num_bytes: int
    region: int
    digest: str
    """The file's digest; the revision of the weights is made of all digests."""
    sums: bytes
    """The checksums of its pieces, one behind the other."""


class WeightsLent(Answer, frozen=True, tag="weights_lent"):
    """The answer to `BorrowWeights`."""

    lender: str
    """The id of the engine."""
    segment: SegmentRef | None = None
    """Where the files are; None: nothing is lent."""
    files: list[LentFile] = []
    error: str = ""
    """Why nothing is lent."""


class Refused(Answer, frozen=True, tag="refused"):
    """The receiver of a message did not take it: the sender's credential does not allow it, or the
    two releases cannot work together.
    """

    message: str
    """The type of the refused message, such as `PutStart`; the tag where the type is unknown."""
    reason: str


class AskCluster(Message, frozen=True, tag="ask_cluster"):
    """Ask a gateway what a process must know to join; answered by `ClusterTold`."""

    asker: WorkerRef
    ticket: int


class ClusterTold(Answer, frozen=True, tag="cluster_told"):
    """The facts that a gateway was given about its cluster, or has decided."""

    facts: bytes
    """The bytes of `launch.cluster.facts.encode_facts`; no state machine reads them."""
    members: list[tuple[Role, str]] = []
    """The role and node of each worker, and the ids of gateways."""
    engines: list[WorkerRef] = []
    """The workers that have weights."""


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
    """Pool nodes that hold this run or its beginning. Ask them when `store` fails."""
    tier: Tier = Tier.DRAM
    """The nearest tier in which `store` had these blocks when they were chosen."""


class Reserved(Message, frozen=True, tag="reserved"):
    """Decode has reserved pages: push these blocks, which it does not hold already."""

    request_id: str
    attempt: int
    decode: WorkerRef
    parts: list[KvPart]
    """One part for each memory that gets some of the blocks."""


# ---------------------------------------------------------------- to decode


class KVReady(Message, frozen=True, tag="kv_ready"):
    """All pushed blocks have arrived and the first token is sampled: join the batch."""

    request_id: str
    attempt: int
    prefill: WorkerRef
    token: int
    num_cached_tokens: int
    pushed: bool = True
    """False: nothing was pushed, because decode had no room in time. Decode takes the blocks from
    the pool or computes them.
    """
    sources: list[BlockSource] = []
    """Where the blocks lie when they were not pushed."""
    checksums: list[int] = []
    """The checksum of each pushed block, in the order of `Reserved.indexes`. Empty: compare
    none.
    """
    spans: tuple[WorkSpan, ...] = ()
    """The push, if the request is traced. Decode passes it on with its first output."""


class BlocksPushed(Message, frozen=True, tag="blocks_pushed"):
    """Some blocks have arrived whole. Decode compares them now, so that few are left for `KVReady`,
    which names them again.
    """

    request_id: str
    attempt: int
    indexes: list[int]
    checksums: list[int]
    """The checksum of each of these blocks (`kvstore.block_checksum`)."""


class PushEnded(Message, frozen=True, tag="push_ended"):
    """Prefill will not write into the reserved pages any more: they may be freed."""

    request_id: str
    attempt: int
    prefill: WorkerRef
    failed: bool = False
    """This attempt has failed, and decode must tell the gateway, because prefill has not."""


# ---------------------------------------------------------------- to prefill and decode


class RequestTask(Message, frozen=True, kw_only=True, tag="task"):
    """Serve a request. The `prefill` worker computes the KV of prompt + `output_tokens`, pushes it
    to `decode` and samples one token. The `decode` worker reserves pages for that KV; without
    `prefill` it does the whole request. Both get the same task.

    A task may name the large settings of its sampling instead of carrying them. Then
    `request.sampling` has the defaults for them. The worker puts the settings back
    (`large_settings.KeptSettings`), or turns the task away when it does not have them.
    """

    request: GenerateRequest
    attempt: int
    gateway: WorkerRef
    decode: WorkerRef
    prefill: WorkerRef | None = None
    output_tokens: list[int] = []
    """Tokens that an earlier attempt has already delivered."""
    sources: list[BlockSource] = []
    """Where the worker that computes the prompt finds blocks of it."""
    turn: float = 0.0
    """The request's place in the order: the smallest goes first."""
    num_replicate_blocks: int = 0
    """This many leading blocks are hot: prefill puts them into its node's pool even when they were
    reused.
    """
    named: dict[str, SettingName] = {}
    """The name of the setting of each field of `SamplingParams` that is not in the request
    itself.
    """
    settings: LargeSettings | None = None
    """Named settings that this worker gets for the first time."""


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
    """The checksum of each block, 0 where it is not known. Empty: none is known."""
    more: bool = False
    """The blocks after these are on this node's disk or in its bucket. Unpin these, then ask for
    the others.
    """
    num_from_ssd: int = 0
    """How many of the blocks were loaded from this node's disk and have not been read since."""
    num_from_object: int = 0
    """The same count for its bucket."""


# ---------------------------------------------------------------- to kvstore


class ChainHead(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a chain before those that a message names. The same request uses them, wherever
    its worker found them. So they count as used too, and are evicted after the blocks that follow
    them.
    """

    keys: list[BlockKey] = []
    num_counted: int = 0
    """This request has already counted this many leading blocks as used."""
    num_kept: int = 0
    """How many leading blocks the request wants kept, of these and those that the message names.
    """
    keep_s: float = 0.0
    """How many seconds these blocks are kept, from now on."""

    @property
    def counted(self) -> frozenset[BlockKey]:
        """The blocks that are already counted."""
        return frozenset(self.keys[: self.num_counted])

    def kept(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the blocks that the request wants kept, when `keys` are those that the message
        names.
        """
        if self.num_kept <= 0 or not self.keep_s > 0:
            return []
        return list(dict.fromkeys([*self.keys, *keys]))[: self.num_kept]


NO_HEAD = ChainHead()


class PutStart(Message, frozen=True, tag="put_start"):
    """Ask for room to write these blocks. Two-phase: a block is not visible before its `PutEnd`. If
    it has no keys, it only reports that `head` was used.
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
    """The checksum of each block in `written` if the writer has computed them, else empty."""


class PinBlocks(Message, frozen=True, tag="pin"):
    """Ask to read a run of blocks. They stay until `Unpin`, or until the reader is lost. An engine
    that leaves accepts this message too.
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
    """Copy these blocks, a run of one chain, from another pool node. For a client the node copies
    from a `source` only that a gateway names. The copies show in block events; an `asker` is
    answered with `TakenOver`.
    """

    source: WorkerRef
    keys: list[BlockKey]
    tenant: str = ""
    asker: WorkerRef | None = None
    ticket: int = 0


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Load this run ahead of its readers, if there is room: a pool node from its SSD, an engine
    from other workers into its pages. There is no answer.
    """

    reader: WorkerRef
    ticket: int
    keys: list[BlockKey]
    sources: list[BlockSource] = []
    """Where an engine reads the run; empty for a pool node."""


class StopPrefetch(Message, frozen=True, tag="stop_prefetch"):
    """The reader of this run does not come; blocks that are not being loaded stay on SSD."""

    reader: WorkerRef
    ticket: int
