"""A view adds to a worker's last report what was given to it since, and takes off what ended."""

from typing import Any

import pytest
from msgspec.structs import replace

from mooncake.base import Role, WorkerLoad
from mooncake.scheduler.placement.views import REPORT_LAG_S, Assignment, InstanceView
from tests.support.scheduler.scheduling import TOKEN_S, hello


@pytest.fixture
def prefill() -> InstanceView:
    return InstanceView.of(hello("p0", Role.PREFILL))


@pytest.fixture
def decode() -> InstanceView:
    return InstanceView.of(hello("d0", Role.DECODE, num_blocks=100))


def compute(name: str, tokens: int, at: float = 0.0) -> Assignment:
    return Assignment(
        request_id=name, placed_s=at, num_prefill_tokens=tokens, prefill_s=TOKEN_S * tokens
    )


def generate(name: str, tokens: int, blocks: int, at: float = 0.0) -> Assignment:
    return Assignment(request_id=name, placed_s=at, num_context_tokens=tokens, num_blocks=blocks)


def test_a_fresh_worker_is_empty(prefill: InstanceView) -> None:
    assert prefill.queued_s() == 0
    assert prefill.num_queued_tokens() == 0
    assert prefill.num_free_blocks() == 1000
    assert prefill.num_sequences() == 0


def test_assignments_queue_until_their_first_token(prefill: InstanceView) -> None:
    prefill.assign(compute("a", 1000))
    prefill.assign(compute("b", 500))
    assert prefill.queued_s() == pytest.approx(1.5)
    prefill.prefilled("a")
    prefill.prefilled("a")
    assert prefill.queued_s() == pytest.approx(0.5)
    assert prefill.release("a") is not None
    assert prefill.release("a") is None
    assert prefill.num_queued_tokens() == 500


def test_queued_prompts_are_summed_once_after_each_change(prefill: InstanceView) -> None:
    """However often it is asked: for each of the hundreds of sequences of one call."""
    sums: list[int] = []

    class Counted(dict[str, Assignment]):
        def values(self) -> Any:
            sums.append(len(self))
            return super().values()

    prefill._pending.to_compute = Counted()
    for name in "abc":
        prefill.assign(compute(name, 100))
        assert [prefill.queued_s() for _ in range(3)] == [prefill.queued_s()] * 3
    prefill.prefilled("b")
    assert prefill.queued_s() == prefill.queued_s() == pytest.approx(0.2)
    prefill.release("a")
    assert prefill.num_queued_tokens() == 100
    assert sums == [1, 2, 3, 2, 1]


def test_a_report_shows_progress_within_a_prompt(prefill: InstanceView) -> None:
    prefill.assign(compute("a", 1000))
    prefill.observe(WorkerLoad(num_queued_tokens=250), now=1.0)
    assert prefill.queued_s() == pytest.approx(0.25)


def test_what_the_report_cannot_know_is_added(prefill: InstanceView) -> None:
    prefill.assign(compute("a", 1000))
    prefill.assign(compute("late", 300, at=1.0 - REPORT_LAG_S / 2))
    prefill.observe(WorkerLoad(num_queued_tokens=1000), now=1.0)
    assert prefill.queued_s() == pytest.approx(1.3)
    assert prefill.num_queued_tokens() == 1300


def test_what_ended_since_the_report_is_taken_off(prefill: InstanceView) -> None:
    prefill.assign(compute("a", 1000))
    prefill.assign(compute("b", 200))
    prefill.observe(WorkerLoad(num_queued_tokens=1200), now=1.0)
    prefill.release("a")
    assert prefill.num_queued_tokens() == 200
    assert prefill.queued_s() == pytest.approx(0.2)
    prefill.observe(WorkerLoad(num_queued_tokens=200), now=2.0)
    assert prefill.queued_s() == pytest.approx(0.2)


def test_tokens_of_another_gateway_count_at_the_models_rate(prefill: InstanceView) -> None:
    prefill.assign(compute("a", 100))
    prefill.observe(WorkerLoad(num_queued_tokens=1100), now=1.0)
    assert prefill.queued_s() == pytest.approx(1.1, rel=0.05)


