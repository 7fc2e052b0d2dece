"""Who may go past a request that waits for room on a decode worker."""

from __future__ import annotations

import pytest

from mooncake.decode.task import MAX_PASSED, has_room, may_be_passed, may_reserve


@pytest.mark.parametrize(
    ("case", "num_needed", "num_available", "num_resting", "num_passed", "may"),
    [
        ("nothing rests", 60, 50, 0, 0, False),
        ("resting pages are all that is missing", 60, 50, 20, 0, True),
        ("enough have passed", 60, 50, 20, MAX_PASSED, False),
        ("it would not fit with resting pages either", 75, 50, 20, 0, False),
        ("it cannot run before they return", 95, 50, 20, 0, True),
        ("then any number may pass", 95, 50, 20, 10 * MAX_PASSED, True),
    ],
)
def test_requests_pass_only_one_that_waits_for_resting_pages(
    case: str, num_needed: int, num_available: int, num_resting: int, num_passed: int, may: bool
) -> None:
    found = may_be_passed(num_needed, num_available, num_resting, 2, 100, num_passed)
    assert found == may, case


def test_one_that_is_passed_always_may_run_in_the_end() -> None:
    # Small requests come without an end. The large one waits for resting pages, which return after
    # 200 rounds, and must have run soon after.
    num_total, num_resting, needed = 100, 40, 70
    running: list[int] = []
    num_passed, started = 0, None
    for now in range(300):
        resting = num_resting if now < 200 else 0
        running = [end_s for end_s in running if end_s > now]
        available = num_total - resting - 5 * len(running)
        if has_room(needed, available, len(running)):
            started = now
            break
        if may_be_passed(needed, available, resting, len(running), num_total, num_passed):
            while has_room(5, num_total - resting - 5 * len(running), len(running)):
                running.append(now + 10)
                num_passed += 1
    assert started is not None
    assert num_passed > MAX_PASSED
    assert started <= 200 + 10


def test_jobs_that_wait_for_prefill_hold_half_of_the_pages_at_most() -> None:
    """What they hold cannot be taken back, and what runs can: one below its share finds pages."""
    assert may_reserve(90, 0, 100), "one may be as large as it is"
    assert may_reserve(60, 40, 100)
    assert not may_reserve(60, 60, 100)
    assert may_reserve(10, 40, 100)
    assert not may_reserve(11, 40, 100)
    assert not may_reserve(1, 90, 100)
