"""The table of jobs: one attempt of a request at a time, and older ones are fenced off."""

from __future__ import annotations

import pytest

from mooncake.base import AbortTask, RequestTask, WorkerRef
from mooncake.base.blocks import prompt_keys
from mooncake.base.kv_layout import KvLayout
from mooncake.base.messages import Reserved
from mooncake.decode.task import DecodeJob
from mooncake.engine.sequence import Sequence
from mooncake.instance.job_table import EARLY_S, MAX_EARLY, MAX_REMEMBERED, Job, JobTable
from mooncake.rpc.codec import decode, encode
from mooncake.scheduler.fairness import QueuePosition
from mooncake.scheduler.placement.conductor import Layout
from mooncake.scheduler.requests.record import RequestRecord
from tests.support.scheduler.scheduling import GATEWAY, ref, request

LAYOUT = KvLayout(num_layers=1, block_tokens=4, kv_width=8, dtype="float32", fingerprint="layout-1")
Table = JobTable[Job]


@pytest.fixture
def table() -> Table:
    return JobTable()


def task(
    name: str = "r",
    attempt: int = 1,
    gateway: WorkerRef = GATEWAY,
    outputs: int = 0,
    num_prompt_logprobs: int | None = None,
) -> RequestTask:
    return RequestTask(
        request=request(name, num_prompt=16, num_prompt_logprobs=num_prompt_logprobs),
        attempt=attempt,
        gateway=gateway,
        decode=ref("d0"),
        output_tokens=list(range(outputs)),
    )


def job(name: str = "r", attempt: int = 1, gateway: WorkerRef = GATEWAY) -> Job:
    return Job(1, task(name, attempt, gateway), LAYOUT)


def reserved(name: str = "r", attempt: int = 1) -> Reserved:
    return Reserved(request_id=name, attempt=attempt, decode=ref("d0"), parts=[])


def test_repeats_and_older_attempts_are_not_new(table: Table) -> None:
    assert table.is_new(task(attempt=2))
    known = job(attempt=2)
    table.add(known)
    assert [table.is_new(task(attempt=number)) for number in (1, 2, 3)] == [False, False, True]
    assert [table.is_over("r", number) for number in (1, 2)] == [True, False]
    assert table.find("r", 2) is table.get("r") is known
    assert table.find("r", 1) is None
    table.remove(known)
    table.remove(known)
    assert [table.is_new(task(attempt=number)) for number in (1, 2, 3)] == [False, False, True]
    assert len(table) == 0


def test_an_abort_ends_its_attempt_and_older_ones_even_before_they_come(table: Table) -> None:
    table.add(job(attempt=1))
    assert table.abort(AbortTask(request_id="r", attempt=0)) is None
    ended = table.abort(AbortTask(request_id="r", attempt=3))
    assert ended is not None
    table.remove(ended)
    assert [table.is_new(task(attempt=number)) for number in (2, 3, 4)] == [False, False, True]
    table.check_integrity()


def test_an_attempt_that_was_aborted_and_goes_on_is_found_out(table: Table) -> None:
    table.add(job())
    table.abort(AbortTask(request_id="r", attempt=1))
    with pytest.raises(AssertionError, match="is over and goes on"):
        table.check_integrity()


def test_a_gateway_that_has_restarted_numbers_its_attempts_anew(table: Table) -> None:
    again = WorkerRef(GATEWAY.worker_id, "g1", GATEWAY.address)
    other = ref("other-gateway")
    assert table.on_welcome(GATEWAY) == []
    old, kept = job("old", attempt=7), job("kept", gateway=other)
    table.add(old)
    table.add(kept)
    assert table.of_gateway(GATEWAY) == [old]
    table.remove(done := job("done", attempt=9))
    assert table.on_welcome(again) == [old]
    table.remove(old)
    assert table.is_new(task("done", attempt=1)), "its fence was that of the former gateway"
    assert list(table) == [kept]
    assert done.attempt == 9


