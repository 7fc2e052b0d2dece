"""One request on a decode worker: plain state, changed only by `decode.worker`.

WAITING ──► RESERVED ──► COMPARING ──► RUNNING ──► gone      KV pushed by a prefill worker
   │           │             │ (with checksums)
   │           │             └──► GATHERING                  (what was pushed is not what was sent)
   │           └───────► ABORTED ──► gone        (pages are kept until prefill has stopped writing)
   └──────► GATHERING ─► RUNNING ──► gone        whole request here, or KV left in the pool
"""

from __future__ import annotations

from enum import Enum

from mooncake.base.kv_layout import KvLayout
from mooncake.base.messages import BlockSource, DecodeTask
from mooncake.decode.comparison import Comparison
from mooncake.instance.job_table import Job


class Stage(Enum):
    """The stage of a request on a decode worker; see the module's picture."""

    WAITING = "waiting"
    RESERVED = "reserved"
    COMPARING = "comparing"
    ABORTED = "aborted"
    GATHERING = "gathering"
    RUNNING = "running"


class DecodeJob(Job[DecodeTask]):
    """State of one `DecodeTask`."""

    def __init__(self, task: DecodeTask, layout: KvLayout) -> None:
        super().__init__(task, layout)
        self.stage = Stage.WAITING
        self.output_tokens = list(task.output_tokens)
        self.sources: list[BlockSource] = task.sources
        self.local = task.prefill is None
        """True if no prefill worker pushes KV: gather what is cached and compute the rest here."""
        self.pages: list[int] = []
        """The pages held for the KV to come: blocks of this worker's cache first, then reserved
        pages.
        """
        self.num_passed = 0
        """How many later requests were given room before this one."""
        self.grant: int | None = None
        """The grant by which prefill may write to reserved pages, while it may."""
        self.num_matched = 0
        """The number of leading `pages` that came from this worker's cache."""
        self.comparison = Comparison()
        self.asked_s = 0.0
        """When prefill was last told about the reserved pages."""
        self.num_blocks_put = 0
        """How many leading blocks are in a pool already, or on their way to one."""
        self.first_own = 0
        """The first block that this node's pool may hold. Blocks before it were pushed by prefill
        and lie in the pool of prefill's node.
        """
