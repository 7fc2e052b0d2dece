"""The limits of one engine. Values only; resolved once by `launch`, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mooncake.base.errors import ConfigError
from mooncake.engine.drafts.drafters import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much one engine may hold and do at a time.

    Raises:
        ConfigError: a value is out of range, or two contradict each other; the key is named.
    """

    num_blocks: int
    """Pages of KV in this engine's memory."""
    max_num_seqs: int
    """Sequences in the running batch."""
    max_batched_tokens: int
    """Tokens computed in one step, over all sequences."""
    max_chunk_tokens: int
    """Largest share of one step that a single sequence gets (`max_batched_tokens` caps it too)."""
    max_model_len: int
    """Prompt plus output tokens of one sequence."""
    max_waiting: int
    """Sequences accepted and not yet running; beyond this `Engine.add` returns False. Preempted
    sequences come back in any case.
    """
    num_homes: int = 1
    """Ranks that share the pages out (decode context parallel), each with as many."""
    block_tokens: int = 64
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 1
    """Steps submitted to the runner and not ended."""
    num_stages: int = 1
    """Through which each step goes, one after the other (pipeline parallel)."""
    in_lockstep: bool = False
    """Whether each step waits for those of other engines, with which this one shares experts."""
    max_gap_s: float | None = None
    """Between two tokens of a stream, as far as prompts in the same step lengthen it: their chunks
    are cut so that a step is predicted to keep it. None: chunks are never cut for this.
    """
    step_timeout_s: int = 120
    """An engine whose steps make no progress for this long has failed: its worker ends. The first
    steps, which compile, have ten times as long.
    """
    speculation: SpeculativeConfig | None = None
    """How drafts are made; None: there are none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "speculation":
                continue
            if field.name == "max_gap_s":
                if value is not None and not value > 0:
                    raise ConfigError(f"max_gap_s: {value!r} is not a time above 0")
                continue
            if field.name in ("enable_prefix_caching", "in_lockstep"):
                if not isinstance(value, bool):
                    raise ConfigError(f"{field.name}: {value!r} is neither true nor false")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field.name}: {value!r} is not a whole number of at least 1")
        if self.num_blocks % self.num_homes:
            raise ConfigError(
                f"num_blocks: {self.num_blocks} pages cannot be shared out among "
                f"num_homes={self.num_homes} ranks"
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens: {self.max_batched_tokens} is less than max_num_seqs "
                f"({self.max_num_seqs}), so some sequences would never get their next token; "
                "raise it or lower max_num_seqs"
            )

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)