def test_early_reservations_wait_for_their_task_for_a_while(table: Table) -> None:
    assert table.keep_early(reserved("a"), 0.0) is None
    assert table.keep_early(reserved("b"), 5.0) is None
    assert table.keep_early(reserved("a"), 8.0) is None, "a repeat waits no longer than the first"
    assert table.take_early(job("b", attempt=2)) is None
    assert table.take_early(job("b")) == reserved("b")
    assert table.expired_early(EARLY_S - 1) == []
    assert table.expired_early(EARLY_S) == [reserved("a")]
    assert table.expired_early(EARLY_S) == []


def test_tables_are_bounded(table: Table) -> None:
    for number in range(MAX_EARLY):
        assert table.keep_early(reserved(f"r{number}"), 0.0) is None
    assert table.keep_early(reserved("last"), 0.0) == reserved("r0")
    for number in range(MAX_REMEMBERED + 1):
        table.abort(AbortTask(request_id=f"r{number}", attempt=1))
    assert table.is_new(task("r0"))
    assert not table.is_new(task("r1"))
    table.check_integrity()


def test_sequences_lead_to_their_jobs(table: Table) -> None:
    older, known = job(attempt=1), job(attempt=2)
    table.add(known)
    assert table.of_sequence(known) is known
    assert table.of_sequence(older) is None, "a step in flight may still compute it"
    table.remove(known)
    assert table.of_sequence(known) is None


def test_the_last_token_is_always_computed() -> None:
    whole = [Job(1, task(outputs=number), LAYOUT) for number in (0, 1)]
    assert [(each.num_task_tokens, len(each.keys)) for each in whole] == [(16, 4), (17, 4)]
    assert [len(each.reusable_keys) for each in whole] == [3, 4]
    scored = [Job(1, task(outputs=number, num_prompt_logprobs=0), LAYOUT) for number in (0, 1)]
    assert scored[0].reusable_keys == [], "every prompt token's logits are wanted"
    assert len(scored[1].reusable_keys) == 4


def test_log_probabilities_of_a_prompt_that_prefill_delivered_are_not_computed_again() -> None:
    scored = DecodeJob(1, task(num_prompt_logprobs=0), LAYOUT)
    scored.take_sampled(5)
    assert (scored.output_tokens, scored.num_tokens, scored.num_task_tokens) == ([5], 17, 16)
    assert len(scored.reusable_keys) == 4
    assert scored.task.output_tokens == [], "the task says what the gateway knew"


def test_an_engine_does_not_hash_again_what_a_job_has_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = LAYOUT.fingerprint, LAYOUT.block_tokens
    for known in (0, 1, 6):
        made = Job(1, task(outputs=known), LAYOUT)
        outputs = list(made.task.output_tokens)
        expected = Sequence(1, made.task.request, output_tokens=outputs).extend_keys(*names)
        with monkeypatch.context() as patch:
            patch.setattr("mooncake.engine.sequence.extend_chain", None)
            assert made.extend_keys(*names) == expected


def test_choices_of_a_call_are_hashed_once_by_the_gateway_and_the_worker() -> None:
    prompt_keys.cache_clear()
    layout = Layout(fingerprint=LAYOUT.fingerprint, block_tokens=LAYOUT.block_tokens)
    for number in range(3):
        asked = request(f"r{number}", prompt_tokens=list(range(16)))
        record = RequestRecord(
            request=asked, sink=lambda _: None, accepted_s=0.0,
            queue_position=QueuePosition((0.0, 0)),
        )  # fmt: skip
        sent = decode(
            encode(RequestTask(request=asked, attempt=1, gateway=GATEWAY, decode=ref("d0")))
        )
        assert isinstance(sent, RequestTask)
        assert list(record.block_keys(layout)) == Job(1, sent, LAYOUT).keys
    assert prompt_keys.cache_info().misses == 1
