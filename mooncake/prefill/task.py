"""One prefill in progress: plain state, moved only by `prefill.worker`.

GATHERING ──► COMPUTING ──► PUSHING ──► SETTLING ──► gone
(prefix)      (engine)      (decode's    (only the pool's
                             pages)       copy is missing)
"""

from __future__ import annotations

from enum import Enum

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import PrefillTask
from mooncake.engine.sequence import Sequence
from mooncake.instance.push import Destination, Push
from mooncake.instance.reuse import PrefixReuse


class Stage(Enum):
    GATHERING = "gathering"
    COMPUTING = "computing"
    PUSHING = "pushing"
    SETTLING = "settling"


class PrefillJob:
    """State of one `PrefillTask`."""

    def __init__(self, order: PrefillTask, keys: list[BlockKey], push: Push) -> None:
        self.order = order
        self.keys = keys
        """Of all full blocks."""
        self.push = push
        self.stage = Stage.GATHERING
        self.reuse: PrefixReuse | None = None
        self.sequence: Sequence | None = None
        self.decode: Destination | None = None
        """The pages decode reserved, once it said so."""
        self.num_final = 0
        """Leading blocks that the push knows of and that need no more computing."""
        self.put_asked = False
        self.num_cached_tokens = 0
        self.num_counted = 0
        """Leading blocks that the own pool has been told of as used."""
        self.token: int | None = None
        self.sampled_s = 0.0
        self.handed_over = False
        """Decode was told to go on: it waits for no `PushEnded`."""
        self.ended = False
        """Aborted or failed: whatever still comes for it is ignored."""

    @property
    def request_id(self) -> str:
        return self.order.request.request_id

    @property
    def attempt(self) -> int:
        return self.order.attempt

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV decode needs."""
        return len(self.order.request.prompt_tokens) + len(self.order.output_tokens)
