"""The engine's dealings with its runner and its role: steps, ends, ownership, books."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base.blocks import block_keys
from mooncake.base.errors import InternalError
from mooncake.base.request import (
    FinishReason,
    Priority,
    PromptLogprobs,
    RequestOutput,
    unpacked_logprobs,
)
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import LayerDone, StepResult
from mooncake.engine.sequence import Made, Sequence, SequenceState
from tests.support.engine.engines import Bench, failure_of, request
from tests.support.engine.fake_runner import History, expected_output, fake_logprobs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def received(bench: Bench, prompt: list[int], **settings: Any) -> Sequence:
    """Return a sequence whose prompt's KV and first token came from another worker."""
    order = request(prompt, **settings)
    pages = bench.engine.pool.allocate(bench.config.num_pages(len(prompt)))
    assert pages is not None
    history = History(bench.layout, prompt)
    for index, page in enumerate(pages):
        for layer in range(bench.layout.num_layers):
            data = history.slice(layer, index)
            bench.runner.page_slice(layer, page)[: len(data)] = data
    return Sequence(
        sequence_id=bench.sequence(prompt).sequence_id,
        request=order,
        output_tokens=expected_output(bench.layout, order)[:1],
        pages=pages,
        num_computed=len(prompt),
    )


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs | None:
    """Return the entries that come with `output`; None if it brings none."""
    packed = output.prompt_logprobs
    return unpacked_logprobs(packed) if memoryview(packed) else None


