"""What the decode role does for each of many requests."""

from __future__ import annotations

from collections.abc import Iterator, Set
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mooncake.decode.worker import DecodeWorker
from mooncake.instance.job_table import JobTable


@pytest.mark.parametrize(("kinds", "num_looks"), [("www", 0), ("ppp", 1), ("wpwp", 1)])
def test_jobs_are_looked_through_once_and_only_for_those_that_reserve(
    kinds: str, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for those that a colocated worker computes whole, of which one call may have hundreds."""
    looks: list[JobTable[Any]] = []
    seen: list[set[int]] = []

    def looked(table: JobTable[Any]) -> Iterator[Any]:
        looks.append(table)
        return iter([SimpleNamespace(reserved_pages=[7])])

    def admitted(job: Any, now: float, reserved: Set[int]) -> bool:
        seen.append(set(reserved))
        return True

    monkeypatch.setattr(JobTable, "__iter__", looked)
    worker = DecodeWorker(cast(Any, None))
    monkeypatch.setattr(worker, "_admit", admitted)
    waiting = [SimpleNamespace(local=kind == "w", pages=[at]) for at, kind in enumerate(kinds)]
    worker._waiting = cast(Any, waiting)
    worker._admit_waiting(0.0)
    assert not worker._waiting
    assert len(looks) == num_looks
    if kinds == "ppp":
        assert seen == [{7}, {7, 0}, {7, 0, 1}]
