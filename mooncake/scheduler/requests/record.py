"""One accepted request as the gateway holds it, from its permit to its final event.

Plain state with checked transitions; owned by the request manager. A record puts the request's
tokens in order: they come from two senders, over several attempts, and with repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mooncake.base import (
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    KeyChain,
    RequestState,
    RequestTask,
    Sink,
    WorkerRef,
    extend_chain,
)
from mooncake.base.blocks import chain_root, prompt_keys
from mooncake.base.request import (
    NO_LOGPROBS,
    TRANSITIONS,
    CacheUse,
    FinishInfo,
    RequestOutput,
)
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.fairness import QueuePosition
from mooncake.scheduler.placement.admission import Placement
from mooncake.scheduler.placement.conductor import Layout
from mooncake.telemetry.events import Finished

STALL_FACTOR = 10.0
"""An attempt counts as stalled when its first token takes this many times the predicted TTFT."""
MAX_STALLS = 4.0
"""An attempt counts as stalled at the latest after this many times `stall_timeout_s`, because the
prediction may be wrong.
"""


@dataclass(frozen=True, slots=True)
class HeldFirst:
    """A first token that is delivered with the second one, or at `until_s` (`output_delivery`)."""

    output: RequestOutput
    worker_id: str
    until_s: float


@dataclass(slots=True)
class RequestRecord:
    """The state of an accepted request."""

    request: GenerateRequest
    sink: Sink
    accepted_s: float
    queue_position: QueuePosition
    """The request's turn, and the share of limits that it may use."""
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    """The number of the current placement, unique in its gateway."""
    num_attempts: int = 0
    """Number of times it was placed."""
    num_paused: int = 0
    """How many of these placements ended without a failure: the request yielded, its worker changed
    its role or was full, or the worker ended with one that it shared experts with.
    """
    placement: Placement | None = None
    """The current placement; None while the request waits to be placed."""
    decode_joined: bool = False
    """True if decode has sent tokens in this attempt; prefill is not needed any more then."""
    num_cached_tokens: int | None = None
    cache: CacheUse | None = None
    exclude: set[str] = field(default_factory=set)
    """Workers on which it failed, or that refused it."""
    wait_until_s: float = 0.0
    """The request fails if it cannot be placed again by this time."""
    retry_s: float = 0.0
    """The request is not placed again before this time."""
    last_progress_s: float = 0.0
    gap_since_s: float | None = None
    """Since when later tokens wait for earlier ones that are missing."""
    keys: KeyChain = field(default_factory=KeyChain)
    keys_layout: Layout | None = None
    placed_layout: Layout | None = None
    """The layout, and so the weights, under which it was placed last."""
    tokens: list[int] = field(default_factory=list)
    """The output so far: each position once, in order."""
    held_first: HeldFirst | None = None
    num_conflicts: int = 0
    """Repeated tokens that differed from those in `tokens`: a worker was not deterministic."""
    _held: dict[int, RequestOutput] = field(default_factory=dict)
    """Outputs that came before the tokens that precede them, by position. Bounded: the positions
    lie below `max_tokens`.
    """
    _finish: tuple[int, FinishInfo] | None = None
    """(position of the end, how the sequence ended there)"""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens)

    def workers(self) -> list[WorkerRef]:
        """Return the workers of the current placement, decode first."""
        if self.placement is None:
            return []
        prefill = self.placement.prefill
        return [self.placement.decode] if prefill is None else [self.placement.decode, prefill]

    def needs(self, worker_id: str) -> bool:
        """Return whether the current placement cannot continue without this worker."""
        if self.placement is None:
            return False
        is_decode = self.placement.decode.worker_id == worker_id
        return is_decode or not self.decode_joined or self.has_gap

    def goes_on_from(self, worker_id: str) -> bool:
        """Return whether a request that was placed before may still fetch its blocks from this
        worker.
        """
        if self.placement is None or self.decode_joined or self.num_attempts == 1:
            return False
        return any(
            store.worker_id == worker_id
            for source in self.placement.sources
            for store in (source.store, *source.others)
        )

    @property
    def num_failed(self) -> int:
        """Number of placements that failed, including the current one."""
        return self.num_attempts - self.num_paused

    def begin_attempt(self, attempt: int, placement: Placement, now: float) -> None:
        """Start an attempt. Outputs that are still missing from the last one are not waited for."""
        self.attempt = attempt
        self.num_attempts += 1
        self.placement = placement
        self.decode_joined = False
        self.last_progress_s = now
        self.gap_since_s = None
        self.drop_held()
        self.move(RequestState.PREFILLING)

    # ------------------------------------------------------------ the output, in order

    @property
    def has_gap(self) -> bool:
        """True if an output is held back because earlier tokens are missing."""
        return bool(self._held) or (self._finish is not None and self.due_finish() is None)

    def drop_held(self) -> None:
        """Drop what is held back: the attempt that sent it has ended."""
        self._held.clear()
        self._finish = None

    def add_output(self, output: RequestOutput) -> list[RequestOutput]:
        """Add an output, in any order; return the events that can be delivered now."""
        if output.finish is not None:
            self._finish = output.start + len(output.tokens), output.finish
        if not output.tokens:
            return []
        if output.start > len(self.tokens):
            if output.start < self.request.sampling.max_tokens:
                self._held.setdefault(output.start, output)
            return []
        events = self._release(output, [])
        while self._held:
            first = min(self._held)
            if first > len(self.tokens):
                break
            events = self._release(self._held.pop(first), events)
        return events

    def due_finish(self) -> FinishInfo | None:
        """Return how the sequence ended, once all tokens before its end were released. A failure is
        returned at once, even if tokens are missing.
        """
        if self._finish is None:
            return None
        position, finish = self._finish
        if position <= len(self.tokens) or finish.failure is not None:
            return finish
        return None

    def _release(self, output: RequestOutput, events: list[RequestOutput]) -> list[RequestOutput]:
        """Release the new part of `output`, which starts at or before the next position."""
        known = len(self.tokens) - output.start
        if known:
            mine = self.tokens[output.start : output.start + len(output.tokens)]
            self.num_conflicts += sum(
                old != new for old, new in zip(mine, output.tokens, strict=False)
            )
        stop = self.request.sampling.max_tokens - output.start
        fresh = output.tokens[known:stop]
        if not fresh:
            return events
        start = len(self.tokens)
        self.tokens.extend(fresh)
        if len(fresh) < len(output.tokens):
            output = msgspec.structs.replace(
                output,
                start=start,
                tokens=fresh,
                logprobs=None if output.logprobs is None else output.logprobs[known:stop],
                prompt_logprobs=NO_LOGPROBS if start else output.prompt_logprobs,
            )
        events.append(output)
        return events

    # ------------------------------------------------------------ limits in time

    def is_overdue(self, now: float) -> bool:
        """Return whether the request's own `timeout_s` has passed."""
        timeout_s = self.request.timeout_s
        return timeout_s is not None and now - self.accepted_s >= timeout_s

    def stall_reason(self, config: SchedulerConfig, now: float) -> str | None:
        """Return why the current attempt must be given up; None while it makes progress."""
        if self.placement is None:
            return None
        quiet_s = now - self.last_progress_s
        quiet_limit_s = config.stall_timeout_s
        if self.state is RequestState.PREFILLING:
            predicted_s = STALL_FACTOR * self.placement.predicted_ttft_s
            quiet_limit_s = min(max(quiet_limit_s, predicted_s), MAX_STALLS * quiet_limit_s)
        if self.gap_since_s is not None and now - self.gap_since_s > config.gap_timeout_s:
            return "tokens were lost on their way"
        return f"nothing came for {quiet_s:.0f} s" if quiet_s > quiet_limit_s else None

    # ------------------------------------------------------------ state, tasks, ends

    def learn_cached(self, output: RequestOutput) -> None:
        """Record what the first output of an attempt says about reuse. The first attempt that
        reports anything counts.
        """
        if self.num_cached_tokens is not None or output.num_cached_tokens is None:
            return
        num_tokens = len(self.request.prompt_tokens)
        self.num_cached_tokens = min(output.num_cached_tokens, num_tokens)
        uses_cache = self.request.sampling.num_prompt_logprobs is None
        if uses_cache and self.placement is not None and self.keys_layout is not None:
            self.cache = self.placement.prefix_ends.use(
                num_tokens, self.keys_layout.block_tokens, self.num_cached_tokens, output.fetched
            )

    def move(self, state: RequestState) -> None:
        """Change the state; an illegal transition is a bug and raises AssertionError."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} to {state}"
        self.state = state

    def task(self, gateway: WorkerRef) -> RequestTask:
        """Return the task for the workers of the current placement."""
        placement = self.placement
        assert placement is not None, "a task of a request that is not placed"
        return RequestTask(
            request=self.request,
            attempt=self.attempt,
            gateway=gateway,
            decode=placement.decode,
            prefill=placement.prefill,
            output_tokens=list(self.tokens),
            sources=list(placement.sources),
            turn=self.queue_position.order[0],
            num_replicate_blocks=placement.num_replicate_blocks,
        )

    def final_event(
        self, reason: FinishReason, stop_token_id: int | None, failure: Failure | None
    ) -> FinalEvent:
        """Return the last event, for the client."""
        return FinalEvent(
            request_id=self.request_id,
            reason=reason,
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            cache=self.cache,
            stop_token_id=stop_token_id,
            failure=failure,
        )

    def finished(self, reason: FinishReason, failure: Failure | None, now: float) -> Finished:
        """Return the event that records the end of the request."""
        return Finished(
            request_id=self.request_id,
            at_s=now,
            reason=reason,
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            status=failure.status if failure is not None else 200,
        )

    def block_keys(self, layout: Layout | None) -> KeyChain:
        """Return the keys of all full blocks of prompt and output so far, under `layout`. Only
        blocks that are new since the last call are hashed.
        """
        if layout is None:
            return KeyChain()
        request = self.request
        if layout != self.keys_layout:
            self.keys_layout = layout
            self.keys = prompt_keys(
                layout.fingerprint, request.prompt, layout.block_tokens, request.tenant,
                request.cache_salt,
            )  # fmt: skip
        done = len(self.keys) * layout.block_tokens
        tail = request.tokens_with(self.tokens)[done:]
        parent = (
            self.keys[-1]
            if self.keys
            else chain_root(layout.fingerprint, request.tenant, request.cache_salt)
        )
        new = extend_chain(parent, tail, layout.block_tokens)
        if new:
            self.keys = KeyChain(self.keys.packed + b"".join(new))
        return self.keys