# ------------------------------------------------------------ from prompt to tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 9, 32])
def test_tokens_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    bench = Bench(max_chunk_tokens=chunk)
    sequence = bench.add(PROMPT, max_tokens=6)
    bench.run()
    assert bench.tokens[sequence.sequence_id] == expected_output(bench.layout, sequence.request)
    assert bench.ends[sequence.sequence_id].reason is FinishReason.LENGTH
    assert len(bench.runner.plans) == -(-9 // chunk) + 5


def test_chunks_before_the_last_give_no_output() -> None:
    bench = Bench(max_chunk_tokens=4)
    bench.add(PROMPT)
    assert [len(bench.step()) for _ in range(3)] == [0, 0, 1]


def test_a_sequence_is_described_to_the_runner_once() -> None:
    bench = Bench()
    first, second = bench.add(PROMPT, max_tokens=3), bench.add([1, 2], max_tokens=2)
    bench.run()
    plans = bench.runner.plans
    assert [len(plan.starts) for plan in plans] == [2, 0, 0]
    assert plans[0].starts[0].prompt_tokens == first.prompt_tokens
    assert [plan.ended for plan in plans] == [[], [], [second.sequence_id]]
    bench.add([5], max_tokens=1)
    bench.run()
    assert bench.runner.plans[-1].ended == [first.sequence_id]


def test_without_prefix_caching_no_page_gets_a_key() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add([1] * 8, max_tokens=2)
    bench.run()
    assert bench.engine.pool.inventory() == []
    assert bench.engine.pool.num_free == bench.engine.pool.num_blocks


def test_a_preempted_sequence_is_started_anew_with_its_tokens() -> None:
    bench = Bench(num_blocks=6, enable_prefix_caching=False)
    first = bench.add([1] * 8, max_tokens=9)
    last = bench.add([2] * 8, max_tokens=9)
    bench.run()
    assert bench.engine.counters["preemptions"] >= 1
    starts = [start for plan in bench.runner.plans for start in plan.starts]
    again = [start for start in starts if start.sequence_id == last.sequence_id]
    assert len(again) == 1 + last.num_preemptions
    assert again[-1].output_tokens == bench.tokens[last.sequence_id][: len(again[-1].output_tokens)]
    for sequence in (first, last):
        want = expected_output(bench.layout, sequence.request)
        assert bench.tokens[sequence.sequence_id] == want


def test_a_sequence_that_is_back_in_the_step_that_preempted_it_starts_anew() -> None:
    """Its pages are now the other's, of the same tokens: a runner that goes on adding to those it
    had would read what is not this sequence's any more.
    """
    bench = Bench(num_blocks=4, max_chunk_tokens=4)
    sequences = [bench.add([1] * 4, max_tokens=9) for _ in range(2)]
    bench.run()
    [again] = [plan for plan in bench.runner.plans if plan.ended and plan.starts]
    assert again.ended == [start.sequence_id for start in again.starts]
    for sequence in sequences:
        want = expected_output(bench.layout, sequence.request)
        assert bench.tokens[sequence.sequence_id] == want


def displaced(bench: Bench, **settings: Any) -> Sequence:
    """Return a batch sequence that lost its pages to a premium one in mid-prompt."""
    bench.add([7], max_tokens=3, priority=Priority.BATCH)
    bench.step()
    low = bench.add(PROMPT, priority=Priority.BATCH, **settings)
    bench.step()
    assert low.num_computed == bench.config.max_chunk_tokens
    bench.add([8] * 20, max_tokens=1, priority=Priority.PREMIUM)
    bench.step()
    assert (low.num_preemptions, low.pages) == (1, [])
    return low


def test_prompt_logprobs_are_whole_after_a_preemption_in_mid_prompt() -> None:
    bench = Bench(num_blocks=6, max_chunk_tokens=5)
    low = displaced(bench, num_prompt_logprobs=0)
    outputs: list[Made] = []
    while not bench.engine.idle:
        outputs += bench.step()
    found = [(sequence, prompt_logprobs(output)) for sequence, output in outputs]
    assert [each for each in found if each[1] is not None] == [
        (low, [None, *(fake_logprobs(token, 0) for token in PROMPT[1:])])
    ]


def test_blocks_computed_again_are_published_again() -> None:
    bench = Bench(num_blocks=6, max_chunk_tokens=5)
    displaced(bench)
    keys = block_keys("fake", PROMPT, 4)
    assert bench.engine.pool.match(keys) == []
    bench.run()
    assert len(bench.engine.pool.match(keys)) == 2


def test_stop_tokens_end_a_sequence() -> None:
    bench = Bench()
    want = expected_output(bench.layout, request(PROMPT, max_tokens=9))
    stop = want[3]
    sequence = bench.add(PROMPT, max_tokens=9, stop_token_ids=frozenset({stop}))
    bench.run()
    end = bench.ends[sequence.sequence_id]
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert bench.tokens[sequence.sequence_id] == want[: want.index(stop) + 1]


def test_the_model_length_ends_a_sequence() -> None:
    bench = Bench(max_model_len=12)
    sequence = bench.add(PROMPT, max_tokens=9)
    bench.run()
    assert len(bench.tokens[sequence.sequence_id]) == 3
    assert bench.ends[sequence.sequence_id].reason is FinishReason.LENGTH


def test_a_prefill_worker_gets_one_token() -> None:
    bench = Bench()
    sequence = bench.sequence(PROMPT, max_tokens=9)
    sequence.max_new_tokens = 1
    assert bench.engine.add(sequence, 0.0)
    bench.run()
    assert sequence.output_tokens == expected_output(bench.layout, sequence.request)[:1]
    assert bench.ends[sequence.sequence_id].reason is FinishReason.LENGTH


def test_a_request_goes_on_after_tokens_streamed_elsewhere() -> None:
    bench = Bench()
    want = expected_output(bench.layout, request(PROMPT, max_tokens=9))
    sequence = bench.sequence(PROMPT, max_tokens=9)
    sequence.output_tokens += want[:5]
    assert bench.engine.add(sequence, 0.0)
    bench.run()
    assert sequence.output_tokens == want
    assert bench.tokens[sequence.sequence_id] == want[5:]


def test_logprobs_reach_the_output() -> None:
    bench = Bench(max_chunk_tokens=4)
    sequence = bench.add(PROMPT, max_tokens=2, num_logprobs=2, num_prompt_logprobs=0)
    outputs: list[Made] = []
    while not bench.engine.idle:
        outputs += bench.step()
    assert [each for _, output in outputs for each in output.logprobs or []] == [
        fake_logprobs(token, 2) for token in bench.tokens[sequence.sequence_id]
    ]
    assert [prompt_logprobs(output) for _, output in outputs] == [
        [None, *(fake_logprobs(token, 0) for token in PROMPT[1:])],
        None,
    ]


# ------------------------------------------------------------ the prefix cache


def test_a_finished_sequence_leaves_its_blocks_to_the_next() -> None:
    bench = Bench()
    first = bench.add(PROMPT, max_tokens=8)
    bench.run()
    turn = bench.add([*PROMPT, *bench.tokens[first.sequence_id], 7], max_tokens=3)
    bench.run()
    assert turn.num_cached_tokens == 16  # 9 prompt + 7 computed output tokens
    assert bench.tokens[turn.sequence_id] == expected_output(bench.layout, turn.request)
    assert bench.engine.counters["tokens_reused"] == 16


def test_another_tenant_finds_nothing() -> None:
    bench = Bench()
    bench.add(PROMPT)
    bench.run()
    other = bench.add(PROMPT, tenant="other")
    bench.run()
    assert other.num_cached_tokens == 0


def test_full_blocks_are_published_when_computed() -> None:
    bench = Bench(max_chunk_tokens=5)
    bench.add(PROMPT)
    keys = block_keys("fake", PROMPT, 4)
    bench.tick()
    assert bench.engine.pool.match(keys) == []
    bench.finish_step()
    assert len(bench.engine.pool.match(keys)) == 1
    assert bench.engine.pool.drain_events() == (keys[:1], [])


# ------------------------------------------------------------ KV from elsewhere


def test_a_received_sequence_goes_on_with_its_second_token() -> None:
    bench = Bench()
    sequence = received(bench, PROMPT, max_tokens=6)
    assert bench.engine.add(sequence, 0.0)
    bench.run()
    assert sequence.output_tokens == expected_output(bench.layout, sequence.request)
    slot = bench.runner.plans[0].slots[0]
    assert (slot.start, slot.tokens) == (9, sequence.output_tokens[:1])


def test_received_blocks_are_reusable_at_once() -> None:
    bench = Bench()
    assert bench.engine.add(received(bench, PROMPT, max_tokens=6), 0.0)
    twin = bench.add(PROMPT)
    bench.run()
    assert twin.num_cached_tokens == 8
    assert bench.tokens[twin.sequence_id] == expected_output(bench.layout, twin.request)


def test_a_fetched_prefix_is_not_computed_again() -> None:
    bench = Bench()
    sequence = received(bench, PROMPT[:8], max_tokens=1)
    fetched = bench.sequence(PROMPT)
    fetched.pages, fetched.num_computed = sequence.pages, 8
    assert bench.engine.add(fetched, 0.0)
    bench.run()
    assert bench.runner.plans[0].slots[0].start == 8
    assert fetched.output_tokens == expected_output(bench.layout, fetched.request)


def test_prompt_logprobs_are_worth_computing_a_fetched_prefix_again() -> None:
    bench = Bench()
    prefix = received(bench, PROMPT[:8], max_tokens=1)
    sequence = bench.sequence(PROMPT, num_prompt_logprobs=0)
    sequence.pages, sequence.num_computed, sequence.num_cached_tokens = prefix.pages, 8, 8
    assert bench.engine.add(sequence, 0.0)
    ((_, output),) = bench.step()
    assert len(unpacked_logprobs(output.prompt_logprobs)) == 9
    assert sequence.num_cached_tokens == 0


# ------------------------------------------------------------ being added


def test_a_full_line_says_no_and_takes_nothing() -> None:
    bench = Bench(max_waiting=1)
    bench.add([1])
    refused = received(bench, PROMPT)
    assert not bench.engine.add(refused, 0.0)
    assert refused.state is SequenceState.NEW
    bench.engine.check_integrity(role_holds=refused.pages)


def change(sequence: Sequence, **fields: Any) -> Sequence:
    for name, value in fields.items():
        setattr(sequence, name, value)
    return sequence


def test_contradictions_are_refused() -> None:
    bench = Bench()
    known = bench.add([1])
    twin = Sequence(known.sequence_id, request([1]))
    with pytest.raises(ValueError, match="the id is in use"):
        bench.engine.add(twin, 0.0)
    with pytest.raises(ValueError, match="at least the last one has to be left"):
        bench.engine.add(change(bench.sequence([1]), num_computed=1), 0.0)
    with pytest.raises(ValueError, match="do not hold the tokens"):
        bench.engine.add(change(bench.sequence([1] * 9), num_computed=5, pages=[0]), 0.0)
    with pytest.raises(ValueError, match="all its 1 tokens are there"):
        bench.engine.add(change(bench.sequence([1], max_tokens=1), output_tokens=[4]), 0.0)
    bench.run()
    with pytest.raises(ValueError, match="added before"):
        bench.engine.add(change(known, sequence_id=77), 0.0)


# ------------------------------------------------------------ ends and ownership


def end_one(bench: Bench) -> Sequence:
    """Return a sequence that has just ended and is not released."""
    sequence = bench.add(PROMPT, max_tokens=1)
    bench.engine.tick(0.0)
    (result,) = bench.runner.poll()
    assert isinstance(result, StepResult)
    ((_, output),) = bench.engine.on_step(result, 0.0)
    assert output.finish is not None
    return sequence


def test_pages_of_an_ended_sequence_stay_until_released() -> None:
    bench = Bench()
    sequence = end_one(bench)
    bench.runner.check(sequence.pages, PROMPT)
    assert (bench.engine.pool.num_held, bench.engine.idle) == (3, False)
    bench.engine.release(sequence)
    assert (bench.engine.pool.num_held, bench.engine.idle) == (0, True)
    with pytest.raises(ValueError, match="no pages to release"):
        bench.engine.release(sequence)


def test_the_integrity_check_finds_a_forgotten_release() -> None:
    bench = Bench()
    sequence = end_one(bench)
    bench.engine.check_integrity()
    bench.engine.check_integrity(unreleased_ids=[sequence.sequence_id])
    with pytest.raises(AssertionError, match=r"\[1\] were never released"):
        bench.engine.check_integrity(unreleased_ids=())


def test_the_integrity_check_finds_holds_without_a_holder() -> None:
    bench = Bench()
    pages = bench.engine.pool.allocate(2) or []
    bench.engine.check_integrity(role_holds=pages)
    with pytest.raises(AssertionError, match="page 0 is held 1 times, 0 are known"):
        bench.engine.check_integrity(role_holds=())
    sequence = bench.add(PROMPT)
    bench.tick()
    bench.engine.pool.release(sequence.pages)
    with pytest.raises(AssertionError, match="is held 0 times, 1 are known"):
        bench.engine.check_integrity()


def test_the_integrity_check_finds_a_page_that_two_would_write_to() -> None:
    bench = Bench()
    first, second = bench.add([1]), bench.add([2])
    bench.tick()
    bench.engine.pool.release(second.pages)
    second.pages = list(first.pages)
    bench.engine.pool.hold(second.pages)
    with pytest.raises(AssertionError, match="does not belong to one"):
        bench.engine.check_integrity()


def test_an_abort_in_line_lets_go_at_once() -> None:
    bench = Bench()
    sequence = received(bench, PROMPT)
    assert bench.engine.add(sequence, 0.0)
    assert bench.engine.abort(sequence.sequence_id)
    assert bench.engine.idle
    bench.engine.check_integrity(role_holds=())
    assert not bench.engine.abort(sequence.sequence_id)


def test_an_abort_in_flight_lets_go_when_the_step_has_ended() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT)
    bench.tick()
    assert bench.engine.abort(sequence.sequence_id)
    assert not bench.engine.abort(sequence.sequence_id)
    assert bench.engine.pool.num_held == 3
    bench.engine.check_integrity(role_holds=())
    assert bench.finish_step() == []
    assert bench.engine.pool.num_held == 0
    assert bench.engine.idle
    # What the step computed is good all the same.
    assert len(bench.engine.pool.match(block_keys("fake", PROMPT, 4))) == 2
    bench.add([1])
    bench.tick()
    assert bench.runner.plans[-1].ended == [sequence.sequence_id]


