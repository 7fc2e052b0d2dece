"""Workers that share experts meet at a socket of their machine, and hear of each other's end."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mooncake.base import InternalError, Shape, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity import Credential, own_credential
from mooncake.launch.worker import expert_peers
from mooncake.launch.worker.expert_peers import meet
from mooncake.model.options import ExpertGroup, ModelOptions
from mooncake.model.parallel.group import GroupError
from mooncake.model.parallel.peers import Peers

SECRET = SystemIds().hex(16)
OPTIONS = ModelOptions(shape=Shape(dp=3, ep=3))


def credential(secret: str = SECRET) -> Credential:
    return own_credential(secret, CredentialRole.WORKER)


class Meetings:
    """Workers of one group that come in threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.name = f"decode-0 of a test {SystemIds().hex(8)}"
        self._pool = pool
        self.made: list[Peers] = []

    def come(self, number: int, secret: str = SECRET) -> Future[Peers]:
        group = ExpertGroup(name=self.name, number=number, size=3)

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
    peers = [future.result(60) for future in [meetings.come(number) for number in (1, 2, 0)]]
    peers.sort(key=lambda each: each.number)
    assert [each.number for each in peers] == [0, 1, 2]
    assert len({os.fstat(each.descriptor).st_ino for each in peers}) == 1, "one file"
    heard: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in peers]

    def lost(of: queue.SimpleQueue[int | None]) -> Callable[[], None]:
        return lambda: of.put(None)

    for each, its in zip(peers, heard, strict=True):
        each.watch(its.put, lost(its))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: each.wait_until_ready(), peers))
    peers[1].wake(7)
    assert [heard[0].get(timeout=30), heard[2].get(timeout=30)] == [7, 7]
    peers[2].fail("step 8: out of memory")
    for its in heard:
        assert its.get(timeout=30) is None
        assert its.empty(), "told once"
    assert peers[2].lost == "step 8: out of memory"
    assert "has ended" in str(peers[0].lost)
    with pytest.raises(GroupError, match="has ended"):
        peers[0].wake(9)
    with pytest.raises((InternalError, GroupError)):
        peers[1].wait_until_ready()


def test_one_that_leaves_is_missed_when_a_step_begins(meetings: Meetings) -> None:
    peers = [future.result(60) for future in [meetings.come(number) for number in (0, 1, 2)]]
    stopped: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Noted:
        rank, size = 0, 3

        def fail(self) -> None:
            stopped.put(1)

    peers[0].use(Noted())  # type: ignore[arg-type]
    peers[1].leave()
    assert stopped.get(timeout=30) == 1, "who waits in an exchange hears of it"
    assert peers[0].lost is None, "who has nothing to do goes on"


def test_who_does_not_know_the_secret_gets_nothing(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_peers, "MEET_S", 3.0)
    first, second = meetings.come(0), meetings.come(1)
    strangers = [meetings.come(2, secret=SystemIds().hex(16))]
    with pytest.raises(InternalError, match="did not come within 3 s"):
        strangers[0].result(60)
    with pytest.raises(InternalError, match="workers 2 of those that share their experts did not"):
        first.result(60)
    with pytest.raises(InternalError, match=r"the first of the workers .* did not come"):
        second.result(60)


def test_one_that_came_and_ended_is_waited_for_again(meetings: Meetings) -> None:
    """Also one that says nothing right costs the others nothing."""
    first = meetings.come(0)
    group = ExpertGroup(name=meetings.name, number=1, size=3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        while True:
            try:
                sock.connect(expert_peers._address(group.name))
                break
            except ConnectionRefusedError:
                continue
        side = expert_peers._credentials(group, credential(), 1).connect(f"{group.name}/0")
        sock.sendall(side.first_message)
        while not side.done:
            answer = side.step(sock.recv(1 << 16))
            if answer is not None:
                sock.sendall(answer)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(expert_peers._address(group.name))
        sock.sendall(b"nonsense")
        assert b"refus" in sock.recv(1 << 16)
    found = [future.result(60) for future in (first, meetings.come(2), meetings.come(1))]
    assert sorted(each.number for each in found) == [0, 1, 2]
