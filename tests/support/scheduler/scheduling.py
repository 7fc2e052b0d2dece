"""Scripted workers, a channel and a client that record what they get: the base of tests of
scheduling and of the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake.base import (
    AbortTask,
    AnyMessage,
    BlockEvents,
    BlockKey,
    CostSample,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    LoadReport,
    OutputEvent,
    RequestOutput,
    RequestTask,
    Role,
    SamplingParams,
    SeededIds,
    StepOutputs,
    Tier,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    block_keys,
    pack_tokens,
)
from mooncake.base.messages import OWN_RELEASE
from mooncake.base.request import FinishInfo
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.placement.worker_choice import Wanted
from mooncake.telemetry.events import EventList

FINGERPRINT = "layout-1"
BLOCK_TOKENS = 4
GATEWAY = WorkerRef("gateway", "g0", "gateway-address#90abcdef")

TOKEN_S = 1e-3
PROFILE = [
    CostSample(num_new, context, 1, TOKEN_S * num_new + 1e-7 * num_new * context)
    for num_new in (16, 64, 256, 1024)
    for context in (0, 1000, 8000)
]
"""A millisecond a token and a little attention."""


def wanted(num_tokens: int, **fields: Any) -> Wanted:
    """Return what a request of `num_tokens` tokens asks of its workers."""
    plain = {
        "num_output_tokens": 1, "block_tokens": BLOCK_TOKENS, "push_s_per_block": 0.0,
        "exclude": [], "tbt_slo_s": None, "max_whole_tokens": 0,
    }  # fmt: skip
    return Wanted(num_tokens=num_tokens, **(plain | fields))


def ref(worker_id: str, epoch: str = "e0") -> WorkerRef:
    return WorkerRef(worker_id, epoch, f"{worker_id}/{epoch}")


def hello(worker_id: str, role: Role, **changes: Any) -> WorkerHello:
    """Return the hello of a worker of 1,000 blocks on a node of its own name."""
    epoch = changes.pop("epoch", "e0")
    fields: dict[str, Any] = {
        "worker": ref(worker_id, epoch),
        "role": role,
        "node_id": f"node-{worker_id}",
        "host": "localhost",
        "pid": 1,
        "layout_fingerprint": FINGERPRINT,
        "block_tokens": BLOCK_TOKENS,
        "num_blocks": 1000,
        "block_bytes": 1000,
        "profile": PROFILE if role is not Role.KVSTORE else [],
        "release": OWN_RELEASE,
    }
    return WorkerHello(**(fields | changes))


def request(name: str = "r", num_prompt: int = 16, max_tokens: int = 4, **fields: Any) -> Any:
    """Return a request with a prompt of its own."""
    sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__struct_fields__}
    prompt = fields.pop("prompt_tokens", None)
    prompt = prompt or [(sum(name.encode()) * 31 + i) % 1000 for i in range(num_prompt)]
    return GenerateRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        **fields,
    )


def keys_of(generate: GenerateRequest) -> list[BlockKey]:
    return block_keys(FINGERPRINT, generate.prompt_tokens, BLOCK_TOKENS)


def conductor(workers: Sequence[WorkerHello], **config: Any) -> Conductor:
    """Return a Conductor that these workers have joined."""
    made = Conductor(SchedulerConfig(**config), SeededIds(0))
    for worker in workers:
        assert made.on_hello(worker) is None
    return made


def snapshot(worker: WorkerRef, keys: list[BlockKey], tier: Tier = Tier.HBM) -> BlockEvents:
    return BlockEvents(worker=worker, tier=tier, sequence_no=1, stored=keys, snapshot=True)


class Inbox:
    """A channel that records what was sent where."""

    address = "gateway-address"

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyMessage]] = []

    def send(self, address: str, message: AnyMessage) -> None:
        self.sent.append((address, message))

    def of(self, kind: type[msgspec.Struct], address: str | None = None) -> list[Any]:
        """Return the messages of a kind (sent to an address), oldest first."""
        return [m for to, m in self.sent if isinstance(m, kind) and address in (None, to)]


class Client:
    """A sink that records the events of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finals: list[FinalEvent] = []

    def __call__(self, event: OutputEvent) -> None:
        assert not self.finals, f"{event} after the final event"
        if isinstance(event, RequestOutput):
            assert event.start == len(self.tokens), "tokens out of order"
            self.tokens.extend(event.tokens)
        else:
            self.finals.append(event)

    @property
    def final(self) -> FinalEvent:
        assert len(self.finals) == 1
        return self.finals[0]


class SchedulerHarness:
    """A gateway with workers that answer only when the test says so."""

    def __init__(self, **config: Any) -> None:
        self.channel = Inbox()
        self.events = EventList()
        settings = SchedulerConfig(**config)
        self.conductor = Conductor(settings, SeededIds(1))
        self.gateway = Gateway(
            settings, GATEWAY, self.conductor, self.channel, SeededIds(2), self.events
        )
        self.now = 0.0

    def join(self, worker_id: str, role: Role, **changes: Any) -> WorkerRef:
        message = hello(worker_id, role, **changes)
        self.gateway.handle(message, self.now)
        return message.worker

    def submit(self, generate: GenerateRequest) -> Client:
        client = Client()
        self.gateway.submit(generate, client, self.now)
        self.gateway.check_integrity()
        return client

    def report(self, worker: WorkerRef, **load: Any) -> None:
        self.gateway.handle(LoadReport(worker=worker, load=WorkerLoad(**load)), self.now)

    def output(
        self,
        worker: WorkerRef,
        name: str,
        start: int,
        tokens: list[int],
        finish: FinishReason | FinishInfo | None = None,
        attempt: int = 1,
        **fields: Any,
    ) -> None:
        """Send an output of the request's first (second, …) placement."""
        if isinstance(finish, FinishReason):
            finish = FinishInfo(reason=finish)
        output = RequestOutput(
            request_id=name,
            attempt=self.attempts(name)[attempt - 1],
            start=start,
            tokens=tokens,
            finish=finish,
            **fields,
        )
        self.gateway.handle(StepOutputs(worker=worker, outputs=[output]), self.now)
        self.gateway.check_integrity()

    def attempts(self, name: str) -> list[int]:
        """Return the numbers of a request's placements, in order."""
        tasks = self.channel.of(RequestTask)
        return sorted({t.attempt for t in tasks if t.request.request_id == name})

    def tasks(self, worker: WorkerRef) -> list[Any]:
        return self.channel.of(RequestTask, worker.address)

    def aborts(self, worker: WorkerRef) -> list[AbortTask]:
        return self.channel.of(AbortTask, worker.address)

    def tick(self, seconds: float = 0.0) -> float | None:
        """Let time pass in steps short enough that it is not taken for a pause."""
        end = self.now + seconds
        while True:
            self.now = min(self.now + 0.5, end)
            wake = self.gateway.tick(self.now)
            self.gateway.check_integrity()
            if self.now >= end:
                return wake

    def close(self) -> None:
        """Check that nothing is left."""
        assert self.gateway.idle
        self.gateway.check_integrity()


class Pair(SchedulerHarness):
    """A gateway, a prefill and a decode worker."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.p0 = self.join("p0", Role.PREFILL)
        self.d0 = self.join("d0", Role.DECODE)