def test_an_abort_between_steps_lets_go_at_once() -> None:
    bench = Bench()
    sequence = bench.add(PROMPT)
    bench.step()
    assert bench.engine.abort(sequence.sequence_id)
    assert bench.engine.pool.num_held == 0
    assert sequence.sequence_id not in bench.ends


def test_a_failed_step_ends_its_sequences_and_publishes_nothing() -> None:
    bench = Bench(max_chunk_tokens=4)
    first = bench.add(PROMPT)
    bench.step()
    bench.runner.fail_next("out of memory")
    ((sequence, output),) = bench.step()
    assert (sequence, output.tokens) == (first, [])
    failure = failure_of(output)
    assert failure.status == 500
    assert "out of memory" in failure.message
    assert bench.engine.cost_sample() is None
    assert len(bench.engine.pool.match(block_keys("fake", PROMPT, 4))) == 1
    again = bench.add(PROMPT)
    bench.run()
    assert bench.tokens[again.sequence_id] == expected_output(bench.layout, again.request)


def test_a_sequence_without_its_sample_fails_alone() -> None:
    bench = Bench()
    first, second = bench.add([1]), bench.add([2])
    bench.tick()
    (result,) = bench.runner.poll()
    assert isinstance(result, StepResult)
    short = StepResult(step_id=0, tokens={1: result.tokens[1]}, seconds=0.1)
    (of_first, of_second) = bench.engine.on_step(short, 1.0)
    assert (of_first[0], of_first[1].finish) == (first, None)
    assert of_second[0] is second
    failure_of(of_second[1])


