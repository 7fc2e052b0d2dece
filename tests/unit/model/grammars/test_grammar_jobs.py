"""Work of the grammar library under a time limit: who exceeds it fails alone, threads come back."""

from __future__ import annotations

import threading

import pytest

from mooncake.base import SamplingParams, Unavailable
from mooncake.model.grammars.grammar_jobs import MAX_ABANDONED, GrammarJobs, TookTooLong
from mooncake.model.layers.sampler import Sampler
from tests.support.api.grammars import TOKENIZER, grammar_of, tiny_grammars
from tests.support.engine.fake_runner import sequence_of
from tests.support.waiting import LONG_S


@pytest.fixture
def go_on() -> threading.Event:
    return threading.Event()


def test_outcomes_are_those_of_the_work() -> None:
    jobs = GrammarJobs(2, 30.0, "test")
    wanted = [jobs.submit(lambda n=n: n * n) for n in range(20)]
    assert [jobs.wait(job) for job in wanted] == [n * n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        jobs.wait(jobs.submit(lambda: 1 // 0))
    assert jobs.num_abandoned == 0


def test_a_job_past_its_limit_fails_alone(go_on: threading.Event) -> None:
    jobs = GrammarJobs(1, 0.2, "test")
    late = jobs.submit(lambda: go_on.wait(LONG_S))
    behind = jobs.submit(lambda: "done")
    assert jobs.wait(behind) == "done"
    with pytest.raises(TookTooLong, match=r"more than 0\.2 s"):
        jobs.wait(late)
    assert jobs.num_abandoned == 1
    go_on.set()
    assert jobs.wait(jobs.submit(lambda: "again")) == "again"


def test_jobs_are_refused_while_too_many_threads_hang(go_on: threading.Event) -> None:
    jobs = GrammarJobs(1, 0.05, "test")
    for _ in range(MAX_ABANDONED):
        with pytest.raises(TookTooLong):
            jobs.wait(jobs.submit(lambda: go_on.wait(LONG_S)))
    with pytest.raises(Unavailable, match="grammars of other requests"):
        jobs.wait(jobs.submit(lambda: None))
    go_on.set()
    while jobs.num_abandoned:
        pass
    assert jobs.wait(jobs.submit(lambda: "well")) == "well"


def test_threads_of_closed_jobs_end_when_all_that_was_queued_is_done(
    go_on: threading.Event,
) -> None:
    before = set(threading.enumerate())
    jobs = GrammarJobs(2, LONG_S, "test")
    made = set(threading.enumerate()) - before
    assert len(made) == 2
    first = [jobs.submit(lambda: go_on.wait(LONG_S)) for _ in made]
    last = jobs.submit(lambda: "done")
    jobs.close()
    go_on.set()
    assert [jobs.wait(job) for job in first] == [True, True]
    assert jobs.wait(last) == "done"
    with pytest.raises(Unavailable, match="closed"):
        jobs.wait(jobs.submit(lambda: "late"))
    for thread in made:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_request_that_finds_no_thread_left_may_go_to_another_worker() -> None:
    grammars = tiny_grammars(limit_s=0.05)
    go_on = threading.Event()
    for _ in range(MAX_ABANDONED):
        with pytest.raises(TookTooLong):
            grammars._jobs.wait(grammars._jobs.submit(lambda: go_on.wait(LONG_S)))
    sampler = Sampler(TOKENIZER.vocab_size, grammars)
    sampler.start(sequence_of(1, SamplingParams(max_tokens=4, grammar=grammar_of('"a"')), [1]))
    assert sampler.broken([1])[1].status == 503
    go_on.set()
