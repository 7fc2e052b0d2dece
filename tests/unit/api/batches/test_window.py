"""How many lines are asked at a time: one of each tenant while batch work waits, else shares."""

from __future__ import annotations

from mooncake.api.batches.window import FIRST_LINES, MAX_BYTES, MAX_LINES, Window


def fill(window: Window, tenant: str) -> int:
    """Take all places that a tenant gets; return how many."""
    taken = 0
    while window.take(tenant, 1, has_waiting_batch=False):
        taken += 1
    return taken


def grown() -> Window:
    """Return a window of which so much was answered that it has its full size."""
    window = Window(100)
    for _ in range(MAX_LINES):
        assert window.take("z", 1, has_waiting_batch=False)
        window.give_back("z", 1)
    return window


def test_a_tenant_always_has_one_line_and_no_more_while_batch_work_waits() -> None:
    window = Window(100)
    assert window.take("a", 10, has_waiting_batch=True)
    assert not window.take("a", 10, has_waiting_batch=True)
    assert window.take("b", 10, has_waiting_batch=True)
    assert window.take("a", 10, has_waiting_batch=False)
    assert window.num_lines == 3
    window.check_integrity()
    for tenant in "aab":
        window.give_back(tenant, 10)
    assert window.num_lines == 0
    window.check_integrity()


def test_a_tenant_leaves_half_of_the_lines_and_of_their_bytes_to_others() -> None:
    window = grown()
    assert fill(window, "a") == MAX_LINES // 2
    assert fill(window, "b") == MAX_LINES // 4
    window.check_integrity()
    window = Window(100)
    assert not window.take("a", MAX_BYTES // 2 + 1, has_waiting_batch=False)
    assert window.num_lines == 0
    assert window.take("a", MAX_BYTES // 2, has_waiting_batch=False)
    assert window.take("b", 100, has_waiting_batch=False)


def test_the_longest_line_has_a_place_however_much_others_hold() -> None:
    window = Window(MAX_BYTES)
    assert window.take("a", MAX_BYTES, has_waiting_batch=False)
    assert window.take("b", MAX_BYTES, has_waiting_batch=False)
    window.check_integrity()


def test_each_answer_makes_room_for_one_more_until_batch_work_waits() -> None:
    window = Window(100)
    assert fill(window, "a") == FIRST_LINES
    assert window.take("b", 1, has_waiting_batch=False), "it has none"
    for _ in range(20):
        window.give_back("a", 1)
        assert fill(window, "a") == (1 if window.num_lines == FIRST_LINES + 1 else 2)
    before = window.num_lines
    assert not window.take("a", 1, has_waiting_batch=True)
    window.give_back("a", 1)
    assert not window.take("a", 1, has_waiting_batch=True)
    assert fill(window, "a") == 0
    window.give_back("a", 1)
    assert fill(window, "a") == 2
    assert window.num_lines == before
    window.check_integrity()


def test_a_tenant_whose_key_is_at_its_limit_gets_no_further_place_until_it_may_ask_again() -> None:
    window = Window(100)
    for tenant in "aab":
        assert window.take(tenant, 1, has_waiting_batch=False)
    with window.refused("a"), window.refused("a"):
        assert not window.take("a", 1, has_waiting_batch=False)
        assert window.take("b", 1, has_waiting_batch=False)
        window.give_back("a", 1)
        assert not window.take("a", 1, has_waiting_batch=False)
    assert window.take("a", 1, has_waiting_batch=False)


def test_answers_of_a_tenant_at_its_limit_do_not_widen_the_window() -> None:
    window = Window(100)
    for _ in range(FIRST_LINES):
        assert window.take("a", 1, has_waiting_batch=False)
    with window.refused("a"):
        for _ in range(FIRST_LINES):
            window.give_back("a", 1)
    assert fill(window, "a") == FIRST_LINES
