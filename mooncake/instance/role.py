"""What the prefill and the decode worker have in common as machines: how a job begins, collects its
prefix, and is ended from outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic

import msgspec

from mooncake.base.messages import (
    AbortTask,
    BlockSource,
    NextLife,
    PeerLost,
    RequestTask,
    Welcome,
    WorkerRef,
)
from mooncake.base.request import Failure
from mooncake.instance.instance import Instance
from mooncake.instance.job_table import JobT, JobTable, JobTrace
from mooncake.instance.reuse import PrefixReuse

GIVEN_UP = "the cluster has given its worker up"


class RoleWorker(ABC, Generic[JobT]):
    """A role over its instance (see `base.machine.Machine`). It owns the jobs of its requests. It
    ignores tasks for another boot of this worker, which may have had the other role.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._jobs: JobTable[JobT] = JobTable()
        self._is_given_up = False

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Handle an event that both roles treat alike."""
        match event:
            case RequestTask() if self.instance.worker in (event.prefill, event.decode):
                self._take_task(event, now)
            case AbortTask():
                job = self._jobs.abort(event)
                if job is not None:
                    self._end(job, now)
            case PeerLost() if event.worker == self.instance.worker:
                self._on_own_loss(now)
            case PeerLost():
                self.instance.handle(event, now)
                self._on_peer_lost(event.worker, now)
            case Welcome():
                self.instance.handle(event, now)
                for job in self._jobs.on_welcome(event.gateway):
                    self._end(job, now)
            case _:
                self.instance.handle(event, now)

    @abstractmethod
    def tick(self, now: float) -> float | None: ...

    @property
    @abstractmethod
    def quiet(self) -> bool:
        """True if nothing is in progress here."""

    @property
    def joined(self) -> bool:
        """True if a gateway knows this worker. It gets no requests before that."""
        return self.instance.membership.welcomed

    @property
    def draining(self) -> bool:
        """True if the worker wants to leave."""
        return self.instance.draining

    @property
    def gateways(self) -> list[str]:
        """The addresses of all gateways known."""
        return self.instance.membership.gateway_addresses

    @property
    def next_life(self) -> NextLife | None:
        """How to come back, once nothing is in progress here any more, or None to go on. A
        worker that was given up waits only for the running step, because no peer waits for it.
        """
        life = self.instance.next_life
        may_end = self.quiet or (self._is_given_up and self.instance.engine.idle)
        return life if life is not None and may_end else None

    def check_integrity(self) -> None:
        self.instance.check_integrity(role_quiet=self.quiet)
        self._jobs.check_integrity()

    # ------------------------------------------------------------ what each role does in its way

    @abstractmethod
    def _new_job(self, task: RequestTask) -> JobT: ...

    @abstractmethod
    def _begin(self, job: JobT, now: float, /) -> None:
        """Begin with a new job, which is in the table."""

    @abstractmethod
    def _on_gathered(self, job: JobT, pages: list[int], now: float) -> None:
        """Go on with a job once its prefix lies in these pages, also if it has ended meanwhile."""

    @abstractmethod
    def _on_peer_lost(self, worker: WorkerRef, now: float) -> None: ...

    @abstractmethod
    def _end(self, job: JobT, now: float) -> None:
        """Stop everything that runs for a job, and free its pages as soon as that is safe."""

    # ------------------------------------------------------------ what is alike

    def _take_task(self, task: RequestTask, now: float) -> None:
        """Begin with a task, unless it is a repeat or over. It replaces an older attempt of its
        request. If the settings that it names are not here, it is refused, and the next one carries
        them.
        """
        instance, jobs = self.instance, self._jobs
        if not jobs.is_new(task):
            return
        older = jobs.get(task.request.request_id)
        if older is not None:
            self._end(older, now)
        whole = instance.kept_settings.completed(task)
        if self._is_given_up:
            jobs.refuse(task)
            instance.fail(task, Failure.unavailable(GIVEN_UP))
            return
        if whole is None:
            jobs.refuse(task)
            why = "this worker does not have the settings that a task names"
            instance.fail(task, Failure.turned_away(why))
            instance.count("tasks_without_settings")
            return
        instance.engine.prepare(whole.request)
        job = self._new_job(whole)
        if whole.request.traced:
            job.trace = JobTrace(instance.worker.worker_id, now)
        jobs.add(job)
        self._begin(job, now)

    def _gather(self, job: JobT, sources: list[BlockSource], now: float) -> None:
        """Collect the prefix of a job."""
        instance = self.instance

        def gathered(pages: list[int], at: float) -> None:
            reuse, job.reuse = job.reuse, None
            if reuse is not None:
                job.num_counted = reuse.num_counted(instance.kvstore)
                job.fetched = reuse.fetched(instance.kvstore)
                if reuse.sources_asked:
                    instance.membership.add_fetched(job.request_id)
            if job.trace is not None:
                job.trace.gathered(reuse, at)
            self._on_gathered(job, pages, at)

        job.reuse = PrefixReuse(
            instance.pool, instance.fetches, job.reusable_keys, sources, gathered,
            job.chain_head,
        )  # fmt: skip
        job.reuse.start(now)

    def _end_orphans(self, now: float) -> None:
        """Fail and end the jobs of lost gateways. One that is alive after all places them again."""
        for gateway in self.instance.membership.lost_gateways():
            self._give_up(self._jobs.of_gateway(gateway), "its gateway was lost", now)

    def _on_own_loss(self, now: float) -> None:
        """End all jobs and come back, because the cluster has given this worker up: what the jobs
        held elsewhere belongs to others now. Gateways that still hear it place them again.
        """
        self._is_given_up = True
        self.instance.come_back()
        self._give_up(self._jobs, GIVEN_UP, now)

    def _give_up(self, jobs: Iterable[JobT], why: str, now: float) -> None:
        failure = Failure.unavailable(why)
        for job in jobs:
            self.instance.fail(job.task, failure)
            self._end(job, now)
