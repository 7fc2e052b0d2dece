"""One request on a decode worker: plain state, moved only by `decode.worker`.

WAITING ──► RESERVED ──► RUNNING ──► gone        KV pushed by a prefill worker
   │           └───────► ABORTED ──► gone        (pages rest until prefill has stopped writing)
   └──────► GATHERING ─► RUNNING ──► gone        whole request here, or KV left in the pool
"""

from __future__ import annotations

from enum import Enum

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import BlockSource, DecodeTask
from mooncake.engine.sequence import Sequence
from mooncake.instance.reuse import PrefixReuse


class Stage(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    ABORTED = "aborted"
    GATHERING = "gathering"
    RUNNING = "running"


class DecodeJob:
    """State of one `DecodeTask`."""

    def __init__(self, order: DecodeTask, keys: list[BlockKey]) -> None:
        self.order = order
        self.keys = keys
        """Of all full blocks of what must be in the KV before the next token."""
        self.stage = Stage.WAITING
        self.output_tokens = list(order.output_tokens)
        self.sources: list[BlockSource] = order.sources
        self.local = order.prefill is None
        """Nobody pushes: gather what is cached, compute the rest here."""
        self.pages: list[int] = []
        """Held for the KV to come: blocks of this worker's cache first, then reserved pages."""
        self.num_matched = 0
        """Of these pages, those that came from this worker's cache."""
        self.asked_s = 0.0
        """When prefill was last told of them."""
        self.reuse: PrefixReuse | None = None
        self.sequence: Sequence | None = None
        self.num_blocks_put = 0
        self.first_own = 0
        """The first block that is in this node's pool, if it keeps what it is given: those that
        prefill pushed are in its own.
        """
        self.num_counted = 0
        """Leading blocks that the pool has been told of as used."""
        """Leading blocks that are in a pool already, or on their way."""

    @property
    def request_id(self) -> str:
        return self.order.request.request_id

    @property
    def attempt(self) -> int:
        return self.order.attempt

    def rank(self) -> tuple[int, float]:
        """Return its place in the line for room: smaller goes first."""
        return self.order.request.priority.order, self.order.turn

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV prefill pushes."""
        return len(self.order.request.prompt_tokens) + len(self.order.output_tokens)
