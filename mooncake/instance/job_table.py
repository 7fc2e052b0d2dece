"""The requests in progress on a worker: the state that every job has, with the spans of those that
are traced, and the table that the prefill and the decode role share.

Owned by the role's worker, which decides what a job does. The table knows attempts and gateways. At
most one attempt of a request is in progress. The table drops messages of an older attempt, and of
one that has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from mooncake.base.blocks import BlockKey, block_keys, prompt_keys
from mooncake.base.bounded_map import BoundedMap
from mooncake.base.kv_layout import KvLayout
from mooncake.base.messages import (
    AbortTask,
    ChainHead,
    RequestTask,
    Reserved,
    WorkerRef,
    is_former,
)
from mooncake.base.request import CacheHits, Fact, RequestOutput, WorkEvent, WorkSpan
from mooncake.engine.sequence import Sequence
from mooncake.instance.push import Destination
from mooncake.instance.reuse import PrefixReuse
from mooncake.transfer.engine import Carried

MAX_CHUNKS = 128
"""Chunks of a prompt that are reported one by one; as many as an OpenTelemetry span has events."""
MAX_EARLY = 1024
MAX_REMEMBERED = 4096
EARLY_S = 10.0
"""How many seconds a reservation waits for its task."""
JobT = TypeVar("JobT", bound="Job")


class JobTrace:
    """Collects spans; `take` returns those that have not been reported."""

    def __init__(self, worker_id: str, now: float) -> None:
        self._worker_id = worker_id
        self.since_s = now
        """When the wait or work began that is shown next."""
        self._spans: list[WorkSpan] = []
        self._chunks: list[WorkEvent] = []

    def waited(self, name: str, now: float) -> None:
        """End a wait, which the span `name` shows. The next work begins now."""
        self._add(name, self.since_s, now, {})
        self.since_s = now

    def gathered(self, reuse: PrefixReuse | None, now: float) -> None:
        """End the gathering of a prefix. There is nothing to show if nothing was fetched."""
        if reuse is not None and reuse.sources_asked:
            facts = _facts(reuse.num_fetched, reuse.carried)
            facts["mooncake.from"] = ",".join(reuse.sources_asked)
            self._add("fetch", self.since_s, now, facts)
        self.since_s = now

    def chunk(self, start: int, num_tokens: int, now: float) -> None:
        """Note that a step has computed this many tokens of the prompt, from `start` on."""
        if len(self._chunks) < MAX_CHUNKS:
            facts: dict[str, Fact] = {"mooncake.start": start, "mooncake.tokens": num_tokens}
            self._chunks.append(WorkEvent("chunk", now, facts))

    def computed(self, job: Job, now: float) -> None:
        """End the computation of a job's prompt. It began when the engine first had room for it."""
        begun_s = now if job.started_s is None else job.started_s
        self.waited("queue", begun_s)
        facts: dict[str, Fact] = {
            "mooncake.tokens": job.num_task_tokens - job.num_cached_tokens,
            "mooncake.cached_tokens": job.num_cached_tokens,
        }
        self._add("prefill", begun_s, now, facts, self._chunks)
        self.since_s = now

    def pushed(self, destination: Destination, now: float) -> None:
        """End a push to decode. If decode had all blocks, there is nothing to show."""
        if destination.begun_s is not None:
            facts = _facts(len(destination.wanted), destination.carried)
            self._add("transfer", destination.begun_s, now, facts)

    def decoded(self, job: Job, num_tokens: int, now: float) -> None:
        """End the generation of `num_tokens` tokens of a job."""
        facts: dict[str, Fact] = {
            "mooncake.tokens": num_tokens,
            "mooncake.preemptions": job.num_preemptions,
        }
        self._add("decode", self.since_s, now, facts)

    def pass_on(self, spans: Iterable[WorkSpan]) -> None:
        """Add spans of another worker."""
        self._spans += spans

    def take(self) -> tuple[WorkSpan, ...]:
        """Return the spans since the last call."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def _add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        facts: dict[str, Fact],
        events: Iterable[WorkEvent] = (),
    ) -> None:
        known = {fact: value for fact, value in facts.items() if value != ""}
        self._spans.append(WorkSpan(name, self._worker_id, start_s, end_s, known, list(events)))


def _facts(num_blocks: int, carried: Carried) -> dict[str, Fact]:
    """Return what a span tells about blocks that were moved."""
    return {
        "mooncake.blocks": num_blocks,
        "mooncake.bytes": carried.num_bytes,
        "mooncake.path": carried.protocol,
        "mooncake.nic": ",".join(sorted(carried.nics)),
    }


class Job(Sequence):
    """A request on a worker: the engine's sequence, which the engine does not have before its role
    adds it, and what every role knows of it beside: its task and the reuse of its prefix.
    """

    def __init__(self, sequence_id: int, task: RequestTask, layout: KvLayout) -> None:
        request = task.request
        tokens = request.tokens_with(task.output_tokens)
        names = layout.block_tokens, request.tenant, request.cache_salt
        super().__init__(
            sequence_id=sequence_id,
            request=request,
            attempt=task.attempt,
            turn=task.turn,
            output_tokens=list(task.output_tokens),
            keys=block_keys(layout.fingerprint, tokens, *names)
            if task.output_tokens
            else list(prompt_keys(layout.fingerprint, request.prompt, *names)),
        )
        self.task = task
        self.num_task_tokens = len(tokens)
        """How many tokens the task came with. All of them must have KV before the next one is
        sampled.
        """
        self._block_tokens = layout.block_tokens
        self.reuse: PrefixReuse | None = None
        self.trace: JobTrace | None = None
        """The spans of a traced request."""
        self.num_counted = 0
        """How many leading blocks this node's pool already counts as used by this request."""
        self.fetched: CacheHits | None = None
        """How many blocks of the prefix were fetched."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def chain_head(
        self, keys: list[BlockKey], num_counted: int, first: int = 0, num_kept_tokens: int = 0
    ) -> ChainHead:
        """Return what a message to a pool says of the chain before the blocks that it names, and of
        how much of it is to be kept: what the request wants of its prompt, or `num_kept_tokens` if
        that is more. `first`: the number of the chain's first block.
        """
        num_tokens = max(self.request.num_kept_tokens, num_kept_tokens)
        num_kept = max(0, num_tokens // self._block_tokens - first)
        return ChainHead(keys, num_counted, num_kept, self.request.keep_s if num_kept else 0.0)

    @property
    def keeps_answer(self) -> bool:
        """Whether the pool is to keep the answer, which has ended."""
        request = self.request
        is_wanted = request.call_token is None or request.call_token in self.output_tokens
        return request.keeps_answer and is_wanted

    def take_kv(self, pages: list[int], num_computed: int) -> None:
        """Take pages that hold the KV of the first `num_computed` tokens."""
        self.pages = pages
        self.num_computed = self.num_cached_tokens = num_computed

    def take_spans(self) -> tuple[WorkSpan, ...]:
        """Return what is to be reported now: nothing if the request is not traced."""
        return () if self.trace is None else self.trace.take()

    def output(self, made: RequestOutput, num_cached_tokens: int | None) -> RequestOutput:
        """Return what the engine made, with what the job adds for the gateway.

        num_cached_tokens: given with the first output of an attempt.
        """
        spans = self.take_spans()
        if num_cached_tokens is None and not spans:
            return made
        return msgspec.structs.replace(
            made,
            num_cached_tokens=num_cached_tokens,
            fetched=None if num_cached_tokens is None else self.fetched,
            spans=spans,
        )

    @property
    def reusable_keys(self) -> list[BlockKey]:
        """The keys of the blocks that may come from a cache. The last known token is always
        computed, because its logits are needed. So is the whole prompt, as long as its
        log-probabilities are wanted and no worker has sent them.
        """
        if self.prompt_logprobs is not None:
            return []
        return self.keys[: (self.num_tokens - 1) // self._block_tokens]


class JobTable(Generic[JobT]):
    """Jobs by request and gateway. Jobs may end during an iteration."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobT] = {}
        self._gateways: dict[str, WorkerRef] = {}
        self._ended: BoundedMap[str, int] = BoundedMap(MAX_REMEMBERED)
        """Request id -> the last attempt that has ended here; the oldest are dropped."""
        self._early: OrderedDict[tuple[str, int], tuple[float, Reserved]] = OrderedDict()
        """(request, attempt) -> when a reservation came before its task, and the reservation."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobT]:
        return iter(list(self._jobs.values()))

    def add(self, job: JobT) -> None:
        """Enter a job. The request's older attempt must have been removed."""
        assert job.request_id not in self._jobs, "an older attempt is still in progress"
        self._jobs[job.request_id] = job

    def get(self, request_id: str) -> JobT | None:
        """Return the request's job, whichever attempt it is."""
        return self._jobs.get(request_id)

    def find(self, request_id: str, attempt: int) -> JobT | None:
        """Return the job of exactly this attempt."""
        job = self._jobs.get(request_id)
        return job if job is not None and job.attempt == attempt else None

    def is_over(self, request_id: str, attempt: int) -> bool:
        """Return whether this attempt has ended here, or a later one has replaced it."""
        job = self._jobs.get(request_id)
        replaced = job is not None and attempt < job.attempt
        return replaced or attempt <= self._ended.get(request_id, -1)

    def is_new(self, task: RequestTask) -> bool:
        """Return whether a task is neither a repeat nor part of an attempt that is over."""
        request_id = task.request.request_id
        repeated = self.find(request_id, task.attempt) is not None
        return not repeated and not self.is_over(request_id, task.attempt)

    def refuse(self, task: RequestTask) -> None:
        """Fence off the attempt of a task that does not become a job."""
        self._remember(task.request.request_id, task.attempt)

    def abort(self, message: AbortTask) -> JobT | None:
        """Fence off the attempt and all older ones; return the job that must end, if any."""
        self._remember(message.request_id, message.attempt)
        job = self._jobs.get(message.request_id)
        return job if job is not None and job.attempt <= message.attempt else None

    def remove(self, job: JobT) -> None:
        """Remove a job and fence off its attempt. Repeats change nothing."""
        if self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]
        self._remember(job.request_id, job.attempt)

    def _remember(self, request_id: str, attempt: int) -> None:
        self._ended[request_id] = max(attempt, self._ended.get(request_id, -1))

    def of_sequence(self, sequence: Sequence) -> JobT | None:
        """Return the job that a sequence of the engine is, or None if the job has ended."""
        job = self._jobs.get(sequence.request.request_id)
        return job if job is sequence else None

    def of_gateway(self, gateway: WorkerRef) -> list[JobT]:
        """Return the jobs that this gateway asked for."""
        return [job for job in self._jobs.values() if job.task.gateway == gateway]

    def on_welcome(self, gateway: WorkerRef) -> list[JobT]:
        """Record a gateway. Return the jobs of its former epoch, which have no clients left.

        A gateway that was restarted numbers its attempts anew, so the fence is lifted.
        """
        if is_former(self._gateways.get(gateway.worker_id, gateway), gateway):
            self._ended.clear()
        self._gateways[gateway.worker_id] = gateway
        return [job for job in self._jobs.values() if is_former(job.task.gateway, gateway)]

    def keep_early(self, message: Reserved, now: float) -> Reserved | None:
        """Keep a reservation that came before its task. Return the one that was dropped to make
        room. The time limit of a repeated reservation runs from its first arrival.
        """
        name = (message.request_id, message.attempt)
        first_s, _ = self._early.get(name, (now, message))
        self._early[name] = (first_s, message)
        return self._early.popitem(last=False)[1][1] if len(self._early) > MAX_EARLY else None

    def take_early(self, job: JobT) -> Reserved | None:
        """Remove and return the reservation that waited for this job's task."""
        return self._early.pop((job.request_id, job.attempt), (0.0, None))[1]

    def expired_early(self, now: float) -> list[Reserved]:
        """Remove and return the reservations whose task has not come in time."""
        expired = []
        while self._early:
            name, (first_s, message) = next(iter(self._early.items()))
            if now - first_s < EARLY_S:
                break
            del self._early[name]
            expired.append(message)
        return expired

    def check_integrity(self) -> None:
        """Raise AssertionError when an attempt that is over is still in progress, or a limit was
        exceeded.
        """
        for request_id, job in self._jobs.items():
            assert job.request_id == request_id
            assert not self.is_over(request_id, job.attempt), f"{request_id} is over and goes on"
        assert len(self._early) <= MAX_EARLY, "more early reservations than allowed"