def test_what_can_never_run_ends_through_tick() -> None:
    bench = Bench(num_blocks=2)
    never = bench.add([1] * 9)
    ((sequence, output),) = bench.tick()
    assert sequence is never
    failure_of(output)
    assert bench.engine.idle


def test_a_step_that_is_not_in_flight_is_our_fault() -> None:
    bench = Bench()
    with pytest.raises(InternalError, match="step 5, which is not in flight"):
        bench.engine.on_step(StepResult(step_id=5, seconds=0.0), 0.0)
    with pytest.raises(KeyError):
        bench.engine.step(5)


# ------------------------------------------------------------ steps and figures


def test_layers_are_reported_only_where_asked_for() -> None:
    bench = Bench()
    sequence = bench.sequence(PROMPT, max_tokens=1)
    sequence.report_layers = True
    assert bench.engine.add(sequence, 0.0)
    bench.tick()
    assert bench.runner.poll(limit=1) == [LayerDone(step_id=0, layer=0)]
    step = bench.engine.step(0)
    assert step.sequences == [sequence]
    # The reported layer lies in the pages; later ones do not yet.
    history = History(bench.layout, PROMPT)
    assert bench.runner.read(0, step.plan.slots[0].pages, 9) == history.rows(0, 0, 9)
    assert bench.runner.read(1, step.plan.slots[0].pages, 9) != history.rows(1, 0, 9)
    bench.finish_step()
    bench.add(PROMPT, max_tokens=1)
    bench.tick()
    assert not bench.runner.plans[-1].report_layers


