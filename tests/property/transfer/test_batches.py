"""Whatever happens to the parts of a job, it ends once, and never while a part is in hand."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.batches import BatchTable, Job
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from tests.support.clock import ManualClock


class JobMachine(RuleBasedStateMachine):
    """One book, several jobs, a plain model of each beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.book = BatchTable(self.clock)
        self.jobs: list[Job] = []
        self.left: dict[int, int] = {}
        self.in_hand: dict[int, int] = {}
        self.error: dict[int, str | None] = {}
        self.ended: dict[int, str | None] = {}

    @rule(num_parts=st.integers(0, 3), deadline=st.none() | st.integers(0, 20))
    def open(self, num_parts: int, deadline: int | None) -> None:
        ops = [TransferOp(1, 0, 1, 0, 8)]
        batch = TransferBatch(
            op=Op.READ, peer=SegmentRef("p", {}, "h"), ops=ops, deadline_s=deadline
        )
        job = self.book.open(batch)
        job.set_ops(ops)
        self.jobs.append(job)
        self.left[job.batch_id] = num_parts
        self.in_hand[job.batch_id] = 0
        self.error[job.batch_id] = None
        job.expect(num_parts)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        name = job.batch_id
        if self.in_hand[name] == self.left[name] and self.error[name] is None:
            return  # a backend begins no more parts than there are
        began = job.begin()
        assert began == (self.error[name] is None)
        self.in_hand[name] += began

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(data=st.data(), how=st.sampled_from(["done", "failed", "back"]))
    def end_part(self, data: st.DataObject, how: str) -> None:
        job = data.draw(st.sampled_from([j for j in self.jobs if self.in_hand[j.batch_id]]))
        name = job.batch_id
        assert not job.ended, "it ended while a part was in hand"
        self.in_hand[name] -= 1
        if how == "done":
            self.left[name] -= 1
            job.finish()
        elif how == "failed":
            self.error[name] = self.error[name] or "broken"
            job.finish("broken")
        else:
            job.give_back()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self._stop(data.draw(st.sampled_from(self.jobs)), "cancelled")

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        for job in self.book.take_expired(self.clock.now()):
            assert job.deadline_s is not None
            assert job.deadline_s <= self.clock.now()
            self._stop(job, "late")

    def _stop(self, job: Job, reason: str) -> None:
        name = job.batch_id
        if not self._should_have_ended(name):
            self.error[name] = self.error[name] or reason
        job.stop(reason)

    def _should_have_ended(self, name: int) -> bool:
        idle = self.in_hand[name] == 0
        return idle and (self.error[name] is not None or self.left[name] == 0)

    @rule()
    def poll(self) -> None:
        for done in self.book.done.receive():
            assert done.batch_id not in self.ended, "it ended twice"
            self.ended[done.batch_id] = done.error
            assert done.error == self.error[done.batch_id]
            assert done.num_bytes == (8 if done.error is None else 0)

    @invariant()
    def agrees_with_the_model(self) -> None:
        for job in self.jobs:
            assert job.ended == self._should_have_ended(job.batch_id)
        open_jobs = [job for job in self.jobs if not job.ended]
        assert self.book.open_jobs() == open_jobs
        self.book.check_integrity()

    def teardown(self) -> None:
        for job in self.jobs:
            job.stop("over")
            while self.in_hand[job.batch_id]:
                self.in_hand[job.batch_id] -= 1
                job.give_back()
        ended = {done.batch_id for done in self.book.done.receive()} | set(self.ended)
        assert ended == {job.batch_id for job in self.jobs}
        self.book.done.close()


TestJobs = JobMachine.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
