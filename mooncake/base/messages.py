"""Everything that workers say to each other, grouped by receiver. Tagged structs, one codec
(`rpc.codec`), no pickle.

Conventions: `attempt` counts placements of one request; a message of an older attempt is ignored.
A worker is named by `WorkerRef`; its `epoch` is fresh at every start, so nothing that was said to
a dead worker reaches its successor. Every message that wants an answer carries the `WorkerRef` to
answer to and a `ticket` the answer repeats.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import BlockPlaces
from mooncake.base.request import (
    Failure,
    FinishReason,
    GenerateRequest,
    TokenLogprobs,
)

PROTOCOL_VERSION = 3


class Role(str, Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    GATEWAY = "gateway"
    CLIENT = "client"
    """Uses the pool, serves nobody."""


class Tier(str, Enum):
    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Root of all messages."""


class _Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Root of what travels in messages and is told apart by its tag."""


class WorkerRef(msgspec.Struct, frozen=True, array_like=True):
    """One boot of one worker and where messages reach it."""

    worker_id: str
    epoch: str
    address: str


def is_former(worker: WorkerRef, present: WorkerRef) -> bool:
    """Say whether `worker` is an earlier life of `present`."""
    return worker.worker_id == present.worker_id and worker.epoch != present.epoch


# ---------------------------------------- to the gateway (and its Conductor)


class CostSample(msgspec.Struct, frozen=True, array_like=True):
    """One measured step: what it held and how long it took."""

    num_new_tokens: int
    num_context_tokens: int
    """Sum over sequences of the tokens each new token attends to before this step."""
    num_sequences: int
    seconds: float


class WorkerHello(Message, frozen=True, tag="hello"):
    """A worker is up. Sent at start, again whenever the gateway asks or was lost, until `Welcome`
    comes.
    """

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
    profile: list[CostSample] = []
    """Measured at start; the Conductor fits its cost models to it."""


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
    """It takes no new work."""
    counters: dict[str, float] = {}
    """Monotonic counts since start, by name (`blocks_fetched`, `preemptions`, …); for /metrics."""


class LoadReport(Message, frozen=True, tag="load"):
    """Sent every `report_interval_s`: the heartbeat."""

    worker: WorkerRef
    load: WorkerLoad
    samples: list[CostSample] = []
    """Steps measured since the last report (at most 64)."""
    block_nos: dict[Tier, int] = {}
    """Number of the last block events of each tier, so that the loss of the last ones shows too."""


class BlockEvents(Message, frozen=True, tag="blocks"):
    """What a worker's memory came to hold or lost, numbered so that a gap shows."""

    worker: WorkerRef
    tier: Tier
    sequence_no: int
    stored: list[BlockKey] = []
    removed: list[BlockKey] = []
    snapshot: bool = False
    """`stored` is the whole inventory; forget what was known before."""


class FinishInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a sequence ended on a worker."""

    reason: FinishReason
    stop_token_id: int | None = None
    failure: Failure | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one request, or its end."""

    request_id: str
    attempt: int
    start: int
    """Output position of the first token of `tokens`."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    """With the first output of an attempt: prompt tokens whose KV was reused."""
    finish: FinishInfo | None = None


class StepOutputs(Message, frozen=True, tag="outputs"):
    """The tokens of one step, all sequences in one message."""

    worker: WorkerRef
    outputs: list[RequestOutput]


class DoubtPeers(Message, frozen=True, tag="doubt"):
    """These peers have held something here for long. The gateway says `PeerLost` of each that is
    not in the cluster (any more): its word may have been lost, or the gateway may be a new one.
    """

    worker: WorkerRef
    peers: list[WorkerRef]


# ------------------------------------------------ between gateways of one cluster


class Booking(_Value, frozen=True, tag="booking"):
    """A request was placed: what it takes of its workers, as its gateway foresees it."""

    request_id: str
    computing: WorkerRef
    """Computes the prompt: a prefill worker, or `decode` itself."""
    decode: WorkerRef
    keys: bytes
    """Of all full blocks of the prompt, one after another: siblings find its prefix before it is
    stored.
    """
    sources: tuple[BlockSource, ...]
    num_tokens: int
    num_new_tokens: int
    """To be computed."""
    prefill_s: float
    """Fetching and computing."""
    ttft_s: float
    num_blocks: int
    """Of decode, by the time the request ends."""


class BookingOver(_Value, frozen=True, tag="booking_over"):
    """A booking has ended, or its prompt is computed (`prefill_only`)."""

    request_id: str
    prefill_only: bool = False


class GatewayNews(Message, frozen=True, tag="gateway"):
    """What a gateway did since it last spoke, in order. Sent with each change and every second."""

    gateway: WorkerRef
    gateways: list[WorkerRef]
    """The others it knows."""
    news: list[Booking | BookingOver] = []
    open: list[str] | None = None
    """Now and then: all requests it has on its books, when whatever is not here is over."""
    send_all: bool = False
    """The receiver is new to it: tell of all bookings."""


# ---------------------------------------------------------------- to any worker


class Welcome(Message, frozen=True, tag="welcome"):
    """The gateway knows this worker; it repeats what a restarted gateway must ask for."""

    gateway: WorkerRef
    kvstore: WorkerRef | None
    """The pool of the worker's own node, if it runs."""
    send_snapshot: bool
    """Answer with `BlockEvents(snapshot=True)`."""
    gateways: list[WorkerRef] = []
    """Others that place requests in this cluster: say hello to them too."""


class PeerLost(Message, frozen=True, tag="peer_lost"):
    """A worker is gone for good: whatever it held, wrote or read is reclaimed now."""

    worker: WorkerRef


class Drain(Message, frozen=True, tag="drain"):
    """Take no new work; finish what runs."""

    then: Role | None = None
    """Leave when that is done, and come back in this role. Only for prefill and decode."""


class WhoAreYou(Message, frozen=True, tag="who"):
    """The gateway does not know whom it heard (it has just started): say hello to it again."""

    gateway: WorkerRef


# ---------------------------------------------------------------- to prefill


class BlockSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fetch the blocks [first, stop) of the prompt from that pool node, do not compute them."""

    store: WorkerRef
    first: int
    stop: int
    others: list[WorkerRef] = []
    """They hold that run too, or its beginning: asked in turn for what `store` does not give."""


class PrefillTask(Message, frozen=True, tag="prefill"):
    """Compute the KV of prompt + `output_tokens`, push it to `decode`, sample one token."""

    request: GenerateRequest
    attempt: int
    gateway: WorkerRef
    decode: WorkerRef
    output_tokens: list[int] = []
    """Already streamed by an earlier attempt."""
    sources: list[BlockSource] = []
    turn: float = 0.0
    """Place among the requests of its class: smaller goes first."""
    num_replicate_blocks: int = 0
    """So many leading blocks are hot: put them into the own node's pool even if reused."""


class Reserved(Message, frozen=True, tag="reserved"):
    """Decode has room: push these blocks there. Blocks it holds already are left out."""

    request_id: str
    attempt: int
    decode: WorkerRef
    indexes: list[int]
    """Positions in the sequence of the blocks in `places`."""
    places: BlockPlaces


# ---------------------------------------------------------------- to decode


class DecodeTask(Message, frozen=True, tag="decode"):
    """Reserve room and wait for the KV from `prefill`, or do the whole request here when there is
    none.
    """

    request: GenerateRequest
    attempt: int
    gateway: WorkerRef
    prefill: WorkerRef | None
    output_tokens: list[int] = []
    sources: list[BlockSource] = []
    """For the whole request done here."""
    turn: float = 0.0
    """Place among the requests of its class: smaller goes first."""