def test_steps_in_flight_never_share_a_sequence() -> None:
    bench = Bench(max_steps_in_flight=2, max_batched_tokens=8, max_num_seqs=4)
    sequences = [bench.add([number] * 8, max_tokens=4) for number in range(4)]
    bench.tick()
    assert [[slot.sequence_id for slot in plan.slots] for plan in bench.runner.plans] == [[1], [2]]
    bench.run()
    for sequence in sequences:
        want = expected_output(bench.layout, sequence.request)
        assert bench.tokens[sequence.sequence_id] == want


def test_chunks_of_a_prompt_follow_one_another() -> None:
    bench = Bench(max_steps_in_flight=3, max_batched_tokens=8, max_num_seqs=4)
    long = bench.add(list(range(20)), max_tokens=3)
    other = bench.add([5] * 6, max_tokens=3)
    bench.tick()
    planned = [
        [(slot.sequence_id, slot.start, len(slot.tokens), slot.sample) for slot in plan.slots]
        for plan in bench.runner.plans
    ]
    first, second = long.sequence_id, other.sequence_id
    assert planned == [
        [(first, 0, 8, False)],
        [(first, 8, 8, False)],
        [(first, 16, 4, True), (second, 0, 4, False)],
    ]
    assert (long.num_missing, long.num_unplanned) == (20, 0)
    bench.engine.check_integrity()
    bench.run()
    for sequence in (long, other):
        assert bench.tokens[sequence.sequence_id] == expected_output(bench.layout, sequence.request)


