"""Hot blocks ask for copies, up to what their rate needs; what cools down asks for none."""

from __future__ import annotations

from itertools import repeat

from mooncake.scheduler.placement.pools import (
    HALF_LIFE_S,
    HOT_BLOCKS,
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
    assert len(subject) == 0
