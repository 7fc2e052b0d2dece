"""Readers that wait for blocks on their way from disks to DRAM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

from mooncake.base import BlockKey
from mooncake.kvstore.storage.promotion import Promotions
from tests.support.kvstore.node_world import keys

PIECE = 40


class EmptyDram:
    num_pinned = num_writing = 0

    def has(self, key: BlockKey) -> bool:
        return False

    def pin(self, run: Sequence[BlockKey]) -> None:
        """Take no note."""

    unpin = pin


class BusyDisks:
    """Stands for `Tiering`: two pieces may be loading, and nothing comes but by `end`."""

    max_loading = 2 * PIECE

    def __init__(self) -> None:
        self.dram = EmptyDram()
        self.loading: set[BlockKey] = set()
        self.num_asked = 0

    def is_loading(self, key: BlockKey) -> bool:
        self.num_asked += 1
        return key in self.loading

    def can_load(self, key: BlockKey) -> bool:
        self.num_asked += 1
        return True

    def loadable(self, wanted: Iterable[BlockKey]) -> list[BlockKey]:
        return list(islice(wanted, self.max_loading - len(self.loading)))

    def load(
        self, wanted: Sequence[BlockKey], _now: float, *, gently: bool = False
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        self.loading.update(wanted)
        return list(wanted), []


def test_of_each_run_that_waits_for_a_slow_disk_one_block_is_looked_at() -> None:
    """At each event of a disk. Otherwise many long runs would hold up the node."""
    disks = BusyDisks()
    promotions = Promotions(cast(Any, disks), 10.0, lambda _: None)
    for number in range(50):
        run = keys(*range(PIECE * number, PIECE * (number + 1)))
        assert promotions.begin(number, run, 0.0, lambda *_: None) is None
    assert len(disks.loading) == disks.max_loading
    disks.num_asked = 0
    promotions.tick(1.0)
    assert disks.num_asked == 2 * 48, "the other two are being loaded"
    promotions.check_integrity()


def test_a_run_that_gets_its_blocks_one_by_one_is_not_walked_again_for_each() -> None:
    disks = BusyDisks()
    promotions = Promotions(cast(Any, disks), 10.0, lambda _: None)
    ended: list[int] = []
    runs = [keys(*range(PIECE * number, PIECE * (number + 1))) for number in range(3)]
    for number, run in enumerate(runs):
        settled = partial(lambda number, *_: ended.append(number), number)
        assert promotions.begin(number, run, 0.0, settled) is None
    disks.num_asked = 0
    for key in (key for run in runs for key in run):
        disks.loading.remove(key)
        promotions.on_loaded([key], [], 1.0)
        assert len(ended) == 3 or disks.loading
    assert ended == [0, 1, 2]
    assert disks.num_asked <= 12 * 3 * PIECE