def test_an_abort_waits_for_all_steps_of_a_sequence() -> None:
    bench = Bench(max_steps_in_flight=3, max_batched_tokens=8, max_num_seqs=4)
    sequence = bench.add(list(range(30)), max_tokens=3)
    bench.tick()
    assert bench.engine.abort(sequence.sequence_id)
    assert not bench.engine.abort(sequence.sequence_id)
    for left in (2, 1, 0):
        bench.finish_step()
        assert len(sequence.steps) == left
        assert bool(bench.engine.pool.num_held) is bool(left), "its pages may be written until then"
        bench.tick()
        assert len(sequence.steps) == left, "no further chunk of it begins"
    assert bench.engine.idle


def test_a_failed_chunk_ends_its_sequence_after_those_behind_it() -> None:
    bench = Bench(max_steps_in_flight=3, max_batched_tokens=8, max_num_seqs=4)
    sequence = bench.add(list(range(24)), max_tokens=3)
    bench.tick()
    results = [StepResult(step_id=0, seconds=1.0, error="out of memory")]
    results += [StepResult(step_id=1, seconds=1.0)]
    results += [StepResult(step_id=2, tokens={sequence.sequence_id: [7]}, seconds=1.0)]
    ends = [bench.engine.on_step(result, 0.0) for result in results]
    assert ends[:2] == [[], []]
    [(_, end)] = ends[2]
    assert "out of memory" in failure_of(end).message
    assert (sequence.num_computed, sequence.output_tokens) == (0, [])
    bench.engine.release(sequence)
    bench.engine.check_integrity(role_holds=(), unreleased_ids=())


def test_each_stage_has_some_of_the_streams() -> None:
    bench = Bench(max_steps_in_flight=4, num_stages=3, max_batched_tokens=32, max_num_seqs=8)
    for number in range(7):
        bench.add([number] * 3, max_tokens=6)
    bench.tick()
    bench.finish_step()
    for _ in range(6):
        bench.tick()
        flying = [len(step.plan.slots) for step in bench.engine._in_flight.values()]
        assert sum(flying) == 7
        assert max(flying) <= 3
        bench.finish_step()
    bench.run()


def test_costs_of_streams_alone_are_learned_together_and_those_of_prompts_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[int] = []
    monkeypatch.setattr(
        StepCostModel, "observe", lambda model, samples: learned.append(len(list(samples)))
    )
    bench = Bench(max_gap_s=0.5, num_blocks=64, max_model_len=256)
    bench.add([1] * 8, max_tokens=35)
    bench.run()
    assert learned == [1, 16, 16]
    bench.add([2] * 8, max_tokens=1)
    bench.run()
    assert learned == [1, 16, 16, 3]


def test_scheduling_is_deterministic() -> None:
    def plans() -> list[object]:
        bench = Bench(num_blocks=9, max_num_seqs=3, max_chunk_tokens=5)
        for number in range(6):
            bench.add([number % 2] * (4 + number), max_tokens=9)
        bench.run()
        return [
            msgspec.structs.replace(plan, starts=[start.sequence_id for start in plan.starts])
            for plan in bench.runner.plans
        ]

    assert plans() == plans()
