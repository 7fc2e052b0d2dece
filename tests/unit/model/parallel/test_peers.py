"""What instances that share experts say of each other's ends."""

from __future__ import annotations

import socket
import threading

from mooncake.model.parallel.peers import Peers
from tests.support.waiting import LONG_S

WORKERS = ["decode-0", "decode-1", "decode-2"]


def test_who_ends_for_the_loss_of_another_names_it_to_the_rest() -> None:
    """The last one hears nothing of the end of the one that is lost but from the first."""
    (first, last), (lost, of_lost), (silent, of_silent) = (socket.socketpair() for _ in range(3))
    told = threading.Event()
    peers = [
        Peers(0, WORKERS, {1: of_lost, 2: first}, {}, -1, 5.0),
        Peers(2, WORKERS, {0: last, 1: of_silent}, {}, -1, 5.0),
    ]
    peers[1].watch(lambda _: None, told.set, lambda: None)
    lost.close()
    assert told.wait(LONG_S)
    lost_one = "decode-1, which shares experts with this worker,"
    wanted = [f"{lost_one} has ended", f"{lost_one} is lost, as decode-0 says"]
    assert [each.lost for each in peers] == wanted
    silent.close()
    for each in peers:
        each.close()


def test_one_that_fails_by_itself_is_named() -> None:
    ours, theirs = socket.socketpair()
    told = threading.Event()
    here, there = (
        Peers(number, WORKERS[:2], {1 - number: link}, {}, -1, 5.0)
        for number, link in enumerate((ours, theirs))
    )
    there.watch(lambda _: None, told.set, lambda: None)
    here.fail("step 3 failed")
    assert told.wait(LONG_S)
    assert here.lost == "step 3 failed"
    assert there.lost == "decode-0, which shares experts with this worker, has ended"
    for each in (here, there):
        each.close()
