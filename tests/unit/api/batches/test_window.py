"""How many lines are asked at a time: one of each tenant while batch work waits, else shares."""

from __future__ import annotations

from mooncake.api.batches.window import MAX_BYTES, MAX_LINES, Window


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
    window = Window(100)
    taken = 0
    while window.take("a", 1, has_waiting_batch=False):
        taken += 1
    assert taken == MAX_LINES // 2
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
