"""One request on a decode worker: plain state, changed only by `decode.worker`. Also the rules by
which one more request has room: pure arithmetic over blocks.

WAITING ──► RESERVED ──► COMPARING ──► RUNNING ──► gone      KV pushed by a prefill worker
   │           │             │ (with checksums)
   │           │             └──► GATHERING                  (what was pushed is not what was sent)
   │           └───────► ABORTED ──► gone        (pages are kept until prefill has stopped writing)
   └──────► GATHERING ─► RUNNING ──► gone        whole request here, or KV left in the pool
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from mooncake.base.kv_layout import KvLayout
from mooncake.base.messages import BlockSource, RequestTask
from mooncake.instance.job_table import Job


class Comparison:
    """Compares the blocks that prefill pushed with the checksums of what it sent. A block is
    compared once, when its checksum comes: ahead of `KVReady` or with it.
    """

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        """Checksum of each block that is to be compared, by index."""
        self._num_open = 0
        self._wrong: set[int] = set()

    @property
    def open(self) -> bool:
        """True if the checksums of some blocks are not known yet on this side."""
        return self._num_open > 0

    @property
    def num_compared(self) -> int:
        return len(self._sent) - self._num_open

    @property
    def wrong(self) -> list[int]:
        """The indexes of blocks that differ from what was sent, in order."""
        return sorted(self._wrong)

    def ask(self, indexes: Sequence[int], checksums: Sequence[int]) -> list[int]:
        """Record what was sent. Return the indexes of blocks to hash here, for `found`."""
        new = {
            index: checksum
            for index, checksum in zip(indexes, checksums, strict=False)
            if index not in self._sent
        }
        self._sent.update(new)
        self._num_open += len(new)
        return list(new)

    def found(self, indexes: Sequence[int], checksums: Sequence[int]) -> None:
        """Record the checksums of what lies here."""
        self._num_open -= len(indexes)
        self._wrong.update(
            index
            for index, checksum in zip(indexes, checksums, strict=True)
            if checksum != self._sent[index]
        )


class Stage(Enum):
    """The stage of a request on a decode worker; see the module's picture."""

    WAITING = "waiting"
    RESERVED = "reserved"
    COMPARING = "comparing"
    ABORTED = "aborted"
    GATHERING = "gathering"
    RUNNING = "running"


class DecodeJob(Job):
    """State of one task."""

    def __init__(self, sequence_id: int, task: RequestTask, layout: KvLayout) -> None:
        super().__init__(sequence_id, task, layout)
        self.stage = Stage.WAITING
        self.local = task.prefill is None
        """True if no prefill worker pushes KV: gather what is cached and compute the rest here."""
        self.sources: list[BlockSource] = task.sources if self.local else []
        self.num_passed = 0
        """How many later requests were given room before this one."""
        self.num_given = 0
        """How many tokens were known when the engine began to run it."""
        self.grant: int | None = None
        """The grant by which prefill may write to reserved pages, while it may."""
        self.num_matched = 0
        """The number of leading `pages` that came from this worker's cache. The others are
        reserved, until it runs.
        """
        self.comparison = Comparison()
        self.asked_s = 0.0
        """When prefill was last told about the reserved pages."""
        self.num_blocks_put = 0
        """How many leading blocks are in a pool already, or on their way to one."""
        self.first_own = 0
        """The first block that this node's pool may hold. Blocks before it were pushed by prefill
        and lie in the pool of prefill's node.
        """

    @property
    def reserved_pages(self) -> list[int]:
        """The pages held for KV to come. Those of a sequence that runs are the engine's."""
        return [] if self.stage is Stage.RUNNING else self.pages

    def take_sampled(self, token: int) -> None:
        """Take the token that prefill sampled. The prompt's log-probabilities, if wanted, went to
        the gateway with it.
        """
        self.output_tokens.append(token)
        self.prompt_logprobs = None


def has_room(num_needed: int, num_available: int, num_running: int) -> bool:
    """Return whether `num_needed` pages may be reserved now.

    Every running sequence keeps one page to grow into, so a reservation never forces a preemption
    at once.
    """
    return num_needed + num_running <= num_available


def may_reserve(num_needed: int, num_reserved: int, num_total: int) -> bool:
    """Return whether a request may hold `num_needed` pages while prefill computes its prompt.

    Such pages cannot be taken back. So all of them together may take half of the pages, except for
    a single larger request. The rest belongs to running sequences, which yield to a tenant or class
    below its share.
    """
    half = num_total // 2
    return num_reserved + num_needed <= half or num_reserved <= half < num_needed


def can_ever_fit(num_blocks: int, num_total: int) -> bool:
    """Return whether a request of `num_blocks` blocks fits an otherwise empty worker of `num_total`
    pages, with one page to grow into.
    """
    return num_blocks + 1 <= num_total


MAX_PASSED = 32
"""Requests that may pass a waiting one that might run before resting pages return."""
MAX_WAITING_LOOKED_AT = 16
"""After this many requests without room, no further one is considered."""


def may_be_passed(
    num_needed: int,
    num_available: int,
    num_resting: int,
    num_running: int,
    num_total: int,
    num_passed: int,
) -> bool:
    """Return whether requests that fit may pass one that does not fit.

    They may if it waits for resting pages, to which a lost peer might still write. If it cannot run
    before these return, any number may pass. Once the pages are back, no request passes, so
    each delays it by no more than its own time. If it could also run when others end, `MAX_PASSED`
    may pass.
    """
    if num_resting == 0:
        return False
    if not can_ever_fit(num_needed, num_total - num_resting):
        return True
    return num_passed < MAX_PASSED and has_room(
        num_needed, num_available + num_resting, num_running
    )
