"""One accepted request as the gateway holds it, from permit to final event.

A value with checked moves; owned by the gateway, touched by nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake.base import (
    DecodeTask,
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    KeyChain,
    OutputEvent,
    PrefillTask,
    RequestState,
    WorkerRef,
    extend_chain,
)
from mooncake.base.blocks import chain_root
from mooncake.base.messages import FinishInfo
from mooncake.base.request import TRANSITIONS
from mooncake.scheduler.conductor import Layout, Placement
from mooncake.scheduler.fairness import Standing
from mooncake.scheduler.outputs import OutputOrder
from mooncake.telemetry.events import Finished

Sink = Callable[[OutputEvent], None]


@dataclass(slots=True)
class RequestRecord:
    """A request between its permit and its final event."""

    request: GenerateRequest
    sink: Sink
    accepted_s: float
    order: OutputOrder
    standing: Standing
    """Its turn, and what it may claim against others."""
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    """Number of the current placement, unique at its gateway."""
    num_attempts: int = 0
    """Placements so far."""
    num_paused: int = 0
    """Of these, those that ended because it had to yield, or its worker left in good order or took
    nothing more.
    """
    placement: Placement | None = None
    """None while the request waits to be placed (again)."""
    decode_joined: bool = False
    """Decode has brought tokens in this attempt: prefill is not needed any more."""
    num_cached_tokens: int | None = None
    exclude: set[str] = field(default_factory=set)
    """Workers that failed it or turned it away."""
    wait_until_s: float = 0.0
    retry_s: float = 0.0
    """Not to be placed again before."""
    last_progress_s: float = 0.0
    gap_since_s: float | None = None
    """Since when later tokens wait for earlier ones."""
    keys: KeyChain = field(default_factory=KeyChain)
    keys_layout: Layout | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.order.tokens)

    def workers(self) -> list[WorkerRef]:
        """Return the workers of the current placement, decode first."""
        if self.placement is None:
            return []
        prefill = self.placement.prefill
        return [self.placement.decode] if prefill is None else [self.placement.decode, prefill]

    def needs(self, worker_id: str) -> bool:
        """Whether the current placement cannot go on without this worker."""
        if self.placement is None:
            return False
        is_decode = self.placement.decode.worker_id == worker_id
        return is_decode or not self.decode_joined or self.order.has_gap

    @property
    def num_failed(self) -> int:
        """Placements that came to nothing, the present one included."""
        return self.num_attempts - self.num_paused

    def begin(self, attempt: int, placement: Placement, now: float) -> None:
        """Start an attempt: nothing of the one before is waited for."""
        self.attempt = attempt
        self.num_attempts += 1
        self.placement = placement
        self.decode_joined = False
        self.last_progress_s = now
        self.gap_since_s = None
        self.order.forget_held()
        self.move(RequestState.PREFILLING)

    def move(self, state: RequestState) -> None:
        """Go to `state`; an illegal move is our own fault."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state} to {state}"
        self.state = state

    def tasks(self, gateway: WorkerRef) -> list[tuple[str, DecodeTask | PrefillTask]]:
        """Return what to send where to start the current attempt: decode first, so that it
        reserves room while prefill computes.
        """
        placement = self.placement
        assert placement is not None, "tasks of a request that is not placed"
        output_tokens, sources = list(self.order.tokens), list(placement.sources)
        decode, prefill = placement.decode, placement.prefill
        decode_task = DecodeTask(
            request=self.request,
            attempt=self.attempt,
            gateway=gateway,
            prefill=prefill,
            output_tokens=output_tokens,
            sources=sources if prefill is None else [],
            turn=self.standing.order[1],
        )
        if prefill is None:
            return [(decode.address, decode_task)]
        prefill_task = PrefillTask(
            request=self.request,
            attempt=self.attempt,
            gateway=gateway,
            decode=decode,
            output_tokens=output_tokens,
            sources=sources,
            turn=self.standing.order[1],
            num_replicate_blocks=placement.num_replicate_blocks,
        )
        return [(decode.address, decode_task), (prefill.address, prefill_task)]

    def final_event(
        self, reason: FinishReason, stop_token_id: int | None, failure: Failure | None
    ) -> FinalEvent:
        """Return the request's last event."""
        return FinalEvent(
            request_id=self.request_id,
            reason=reason,
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            stop_token_id=stop_token_id,
            failure=failure,
        )

    def finished(self, reason: FinishReason, failure: Failure | None, now: float) -> Finished:
        """Return what is recorded of the request's end."""
        return Finished(
            request_id=self.request_id,
            at_s=now,
            reason=reason,
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            status=failure.status if failure is not None else 200,
        )

    def ended_by_its_tokens(self) -> FinishInfo | None:
        """Return how the request has ended if its tokens so far end it: the worker was lost between
        its last token and the word that it was the last.
        """
        tokens, sampling = self.order.tokens, self.request.sampling
        if tokens and len(tokens) >= sampling.min_tokens and tokens[-1] in sampling.stop_token_ids:
            return FinishInfo(reason=FinishReason.STOP, stop_token_id=tokens[-1])
        if len(tokens) >= sampling.max_tokens:
            return FinishInfo(reason=FinishReason.LENGTH)
        return None

    def block_keys(self, layout: Layout | None) -> KeyChain:
        """Return the keys of all full blocks of prompt and output so far, under `layout`; hashes
        only what is new since the last call.
        """
        if layout is None:
            return KeyChain()
        if layout != self.keys_layout:
            self.keys, self.keys_layout = KeyChain(), layout
        request = self.request
        done = len(self.keys) * layout.block_tokens
        tail = request.tokens_with(self.order.tokens)[done:]
        parent = (
            self.keys[-1]
            if self.keys
            else chain_root(layout.fingerprint, request.tenant, request.cache_salt)
        )
        new = extend_chain(parent, tail, layout.block_tokens)
        if new:
            self.keys = KeyChain(self.keys.packed + b"".join(new))
        return self.keys
