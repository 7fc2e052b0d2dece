"""One prefill in progress: plain state, changed only by `prefill.worker`.

GATHERING ──► COMPUTING ──► PUSHING ──► SETTLING ──► gone
(prefix)      (engine)      (decode's    (only the pool's
                             pages)       copy is missing)
"""

from __future__ import annotations

from enum import Enum

from mooncake.base.kv_layout import KvLayout
from mooncake.base.messages import PrefillTask
from mooncake.instance.job_table import Job
from mooncake.instance.push import Destination, Push


class Stage(Enum):
    """The stage of a prefill; see the module's picture."""

    GATHERING = "gathering"
    COMPUTING = "computing"
    PUSHING = "pushing"
    SETTLING = "settling"


class PrefillJob(Job[PrefillTask]):
    """State of one `PrefillTask`."""

    def __init__(self, task: PrefillTask, layout: KvLayout, push: Push) -> None:
        super().__init__(task, layout)
        self.push = push
        self.stage = Stage.GATHERING
        self.decode: Destination | None = None
        """The pages that decode reserved, once its message has come."""
        self.num_final = 0
        """Leading blocks whose KV is complete and that have been given to the push."""
        self.put_asked = False
        self.num_cached_tokens = 0
        self.token: int | None = None
        self.sampled_s = 0.0
        self.handed_over = False
        """True once decode got `KVReady`: it waits for no `PushEnded`."""
        self.ended = False
        """True if it was aborted or failed: events that still come for it are ignored."""
