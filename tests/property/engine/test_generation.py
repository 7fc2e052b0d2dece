"""However sequences are scheduled, interrupted and placed, they get the oracle's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base.request import FinishReason, GenerateRequest, Priority
from mooncake.engine.config import SpeculativeConfig
from mooncake.engine.sequence import Sequence, SequenceState
from tests.support.engine.engines import Bench, request
from tests.support.engine.fake_runner import (
    VOCAB_SIZE,
    History,
    expected_output,
    small_layout,
)
from tests.support.examples import examples

STOPS = frozenset(range(0, VOCAB_SIZE, 16))

prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 24).map(lambda length: [7] * length),  # shared prefixes
)
requests = st.builds(
    request,
    prompts,
    max_tokens=st.integers(0, 23).map(lambda less: 24 - less),
    priority=st.sampled_from(Priority),
    tenant=st.sampled_from(["", "", "a"]),
    seed=st.integers(0, 1),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(), STOPS]),
    num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
)


@dataclass
class Arrival:
    request: GenerateRequest
    before_step: int
    abort_after: int | None
    adopt: bool


@dataclass
class Reservation:
    """Pages that a role holds for a while."""

    step: int
    num_pages: int
    num_steps: int


@dataclass
class Setting:
    """An engine's limits; the pool is sized in tokens so that block sizes compare."""

    block_tokens: int
    pool_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    max_chunk_tokens: int
    max_model_len: int
    enable_prefix_caching: bool
    max_steps_in_flight: int
    num_stages: int
    drafting: str

    def bench(self) -> Bench:
        speculation, drafter = None, None
        if self.drafting:
            speculation = SpeculativeConfig(
                method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
            )
        if self.drafting in DRAFTERS:
            drafter = OracleDrafter(self, DRAFTERS[self.drafting])
        return Bench(
            drafter=drafter,
            speculation=speculation,
            block_tokens=self.block_tokens,
            num_blocks=-(-self.pool_tokens // self.block_tokens),
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            max_steps_in_flight=self.max_steps_in_flight,
            num_stages=self.num_stages,
        )


DRAFTERS = {"right": lambda at: False, "wrong": lambda at: True, "mixed": lambda at: at % 3 == 0}
"""Whether the draft of an output position is to be wrong."""


@dataclass
class OracleDrafter:
    """Proposes what will be sampled, or what will not."""

    setting: Setting
    is_wrong: Callable[[int], bool]

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        layout = small_layout(block_tokens=self.setting.block_tokens)
        output = expected_output(layout, sequence.request)
        start = len(sequence.output_tokens)
        return [
            (token + self.is_wrong(at)) % VOCAB_SIZE
            for at, token in enumerate(output[start : start + most], start)
        ]


arrivals = st.builds(
    Arrival,
    request=requests,
    before_step=st.integers(0, 8),
    abort_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10)),
    adopt=st.booleans(),
)
reservations = st.builds(Reservation, st.integers(0, 20), st.integers(1, 12), st.integers(1, 20))
configs = st.builds(
    Setting,
    block_tokens=st.sampled_from([2, 1, 4, 5]),
    pool_tokens=st.integers(30, 80),
    max_num_seqs=st.sampled_from([6, 4, 2, 1]),
    max_batched_tokens=st.integers(6, 40),
    max_chunk_tokens=st.integers(1, 24),
    max_model_len=st.sampled_from([50, 40, 25]),
    enable_prefix_caching=st.booleans(),
    max_steps_in_flight=st.integers(1, 3),
    num_stages=st.integers(1, 3),
    drafting=st.sampled_from(["", "ngram", *DRAFTERS]),
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
    history = History(bench.layout, order.prompt_tokens.tolist())
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
    if end.reason is FinishReason.ERROR:
        assert end.failure is not None
        assert end.failure.status == 400
        assert end.failure.message
        assert sequence.output_tokens == want[: len(sequence.output_tokens)]
        too_long = len(sequence.prompt_tokens) >= config.max_model_len
        assert too_long or config.num_pages(sequence.num_tokens) > config.num_blocks
    else:
        assert sequence.output_tokens == want
        stops = want[-1] in sequence.request.sampling.stop_token_ids
        stops = stops and len(want) > sequence.request.sampling.min_tokens
        assert end.reason is (FinishReason.STOP if stops else FinishReason.LENGTH)


def abort_due(bench: Bench, living: list[tuple[Sequence, Arrival, int]], step: int) -> set[int]:
    """Abort what is to be aborted in this step; return the ids of those that were."""
    aborted = set()
    for sequence, arrival, since in living:
        after = arrival.abort_after
        if after is not None and since + after == step and bench.engine.abort(sequence.sequence_id):
            aborted.add(sequence.sequence_id)
    return aborted


@settings(max_examples=examples(250), deadline=None)
@given(
    setting=configs,
    arrivals=st.lists(arrivals, min_size=4, max_size=16),
    reservations=st.lists(reservations, max_size=3),
)
def test_tokens_are_those_of_the_oracle_however_sequences_are_scheduled(
    setting: Setting, arrivals: list[Arrival], reservations: list[Reservation]
) -> None:
    bench = setting.bench()
    pool = bench.engine.pool
    todo = sorted(arrivals, key=lambda arrival: arrival.before_step)
    living: list[tuple[Sequence, Arrival, int]] = []
    aborted: set[int] = set()
    reserved: list[tuple[int, list[int]]] = []
    for step in range(3_000):
        for end, pages in reserved:
            if end == step:
                pool.release(pages)
        reserved = [(end, pages) for end, pages in reserved if end > step]
        for wish in reservations:
            taken = pool.allocate(wish.num_pages) if wish.step == step else None
            if taken is not None:
                reserved.append((step + wish.num_steps, taken))
        held = [page for _, pages in reserved for page in pages]
        while todo and todo[0].before_step <= step:
            arrival = todo.pop(0)
            sequence = add(bench, arrival)
            if sequence is not None:
                living.append((sequence, arrival, step))
        bench.tick()
        aborted |= abort_due(bench, living, step)  # between submission and commit: in flight
        bench.engine.check_integrity(role_holds=held, unreleased_ids=())
        if bench.runner.num_steps:
            bench.finish_step()
        bench.engine.check_integrity(role_holds=held, unreleased_ids=())
        if not todo and not reserved and bench.engine.idle:
            break
    assert bench.engine.idle, "the engine does not come to an end"
    assert pool.num_held == 0
    for sequence, _, _ in living:
        assert sequence.state is SequenceState.ENDED
        assert not sequence.pages
        if sequence.sequence_id in aborted:
            assert sequence.sequence_id not in bench.ends
        else:
            check_end(bench, sequence)


@settings(max_examples=examples(40), deadline=None)
@given(
    setting=configs, orders=st.lists(requests, min_size=1, max_size=6), failing=st.integers(0, 8)
)
def test_a_failed_step_ends_its_sequences_and_poisons_nothing(
    setting: Setting, orders: list[GenerateRequest], failing: int
) -> None:
    bench = setting.bench()
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
