"""Decode workers are weighed by tokens and blocks, not by how many requests they have."""

from mooncake.base import CostSample, Role, WorkerLoad
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.placement.worker_choice import Query, StoreRun, choose_decode, evaluate
from tests.support.scheduler.scheduling import hello, wanted

PROFILE = [
    CostSample(batch, context, batch, 5e-3 + 1e-4 * batch + 1e-6 * context)
    for batch in (1, 4, 16)
    for context in (0, 1000, 10_000)
]


class NoSources:
    def longest(self, first: int) -> list[StoreRun]:
        return []

    def local(self, first: int, node_id: str) -> None:
        return None


def query(matches: dict[str, int], push_s_per_block: float = 0.0) -> Query:
    request = wanted(100, num_output_tokens=40, push_s_per_block=push_s_per_block)
    return Query(wanted=request, own_matches=matches, sources=NoSources())


WANTED = query({})


def worker(
    name: str, sequences: int = 0, context: int = 0, free: int = 500, **fields: int
) -> InstanceView:
    blocks = fields.pop("num_blocks", 500)
    view = InstanceView.of(hello(name, Role.DECODE, num_blocks=blocks, profile=PROFILE, **fields))
    view.observe(
        WorkerLoad(
            num_running=sequences,
            num_context_tokens=context,
            num_free_blocks=free,
            num_total_blocks=blocks,
        ),
        now=1.0,
    )
    return view


def chosen(*workers: InstanceView) -> str:
    option = choose_decode(WANTED, workers)
    assert option is not None
    return option.view.worker_id


def test_blocks_are_rounded_up_with_room_for_the_next_token() -> None:
    assert wanted(8).num_blocks_now == 3
    assert wanted(7).num_blocks_now == 2
    assert WANTED.wanted.num_blocks_expected == 35


def test_few_long_sequences_weigh_more_than_many_short_ones() -> None:
    assert chosen(worker("d0", 2, 60_000), worker("d1", 8, 2000)) == "d1"


def test_the_predicted_gap_includes_the_newcomer() -> None:
    option = evaluate(WANTED, worker("d0", 3, 900))
    assert abs(option.tbt_s - (5e-3 + 4e-4 + 1e-3)) < 2e-4


def test_a_full_worker_is_avoided_though_it_is_faster() -> None:
    assert chosen(worker("d0", 1, 100, free=5), worker("d1", 8, 20_000)) == "d1"


def test_room_for_the_expected_output_is_preferred() -> None:
    assert chosen(worker("d0", 1, 100, free=30), worker("d1", 4, 5000)) == "d1"


def test_of_full_ones_the_one_that_lacks_least_is_taken() -> None:
    assert chosen(worker("d0", 1, 100, free=2), worker("d1", 8, 20_000, free=20)) == "d1"


def test_a_batch_at_its_limit_is_full_and_its_gap_does_not_grow() -> None:
    option = evaluate(WANTED, worker("d0", 4, 4000, max_num_seqs=4))
    assert option.full
    assert option.tbt_s < evaluate(WANTED, worker("d0", 4, 4000)).tbt_s


def test_workers_too_small_even_when_empty_are_never_taken() -> None:
    assert choose_decode(WANTED, [worker("d0", num_blocks=20, free=20)]) is None
    assert chosen(worker("d0", num_blocks=20, free=20), worker("d1", 8, 20_000)) == "d1"


def test_equal_workers_are_taken_by_name() -> None:
    assert chosen(worker("d1"), worker("d0")) == "d0"
    assert choose_decode(WANTED, []) is None


def test_blocks_held_already_attract_as_far_as_the_push_matters() -> None:
    workers = [worker("d0"), worker("d1")]
    matches = {"d1": 25}

    def taken(push_s_per_block: float, batch_of_d1: int) -> str:
        workers[1] = worker("d1", batch_of_d1, 1000 * batch_of_d1)
        option = choose_decode(query(matches, push_s_per_block), workers)
        assert option is not None
        return option.view.worker_id

    assert taken(0.0, 0) == "d0"
    assert taken(0.001, 0) == "d1"
    assert taken(0.001, 10) == "d0"
    assert taken(0.1, 10) == "d1"
