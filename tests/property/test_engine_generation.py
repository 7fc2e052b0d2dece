"""However sequences are scheduled, interrupted and placed in pages, they get the oracle's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base.request import FinishReason, GenerateRequest, Priority
from mooncake.engine.sequence import Sequence, SequenceState
from tests.support.engines import Bench, request
from tests.support.fake_runner import VOCAB_SIZE, History, expected_output

prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 40).map(lambda n: [7] * n),  # shared prefixes
)
requests = st.builds(
    request,
    prompts,
    max_tokens=st.integers(1, 12),
    priority=st.sampled_from(Priority),
    tenant=st.sampled_from(["", "a"]),
    seed=st.integers(0, 2),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.one_of(st.just([]), st.just(list(range(0, VOCAB_SIZE, 4)))),
    num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
)


@dataclass
class Arrival:
    request: GenerateRequest
    before_step: int
    abort_after: int | None
    adopt: bool


arrivals = st.lists(
    st.builds(
        Arrival,
        request=requests,
        before_step=st.integers(0, 25),
        abort_after=st.one_of(st.none(), st.none(), st.integers(0, 10)),
        adopt=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)
configs = st.fixed_dictionaries(
    {
        "block_tokens": st.sampled_from([1, 2, 4, 16]),
        "num_blocks": st.sampled_from([4, 8, 14, 20, 60]),
        "max_num_seqs": st.integers(1, 6),
        "max_batched_tokens": st.integers(6, 40),
        "max_chunk_tokens": st.integers(1, 40),
        "max_model_len": st.integers(20, 60),
        "enable_prefix_caching": st.booleans(),
        "max_steps_in_flight": st.integers(1, 3),
    }
)


def received(bench: Bench, order: GenerateRequest) -> Sequence | None:
    """Return the sequence of a request whose prompt was computed elsewhere, its KV in pages here;
    None when there is no room or it is over after the first token.
    """
    output = expected_output(bench.layout, order, max_model_len=bench.config.max_model_len)
    pages = bench.engine.pool.allocate(bench.config.num_pages(len(order.prompt_tokens)))
    if len(output) < 2 or pages is None:
        if pages is not None:
            bench.engine.pool.release(pages)
        return None
    history = History(bench.layout, order.prompt_tokens)
    for index, page in enumerate(pages):
        for layer in range(bench.layout.num_layers):
            data = history.slice(layer, index)
            bench.runner.page_slice(layer, page)[: len(data)] = data
    sequence = bench.sequence([0])
    return Sequence(
        sequence_id=sequence.sequence_id,
        request=order,
        output_tokens=output[:1],
        pages=pages,
        num_computed=len(order.prompt_tokens),
    )


def add(bench: Bench, arrival: Arrival) -> Sequence | None:
    sequence = received(bench, arrival.request) if arrival.adopt else None
    if sequence is None:
        name = bench.sequence([0])
        sequence = Sequence(sequence_id=name.sequence_id, request=arrival.request)
    if bench.engine.add(sequence, bench.now):
        return sequence
    bench.engine.pool.release(sequence.pages)
    return None


def check_end(bench: Bench, sequence: Sequence) -> None:
    """The sequence, not aborted, ended once and as the oracle says."""
    end = bench.ends[sequence.sequence_id]
    config = bench.config
    want = expected_output(bench.layout, sequence.request, max_model_len=config.max_model_len)
    if end.finish is FinishReason.ERROR:
        assert end.failure is not None
        assert end.failure.status == 400
        assert sequence.output_tokens == want[: len(sequence.output_tokens)]
        too_long = len(sequence.prompt_tokens) >= config.max_model_len
        assert too_long or config.num_pages(sequence.num_tokens) > config.num_blocks
    else:
        assert sequence.output_tokens == want
        stops = want[-1] in sequence.request.sampling.stop_token_ids
        stops = stops and len(want) > sequence.request.sampling.min_tokens
        assert end.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)


@settings(max_examples=120, deadline=None)
@given(config=configs, arrivals=arrivals)
def test_tokens_are_those_of_the_oracle_however_sequences_are_scheduled(
    config: dict[str, int], arrivals: list[Arrival]
) -> None:
    bench = Bench(**config)
    todo = sorted(enumerate(arrivals), key=lambda item: (item[1].before_step, item[0]))
    living: list[tuple[Sequence, Arrival, int]] = []
    aborted: set[int] = set()
    for step in range(3_000):
        while todo and todo[0][1].before_step <= step:
            arrival = todo.pop(0)[1]
            sequence = add(bench, arrival)
            if sequence is not None:
                living.append((sequence, arrival, step))
        bench.tick()
        for sequence, arrival, since in living:  # aborts fall between submission and commit too
            after = arrival.abort_after
            if after is not None and since + after == step:
                if bench.engine.abort(sequence.sequence_id):
                    aborted.add(sequence.sequence_id)
                bench.engine.check_integrity(role_holds=(), unreleased_ids=())
        if bench.runner.num_steps:
            bench.finish_step()
        bench.engine.check_integrity(role_holds=(), unreleased_ids=())
        if not todo and bench.engine.idle:
            break
    assert bench.engine.idle, "the engine does not come to an end"
    assert bench.engine.pool.num_held == 0
    for sequence, _, _ in living:
        assert sequence.state is SequenceState.ENDED
        assert not sequence.pages
        if sequence.sequence_id in aborted:
            assert sequence.sequence_id not in bench.ends
        else:
            check_end(bench, sequence)


@settings(max_examples=40, deadline=None)
@given(config=configs, orders=st.lists(requests, min_size=1, max_size=6), failing=st.integers(0, 8))
def test_a_failed_step_ends_its_sequences_and_poisons_nothing(
    config: dict[str, int], orders: list[GenerateRequest], failing: int
) -> None:
    bench = Bench(**config)
    sequences = []
    for round_no in range(2):  # the second round finds what the first left in the cache
        for order in orders:
            name = bench.sequence([0])
            sequences.append(Sequence(sequence_id=name.sequence_id, request=order))
            assert bench.engine.add(sequences[-1], bench.now)
        for step in range(3_000):
            if bench.engine.idle:
                break
            if round_no == 0 and step == failing:
                bench.runner.fail_next("out of order")
            bench.step()
    for sequence in sequences:
        end = bench.ends[sequence.sequence_id]
        if end.failure is not None and end.failure.status == 500:
            assert "out of order" in end.failure.message
        else:
            check_end(bench, sequence)