def test_decode_counts_tokens_sequences_and_blocks_not_yet_reported(decode: InstanceView) -> None:
    decode.observe(
        WorkerLoad(num_running=2, num_context_tokens=50, num_free_blocks=60, num_total_blocks=100),
        now=1.0,
    )
    decode.assign(generate("a", 40, 12, at=1.0))
    assert decode.num_sequences() == 3
    assert decode.num_context_tokens() == 90
    assert decode.num_free_blocks() == 48
    decode.release("a")
    assert decode.num_sequences() == 2
    assert decode.num_free_blocks() == 60


def test_decode_takes_off_what_ended_since_the_report(decode: InstanceView) -> None:
    decode.assign(generate("a", 40, 12))
    decode.observe(
        WorkerLoad(num_running=1, num_context_tokens=44, num_free_blocks=88, num_total_blocks=100),
        now=1.0,
    )
    assert (decode.num_sequences(), decode.num_context_tokens()) == (1, 44)
    decode.release("a")
    assert decode.num_sequences() == 0
    assert decode.num_context_tokens() == 4
    assert decode.num_free_blocks() == 100


def test_a_report_too_late_to_show_a_waiting_sequence_does_not_hide_it(
    decode: InstanceView,
) -> None:
    decode.assign(generate("a", 40, 12))
    decode.observe(WorkerLoad(num_free_blocks=100, num_total_blocks=100), now=1.0)
    assert decode.num_sequences() == 1
    assert decode.num_context_tokens() == 40


def test_one_request_has_one_share(decode: InstanceView) -> None:
    decode.assign(generate("a", 40, 12))
    with pytest.raises(AssertionError, match="twice"):
        decode.assign(generate("a", 40, 12))


def test_streams_delay_the_prompts_of_their_worker(decode: InstanceView) -> None:
    """By half of the step that runs, and by their part of each step of the prompt."""
    assert decode.streams_s(100) == 0
    decode.hello = replace(decode.hello, max_batched_tokens=256)
    for name in ("a", "b"):
        decode.assign(generate(name, 400, 2))
    step_s = decode.cost.streams_s(2, 800)
    each_s = step_s - decode.cost.stream_coefficients[0]
    assert decode.streams_s(100) == pytest.approx(step_s / 2 + each_s)
    assert decode.streams_s(257) == pytest.approx(step_s / 2 + 2 * each_s)
    decode.assign(compute("prompt", 500))
    assert decode.num_prompts() == 1
    assert decode.streams_s(12) == pytest.approx(step_s / 2 + 2 * each_s, rel=0.2)
    assert decode.streams_s(13) > decode.streams_s(12)


def test_no_streams_decode_on_a_prefill_worker(prefill: InstanceView) -> None:
    prefill.assign(compute("a", 1000))
    assert prefill.streams_s(100) == 0


def test_the_part_of_a_step_that_is_over_is_not_waited_for(prefill: InstanceView) -> None:
    prefill.hello = replace(prefill.hello, max_batched_tokens=512)
    prefill.observe(WorkerLoad(num_queued_tokens=100), 0.5)
    assert prefill.passed_s(1.0) == 0, "nobody knows when another gateway's prompt began"
    prefill.observe(WorkerLoad(), 5.0)
    prefill.assign(compute("a", 1024, at=10.0))
    assert prefill.passed_s(10.0) == 0
    assert prefill.passed_s(10.2) == pytest.approx(0.2)
    assert prefill.passed_s(99.0) == pytest.approx(prefill.queued_s() / 2), "one step of two"
    prefill.assign(compute("b", 1024, at=10.3))
    assert prefill.passed_s(10.4) == pytest.approx(0.4), "it waits behind the first"
    prefill.observe(WorkerLoad(num_queued_tokens=2048), 10.5)
    prefill.observe(WorkerLoad(num_queued_tokens=1536), 11.0)
    assert prefill.passed_s(11.1) == pytest.approx(0.35), "the next step began between the reports"
    prefill.prefilled("a", 11.5)
    assert prefill.passed_s(11.6) == pytest.approx(0.1)
