"""Workers that share experts meet at a socket of their machine, and hear of each other's end."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mooncake.base import InternalError, Shape, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Credential, own_credential
from mooncake.launch.worker.ranks import expert_peers
from mooncake.launch.worker.ranks.expert_peers import meet
from mooncake.model.options import ExpertGroup, ModelOptions
from mooncake.model.parallel.group import GroupError
from mooncake.model.parallel.peers import SILENT, SLOW, Peers
from mooncake.transfer.net.blocking import shake_hands
from tests.support.waiting import LONG_S, wait_until

SECRET = SystemIds().hex(16)
WORKERS = ("decode-0", "decode-1", "decode-2")
OPTIONS = ModelOptions(shape=Shape(dp=3, ep=3))


def credential(secret: str = SECRET) -> Credential:
    return own_credential(secret, CredentialRole.WORKER)


class Meetings:
    """Workers of one group that come in threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.name = f"decode-0 of a test at {'an address that is long ' * 5}{SystemIds().hex(8)}"
        self._pool = pool
        self.made: list[Peers] = []

    def come(self, number: int, secret: str = SECRET) -> Future[Peers]:
        group = ExpertGroup(name=self.name, number=number, size=3, workers=WORKERS)

        def one() -> Peers:
            peers = meet(group, credential(secret), OPTIONS)
            self.made.append(peers)
            return peers

        return self._pool.submit(one)


@pytest.fixture
def meetings() -> Iterator[Meetings]:
    with ThreadPoolExecutor(4) as pool:
        made = Meetings(pool)
        yield made
        for peers in made.made:
            peers.close()
            os.close(peers.descriptor)


def test_all_wake_each_other_and_one_that_ends_ends_all(meetings: Meetings) -> None:
    peers = [future.result(LONG_S) for future in [meetings.come(number) for number in (1, 2, 0)]]
    peers.sort(key=lambda each: each.number)
    assert [each.number for each in peers] == [0, 1, 2]
    assert len({os.fstat(each.descriptor).st_ino for each in peers}) == 1, "one file"
    heard: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in peers]

    def lost(of: queue.SimpleQueue[int | None]) -> Callable[[], None]:
        return lambda: of.put(None)

    for each, its in zip(peers, heard, strict=True):
        each.watch(its.put, lost(its), lambda: None)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: each.wait_until_ready(), peers))
    peers[1].wake(7)
    assert [heard[0].get(timeout=LONG_S), heard[2].get(timeout=LONG_S)] == [7, 7]
    peers[2].fail("step 8: out of memory")
    for its in heard:
        assert its.get(timeout=LONG_S) is None
        assert its.empty(), "told once"
    assert peers[2].lost == "step 8: out of memory"
    said = [f"decode-{n}, which shares experts with this worker, has ended" for n in (1, 2)]
    assert peers[0].lost in said, "the other one may have ended before it was heard"
    with pytest.raises(GroupError, match="has ended"):
        peers[0].wake(9)
    with pytest.raises((InternalError, GroupError)):
        peers[1].wait_until_ready()


class Exchanges:
    """A group that notes when its exchanges are stopped."""

    rank, size = 0, 3

    def __init__(self) -> None:
        self.stopped: queue.SimpleQueue[None] = queue.SimpleQueue()

    def fail(self) -> None:
        self.stopped.put(None)


def left_after(meetings: Meetings, step: int, begun: int) -> tuple[Peers, Exchanges]:
    """Return an instance that has begun a step, and has heard that another one left after `step`,
    and its exchanges.
    """
    peers = [future.result(LONG_S) for future in [meetings.come(number) for number in (0, 1, 2)]]
    exchanges = Exchanges()
    peers[0].use(exchanges)  # type: ignore[arg-type]
    peers[0].wake(begun)
    peers[1].leave(step)
    wait_until(lambda: peers[0].have_left(range(1, 2)), "the other one has left")
    return peers[0], exchanges


def test_one_that_leaves_is_missed_when_a_step_begins(meetings: Meetings) -> None:
    first, exchanges = left_after(meetings, step=7, begun=7)
    assert first.lost is None, "the step in which it took part ends well"
    assert exchanges.stopped.empty()
    with pytest.raises(GroupError, match="decode-1, which shares experts with this worker, has en"):
        first.wake(8)
    exchanges.stopped.get(timeout=LONG_S)


def test_one_that_leaves_is_missed_in_a_step_that_has_begun(meetings: Meetings) -> None:
    first, exchanges = left_after(meetings, step=7, begun=8)
    exchanges.stopped.get(timeout=LONG_S)
    assert first.lost is not None, "known before an exchange ends, so no step's result counts"
    assert "decode-1, which shares experts with this worker, has ended" in first.lost


