"""The limits of one engine. Values only; resolved once by `launch`, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mooncake.base.errors import ConfigError

NGRAM, MTP, EAGLE3 = METHODS = ("ngram", "mtp", "eagle3")
MOST_DRAFTS = 32
FIRST_STEP_FACTOR = 10
"""The first steps may take this many times `step_timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The content of `--speculative-config`; the keys have vLLM's names.

    Raises:
        ConfigError: a value is out of range, or two contradict each other; the message names the
            key.
    """

    method: str
    num_speculative_tokens: int
    """The most drafts of a sequence in one step."""
    prompt_lookup_max: int = 0
    """The most tokens that are looked for; 0: the value of `prompt_lookup_min`, or 5."""
    prompt_lookup_min: int = 0
    """The fewest tokens that must be found again; 0: the value of `prompt_lookup_max`, or 5."""
    model: str = ""
    """The directory of the head, for `eagle3`."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method: {self.method!r} is not one of {', '.join(METHODS)}")
        if self.method != NGRAM and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise ConfigError(
                f"prompt_lookup_max: only the method {NGRAM} looks prompts up; leave it out with "
                f"{self.method}"
            )
        if not isinstance(self.model, str) or (self.model and self.method != EAGLE3):
            raise ConfigError(
                f"model: {self.model!r} is not used by the method {self.method}; leave it out"
            )
        if self.method == EAGLE3 and not self.model:
            raise ConfigError(
                f"model: the method {EAGLE3} needs a head; give the directory of its checkpoint"
            )
        _in_range("num_speculative_tokens", self.num_speculative_tokens, 1)
        _in_range("prompt_lookup_max", self.prompt_lookup_max, 0)
        _in_range("prompt_lookup_min", self.prompt_lookup_min, 0)
        longest, shortest = self.lookup
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min: {shortest} is more than prompt_lookup_max ({longest}); lower "
                "it, or raise that"
            )

    @property
    def lookup(self) -> tuple[int, int]:
        """The most and the fewest tokens that are looked for."""
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        return longest or shortest or 5, shortest or longest or 5


def _in_range(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_DRAFTS:
        raise ConfigError(
            f"{name}: {value!r} is not a whole number of {least or 1} to {MOST_DRAFTS}"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much one engine may hold and do at a time.

    Raises:
        ConfigError: a value is out of range, or two contradict each other; the message names the
            key.
    """

    num_blocks: int
    """The number of pages of KV in this engine's memory."""
    max_num_seqs: int
    """The most sequences in the running batch."""
    max_batched_tokens: int
    """The most tokens computed in one step, over all sequences."""
    max_chunk_tokens: int
    """The most tokens of one sequence in one step (`max_batched_tokens` caps it too)."""
    max_model_len: int
    """The most tokens of one sequence, prompt plus output."""
    max_waiting: int
    """The most sequences that are accepted and not yet running; beyond this `Engine.add` returns
    False. Preempted sequences are always taken back.
    """
    num_homes: int = 1
    """The number of ranks that share out the pages equally (decode context parallel)."""
    block_tokens: int = 64
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 1
    """The most steps that are submitted to the runner and have not ended."""
    num_stages: int = 1
    """The number of stages that each step goes through, one after the other (pipeline parallel)."""
    in_lockstep: bool = False
    """Whether each step waits for the steps of other engines that share experts with this one."""
    max_gap_s: float | None = None
    """The longest gap between two tokens of a stream, as far as prompts in the same step lengthen
    it. Chunks of prompts are cut so that a step is predicted to keep it, but a stream with many
    tokens may have a longer one now and then. None: never for this reason.
    """
    max_gap_is_target: bool = False
    """Whether `max_gap_s` must cost no throughput: chunks are not cut so small that their tokens
    take much longer, and a late prompt lifts it even where its chunks fit.
    """
    first_token_s: float | None = None
    """How long after a prompt came its first token may be due. Until it must begin for that, a
    prompt waits for streams if even its smallest chunk would break `max_gap_s`; when one that
    waits must begin, all prompts get whole chunks. None: no prompt waits for streams.
    """
    step_timeout_s: int = 120
    """When steps make no progress for this long, the engine has failed and its worker ends. The
    first steps, which compile, may take ten times as long.
    """
    speculation: SpeculativeConfig | None = None
    """How drafts are made; None: there are none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "speculation":
                continue
            if field.name in ("max_gap_s", "first_token_s"):
                if value is not None and not value > 0:
                    raise ConfigError(f"{field.name}: {value!r} is not a time above 0")
                continue
            if field.name in ("enable_prefix_caching", "in_lockstep", "max_gap_is_target"):
                if not isinstance(value, bool):
                    raise ConfigError(f"{field.name}: {value!r} is neither true nor false")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field.name}: {value!r} is not a whole number of at least 1")
        if self.num_blocks % self.num_homes:
            raise ConfigError(
                f"num_blocks: {self.num_blocks} pages do not divide among {self.num_homes} ranks "
                f"(num_homes); give a multiple of {self.num_homes}"
            )
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens: {self.max_batched_tokens} is less than max_num_seqs "
                f"({self.max_num_seqs}), so some sequences would never get their next token; "
                "raise it or lower max_num_seqs"
            )

    @property
    def first_step_timeout_s(self) -> int:
        """How long the first steps may make no progress. They compile kernels for each new shape,
        and touch weights for the first time, which may have to come from a slow disk.
        """
        return FIRST_STEP_FACTOR * self.step_timeout_s

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)
