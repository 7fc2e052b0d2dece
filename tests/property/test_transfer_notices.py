"""Whatever happens to batches and to the wire: the peer hears exactly of those that end well, once,
in order of submission.

Real jobs, outbox and ear; the model is the list of what was submitted. Between the two ends lies a
wire that loses words and answers, repeats them late, and breaks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake.base.clock import ManualClock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer import batches
from mooncake.transfer.batches import BatchBook, Job
from mooncake.transfer.engine import Notice, Op, TransferBatch, TransferOp
from mooncake.transfer.notices import Answer, Ear, Outbox, Words

OPS = [TransferOp(1, 0, 1, 0, 8)]


class Talk(RuleBasedStateMachine):
    """One sender, one peer with room for few words."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.book = BatchBook(self.clock)
        self.outbox = Outbox("peer", itertools.count(1))
        self.num_room = 3
        self.queue: list[Notice] = []
        self.heard: list[int] = []
        self.ear = Ear(self.deliver)
        self.jobs: list[Job] = []
        self.parts: dict[int, int] = {}
        self.wire: list[Words] = []
        self.back: list[Answer] = []
        self.lost_for_good: set[int] = set()
        self.errors: dict[int, str | None] = {}

    def deliver(self, notices: Sequence[Notice]) -> int:
        taken = notices[: self.num_room - len(self.queue)]
        self.queue += taken
        return len(taken)

    def carry(self) -> None:
        words = self.outbox.take()
        if words is not None:
            self.wire.append(words)

    # ------------------------------------------------------------ batches

    @rule(num_parts=st.integers(0, 2), deadline=st.none() | st.integers(0, 20))
    def submit(self, num_parts: int, deadline: int | None) -> None:
        batch = TransferBatch(
            op=Op.WRITE,
            peer=SegmentRef("peer", {}, "h"),
            ops=OPS,
            deadline_s=deadline,
            notify=len(self.jobs).to_bytes(2, "big"),
        )
        job = self.book.open(batch)
        job.set_ops(OPS)
        self.outbox.add(job)
        self.jobs.append(job)
        self.parts[job.batch_id] = num_parts
        job.expect(num_parts)

    @precondition(lambda self: any(self.parts.values()))
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "done", "failed", "back"]))
    def do_part(self, data: st.DataObject, how: str) -> None:
        job = data.draw(st.sampled_from([j for j in self.jobs if self.parts[j.batch_id]]))
        if not job.begin():
            self.parts[job.batch_id] = 0
        elif how == "done":
            self.parts[job.batch_id] -= 1
            job.finish()
        elif how == "failed":
            job.finish("broken")
        else:
            job.give_back()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.jobs)).stop("cancelled")

    @rule(seconds=st.integers(0, 8))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        for job in self.book.take_expired(self.clock.now()):
            job.stop("late")

    # ------------------------------------------------------------ the wire

    @rule()
    def speak(self) -> None:
        assert self.outbox.is_due or self.outbox.take() is None
        self.carry()

    @precondition(lambda self: self.outbox.under_way)
    @rule()
    def repeat(self) -> None:
        """A connection broke; over the next one all is said again. The old one is cut."""
        assert self.outbox.under_way is not None
        self.wire = [self.outbox.under_way]
        self.back.clear()

    @precondition(lambda self: self.wire)
    @rule(twice=st.booleans())
    def arrive(self, twice: bool) -> None:
        words = self.wire[0] if twice else self.wire.pop(0)
        self.back.append(self.ear.hear("us", words))

    @precondition(lambda self: self.back)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.back) - 1))
        self.outbox.answered(self.back.pop(index))

    @rule()
    def the_peer_falls_silent(self) -> None:
        """It is given up; what it has not read of the old connection it never will."""
        words = self.outbox.under_way
        if words is not None:
            self.lost_for_good |= {int.from_bytes(each, "big") for each in words.payloads}
        self.wire.clear()
        self.back.clear()
        self.outbox.give_up("silent")

    @rule()
    def listen(self) -> None:
        self.heard += [int.from_bytes(notice.payload, "big") for notice in self.queue]
        self.queue.clear()

    # ------------------------------------------------------------ what holds

    def all_heard(self) -> list[int]:
        return self.heard + [int.from_bytes(notice.payload, "big") for notice in self.queue]

    @rule()
    def poll(self) -> None:
        for done in self.book.poll():
            assert done.batch_id not in self.errors
            self.errors[done.batch_id] = done.error

    @invariant()
    def is_heard_once_in_order_and_only_if_whole(self) -> None:
        heard = self.all_heard()
        assert heard == sorted(set(heard)), "twice, or out of order"
        for number, job in enumerate(self.jobs):
            if number in heard:
                assert self.parts[job.batch_id] == 0, "before all bytes had arrived"
                if job.ended and number not in self.lost_for_good:
                    assert job.error is None, "it failed and was heard"
            elif job.ended:
                assert job.error is not None, "it ended well and was not heard"
            if number in self.lost_for_good:
                assert job.error is not None
                assert "unconfirmed" in job.error
        self.outbox.check_integrity()
        self.book.check_integrity()

    def teardown(self) -> None:
        """On a quiet wire all that can be said is, and every batch ends."""
        self.num_room = batches.MAX_NOTICES
        for job in self.jobs:
            while self.parts[job.batch_id]:
                self.do_last_part(job)
        self.wire = [self.outbox.under_way] if self.outbox.under_way is not None else []
        self.carry()
        while self.wire:
            self.outbox.answered(self.ear.hear("us", self.wire.pop(0)))
            self.carry()
        self.poll()
        assert len(self.errors) == len(self.jobs)
        assert self.outbox.is_empty
        self.is_heard_once_in_order_and_only_if_whole()
        self.book.close()

    def do_last_part(self, job: Job) -> None:
        self.parts[job.batch_id] -= 1
        if job.begin():
            job.finish()


TestTalk = Talk.TestCase
TestTalk.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