def test_who_does_not_know_the_secret_gets_nothing(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_peers, "MEET_S", 3.0)
    first, second = meetings.come(0), meetings.come(1)
    strangers = [meetings.come(2, secret=SystemIds().hex(16))]
    with pytest.raises(InternalError, match="did not come within 3 s"):
        strangers[0].result(LONG_S)
    with pytest.raises(InternalError, match="workers 2 of those that share their experts did not"):
        first.result(LONG_S)
    with pytest.raises(InternalError, match=r"the first of the workers .* did not come"):
        second.result(LONG_S)


def test_processes_of_other_users_are_not_heard(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: user + 1)
        first = meetings.come(0)
        with socket.socket(socket.AF_UNIX) as sock:
            connect(sock, meetings.name)
            assert sock.recv(1 << 16) == b"", "closed before a word"
    assert f"of user {user} came to the socket of workers that share experts" in caplog.text
    found = [future.result(LONG_S) for future in (first, meetings.come(1), meetings.come(2))]
    assert sorted(each.number for each in found) == [0, 1, 2]


def connect(sock: socket.socket, name: str) -> None:
    while True:
        try:
            sock.connect(expert_peers._address(name))
            return
        except ConnectionRefusedError:
            continue


def test_one_that_came_and_ended_is_waited_for_again(meetings: Meetings) -> None:
    """Also one that says nothing right costs the others nothing."""
    first = meetings.come(0)
    group = ExpertGroup(name=meetings.name, number=1, size=3, workers=WORKERS)
    with socket.socket(socket.AF_UNIX) as sock:
        connect(sock, group.name)
        side = expert_peers._credentials(group, credential(), 1).connect(f"{group.name}/0")
        shake_hands(sock, side, time.monotonic() + LONG_S)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(expert_peers._address(group.name))
        sock.sendall(b"\x08\0\0\0nonsense")
        assert b"refus" in sock.recv(1 << 16)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(expert_peers._address(group.name))
        sock.sendall(b"nonsense")  # no frame: it is hung up on
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1 << 16) == b""
    found = [future.result(LONG_S) for future in (first, meetings.come(2), meetings.come(1))]
    assert sorted(each.number for each in found) == [0, 1, 2]


STANDING = """
import sys, time
from mooncake.base import Shape
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.ranks.expert_peers import meet
from mooncake.model.options import ExpertGroup, ModelOptions
name, secret = sys.argv[1:]
group = ExpertGroup(name=name, number=1, size=2, workers=("decode-0", "decode-1"))
own = own_credential(secret, CredentialRole.WORKER)
peers = meet(group, own, ModelOptions(shape=Shape(dp=2, ep=2)))
peers.wait_until_ready()
time.sleep(600)
"""


def test_one_that_is_slow_is_named_and_logged_once_a_minute(
    meetings: Meetings, caplog: pytest.LogCaptureFixture
) -> None:
    coming = [meetings.come(number) for number in range(3)]
    peers = coming[0].result(LONG_S)
    for now in (100.0, 110.0, 170.0):
        peers.name_slow({0: 6.0, 2: 7.5}, now)
    assert peers.counters[f"{SLOW}decode-2"] == 22.5
    assert peers.counters[f"{SLOW}decode-1"] == 0.0
    assert f"{SLOW}decode-0" not in peers.counters
    assert caplog.text.count("decode-2 is slow: ") == 2
    assert caplog.text.count("this worker is slow: ") == 2
    for each in coming[1:]:
        each.result(LONG_S)


def test_one_that_stands_still_is_named_and_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while nobody has anything to do; what is left of it cannot keep the others from
    beginning anew.
    """
    for name, seconds in (("_SIGN_S", 0.05), ("_SILENT_S", 2.5), ("_END_S", 0.5)):
        monkeypatch.setattr(f"mooncake.model.parallel.peers.{name}", seconds)
    monkeypatch.setattr(expert_peers, "EXCHANGE_S", 4.0)
    group = ExpertGroup(
        name=f"decode-0 of a test {SystemIds().hex(8)}", number=0, size=2, workers=WORKERS[:2]
    )
    other = subprocess.Popen([sys.executable, "-c", STANDING, group.name, SECRET])
    peers = meet(group, credential(), ModelOptions(shape=Shape(dp=2, ep=2)))
    try:
        told: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        peers.watch(
            lambda _: None,
            lambda: told.put(None),
            lambda: told.put(peers.counters[f"{SILENT}decode-1"]),
        )
        peers.wait_until_ready()
        other.send_signal(signal.SIGSTOP)
        silent = list(iter(lambda: told.get(timeout=LONG_S), None))
        assert silent
        assert silent == sorted(set(silent)), "it grows"
        assert "decode-1, which shares experts with this worker, has said nothing" in caplog.text
        lost = re.search(r"decode-1, .*, has said nothing for (\d+) s", str(peers.lost))
        assert lost is not None, peers.lost
        assert int(lost[1]) >= 4
        assert other.poll() is None
        peers.close()
        assert other.wait(LONG_S) == -signal.SIGKILL
        assert "decode-1 shares experts with this worker and does not end" in caplog.text
    finally:
        peers.close()
        os.close(peers.descriptor)
        other.kill()
        other.wait()