class KVReady(Message, frozen=True, tag="kv_ready"):
    """All pushed blocks have arrived; the first token is sampled: join the batch."""

    request_id: str
    attempt: int
    prefill: WorkerRef
    token: int
    num_cached_tokens: int
    pushed: bool = True
    """False: nothing was pushed (decode had no room in time); take the blocks from the pool or
    recompute.
    """
    sources: list[BlockSource] = []
    """Where the blocks are when not pushed."""


class PushEnded(Message, frozen=True, tag="push_ended"):
    """Prefill will write no more into the reserved pages: they may be freed."""

    request_id: str
    attempt: int
    prefill: WorkerRef
    failed: bool = False
    """Nobody else tells the gateway that this attempt cannot go on: decode must."""


# ---------------------------------------------------------------- to prefill and decode


class AbortTask(Message, frozen=True, tag="abort"):
    """Forget this request. Answered to nobody; resources are freed as soon as transfers allow."""

    request_id: str
    attempt: int
    """All attempts up to this one."""


class PutGranted(Message, frozen=True, tag="put_granted"):
    """Room for blocks asked for by `PutStart`; keys already stored (or no room) are left out."""

    ticket: int
    store: WorkerRef
    keys: list[BlockKey]
    places: BlockPlaces


class PinGranted(Message, frozen=True, tag="pin_granted"):
    """The asked blocks from the first on, as far as they are there; pinned until `Unpin`."""

    ticket: int
    store: WorkerRef
    num_blocks: int
    places: BlockPlaces
    checksums: list[int] = []
    """xxh3-64 of each block where known, 0 where not; empty: of none."""
    more: bool = False
    """Blocks that follow are here too, on a disk: unpin these, then ask for those."""


# ---------------------------------------------------------------- to kvstore


class ChainHead(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a chain before those that a message names. The same request uses them, wherever
    its worker has them from: so they are not taken for cold, and outlive what follows them.
    """

    keys: list[BlockKey] = []
    num_counted: int = 0
    """So many, from the first on, have been counted as used by this request."""

    @property
    def counted(self) -> frozenset[BlockKey]:
        """Those that have."""
        return frozenset(self.keys[: self.num_counted])


NO_HEAD = ChainHead()


class PutStart(Message, frozen=True, tag="put_start"):
    """Ask for room to write these blocks. Two-phase: nobody sees a block before its `PutEnd`.
    Without any it tells that `head` was used.
    """

    writer: WorkerRef
    ticket: int
    keys: list[BlockKey]
    tenant: str = ""
    head: ChainHead = NO_HEAD


class PutEnd(Message, frozen=True, tag="put_end"):
    """Writes of a ticket are over: `written` are whole, all other blocks of the ticket in
    `dropped` are not.
    """

    writer: WorkerRef
    ticket: int
    written: list[BlockKey] = []
    dropped: list[BlockKey] = []
    checksums: list[int] = []
    """xxh3-64 of each block in `written`, from writers that have taken them; or empty."""


class PinBlocks(Message, frozen=True, tag="pin"):
    """Ask to read a run of blocks; they stay until `Unpin` or the reader is lost."""

    reader: WorkerRef
    ticket: int
    keys: list[BlockKey]
    head: ChainHead = NO_HEAD


class Unpin(Message, frozen=True, tag="unpin"):
    """The read is over."""

    reader: WorkerRef
    ticket: int
    corrupt: list[BlockKey] = []
    """Blocks that did not arrive as their checksums say."""


class Replicate(Message, frozen=True, tag="replicate"):
    """Copy these blocks, a run of one chain, from another pool node. Told by block events, and to
    who asks by `TakenOver`.
    """

    source: WorkerRef
    keys: list[BlockKey]
    tenant: str = ""
    asker: WorkerRef | None = None
    ticket: int = 0


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Bring this run up from SSD if there is room: its reader comes soon. Answered to nobody."""

    reader: WorkerRef
    ticket: int
    keys: list[BlockKey]


class StopPrefetch(Message, frozen=True, tag="stop_prefetch"):
    """Nobody comes to read that run; what of it is not on its way stays on SSD."""

    reader: WorkerRef
    ticket: int
