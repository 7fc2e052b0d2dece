"""A loop that waits for the descriptor hears of every item, from whatever thread it comes."""

from __future__ import annotations

import os
import select
import threading

from mooncake.base.mailbox import Mailbox


def readable(mailbox: Mailbox[int], timeout_s: float = 0.0) -> bool:
    return bool(select.select([mailbox], [], [], timeout_s)[0])


def test_items_come_in_order_and_the_descriptor_says_so() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert not readable(mailbox)
    assert mailbox.receive() == []
    assert mailbox.put(1)
    assert mailbox.put(2)
    assert readable(mailbox)
    assert mailbox.receive() == [1, 2]
    assert not readable(mailbox)
    mailbox.put(3)
    assert readable(mailbox)
    assert mailbox.receive() == [3]
    mailbox.close()


def test_a_full_one_takes_no_more_until_it_is_read() -> None:
    mailbox: Mailbox[int] = Mailbox(bound=2)
    assert [mailbox.put(number) for number in range(3)] == [True, True, False]
    assert mailbox.receive() == [0, 1]
    assert mailbox.put(4)
    mailbox.close()


def test_a_ring_wakes_with_nothing_put_and_is_heard_once() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.ring()
    mailbox.ring()
    assert readable(mailbox)
    assert mailbox.receive() == []
    assert not readable(mailbox)
    mailbox.close()


def test_a_bell_that_is_heard_spares_the_descriptor() -> None:
    mailbox: Mailbox[int] = Mailbox()
    heard: list[bool] = [True, False]
    mailbox.bell = lambda: heard.pop(0)
    assert mailbox.put(1)
    assert not readable(mailbox)
    assert not mailbox.is_empty
    mailbox.announce()
    assert readable(mailbox), "nobody has heard the second"
    mailbox.put(2)
    assert heard == [], "whoever reads the descriptor receives this too"
    assert mailbox.receive() == [1, 2]
    assert mailbox.is_empty
    mailbox.close()


def test_no_item_of_many_threads_is_lost_or_slept_over() -> None:
    mailbox: Mailbox[int] = Mailbox()
    threads = [
        threading.Thread(target=lambda first=first: [mailbox.put(first + n) for n in range(500)])  # type: ignore[misc]
        for first in range(0, 2000, 500)
    ]
    for thread in threads:
        thread.start()
    received: list[int] = []
    while len(received) < 2000:
        assert readable(mailbox, 30.0), "an item lies in the mailbox and nothing says so"
        received += mailbox.receive()
    for thread in threads:
        thread.join()
    assert sorted(received) == list(range(2000))
    for first in range(0, 2000, 500):
        own = [number for number in received if first <= number < first + 500]
        assert own == sorted(own), "the items of one thread came out of order"
    mailbox.close()


def test_a_closed_one_has_no_descriptor_and_keeps_what_is_put() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    descriptor = mailbox.fileno()
    mailbox.close()
    mailbox.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # most likely under the number that was freed
    mailbox.put(2)
    mailbox.ring()
    assert mailbox.receive() == [1, 2]
    if other == descriptor:
        assert not select.select([other], [], [], 0)[0], "it rang where another now is"
    os.close(other)
