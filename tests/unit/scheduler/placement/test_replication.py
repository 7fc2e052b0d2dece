"""Hot blocks ask for copies, up to what their rate needs; what cools down asks for none."""

from __future__ import annotations

from itertools import repeat

from mooncake.scheduler.placement.pools import (
    HALF_LIFE_S,
    HOT_BLOCKS,
    MAX_CHAINS,
    MAX_COMPARED,
    MAX_WATCHED,
    Replication,
)

PER_COPY = 1.0


def keys(count: int, name: int = 0) -> list[bytes]:
    return [name.to_bytes(8, "big") + index.to_bytes(8, "big") for index in range(count)]


def heat(
    subject: Replication, run: list[bytes], uses_per_s: float, seconds: float, copies: int = 1
) -> int:
    """Use `run` so often for so long; return what the last use asked for."""
    length = 0
    for number in range(round(uses_per_s * seconds)):
        length = subject.on_use(run, repeat(copies), 8, number / uses_per_s)
    return length


def test_a_hot_block_asks_for_copies_until_it_has_them() -> None:
    for copies, wanted in ((1, 3), (2, 3), (3, 3), (6, 0)):
        subject = Replication(PER_COPY)
        asked = heat(subject, keys(3), uses_per_s=5, seconds=10 * HALF_LIFE_S, copies=copies)
        assert asked == wanted, copies


def test_never_more_copies_than_pools() -> None:
    subject = Replication(PER_COPY)
    assert heat(subject, keys(1), uses_per_s=50, seconds=5 * HALF_LIFE_S, copies=8) == 0


def test_a_cold_block_asks_for_none() -> None:
    subject = Replication(PER_COPY)
    assert heat(subject, keys(3), uses_per_s=0.5, seconds=20 * HALF_LIFE_S, copies=0) == 0


def test_heat_fades() -> None:
    subject = Replication(PER_COPY)
    assert heat(subject, keys(1), uses_per_s=10, seconds=600) == 1
    later = 600 + 10 * HALF_LIFE_S
    assert subject.on_use(keys(1), repeat(1), 8, later) == 0


def test_only_the_shared_head_is_hot() -> None:
    subject = Replication(PER_COPY)
    shared, length = keys(2), 0
    for number in range(2000):
        length = subject.on_use([*shared, *keys(5, name=number + 1)], repeat(1), 8, number / 5)
    assert length == 2


def test_far_blocks_are_not_watched_and_the_table_is_bounded() -> None:
    subject = Replication(PER_COPY)
    subject.on_use(keys(HOT_BLOCKS * 2), repeat(1), 8, 0.0)
    assert len(subject) == HOT_BLOCKS
    for number in range(MAX_WATCHED // HOT_BLOCKS + 1):
        subject.on_use(keys(HOT_BLOCKS, name=number + 1), repeat(1), 8, 1.0)
    assert len(subject) <= MAX_WATCHED


def test_it_can_be_switched_off() -> None:
    subject = Replication(0.0)
    assert heat(subject, keys(2), uses_per_s=50, seconds=60) == 0


def use(subject: Replication, run: list[bytes], *times_s: float) -> None:
    for at_s in times_s:
        subject.on_use(run, repeat(1), 8, at_s)


def test_the_busiest_blocks_are_whole_chains_the_busiest_first() -> None:
    subject = Replication(0.0)
    shared, mine, yours = keys(3), keys(2, name=1), keys(2, name=2)
    use(subject, [*shared, *mine], 1.0, 2.0)
    use(subject, [*shared, *yours], 3.0, 4.0, 5.0)
    use(subject, keys(4, name=3), 6.0)  # once: nobody may ask for it again
    assert subject.busiest(100) == [[*shared, *yours], [*shared, *mine]]
    assert subject.busiest(6) == [[*shared, *yours], [*shared, mine[0]]]
    assert subject.busiest(2) == [shared[:2]]
    assert subject.busiest(0) == []


def test_of_many_chains_with_one_head_only_some_are_walked() -> None:
    """Each has up to 128 blocks: 16,000 chains would be two million steps in one join."""
    subject = Replication(0.0)
    shared = keys(HOT_BLOCKS - 1)
    for number in range(MAX_CHAINS + 20):
        use(subject, [*shared, *keys(1, name=number + 1)], number, number + 0.5)
    chains = subject.busiest(MAX_COMPARED)
    assert len(chains) == MAX_CHAINS
    assert all(chain[:-1] == shared for chain in chains)
    assert len({chain[-1] for chain in chains}) == MAX_CHAINS


def test_what_was_busy_long_ago_comes_after_what_is_now() -> None:
    subject = Replication(0.0)
    use(subject, keys(1, name=1), *range(8))
    use(subject, keys(1, name=2), 6 * HALF_LIFE_S, 6 * HALF_LIFE_S + 1)
    assert subject.busiest(1) == [keys(1, name=2)]


def test_a_chain_whose_beginning_is_forgotten_is_left_out() -> None:
    subject = Replication(0.0)
    use(subject, keys(HOT_BLOCKS), 0.0, 1.0)
    for number in range(MAX_COMPARED // HOT_BLOCKS):
        use(subject, keys(HOT_BLOCKS, name=number + 1), 2.0)
    assert subject.busiest(10) == []
    use(subject, keys(HOT_BLOCKS), 3.0)
    assert subject.busiest(10) == [keys(10)]


def test_all_uses_can_be_forgotten() -> None:
    subject = Replication(0.0)
    use(subject, keys(2), 0.0, 1.0)
    subject.forget()
    assert subject.busiest(10) == []
