"""Sessions end with the proofs by which they were opened, and outlive a rotation of these."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from mooncake.base import MonotonicClock
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Credential, certify, issue, own_credential
from mooncake.transfer import factory
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.net.standing import Standing
from mooncake.transfer.rdma.backend import RdmaBackend
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.rdma.settings import RdmaSettings
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.topology import Place, build_matrix
from tests.support.clock import Calendar
from tests.support.kvstore.pool_process import until
from tests.support.transfer.driving import move
from tests.support.transfer.fake_nics import FakeFabric, FakeNic

WORKER = CredentialRole.WORKER
SIZE = 4096
Open = Callable[[str, Credential], "Engine"]


class Engine:
    """A transfer engine with some memory."""

    def __init__(self, name: str, credential: Credential, protocol: str) -> None:
        config = TransferConfig(secret="not used", host="here", protocols=[protocol])
        self.transfer: RoutedTransfer = open_transfer(
            config, name, MonotonicClock(), credential=credential
        )
        self.region = self.transfer.allocate(SIZE, name)

    @property
    def num_sessions(self) -> int:
        """What others have open with us."""
        (backend,) = self.transfer.backends
        of = getattr(backend, "_server" if backend.protocol == "tcp" else "_owner")
        return int(of.listener.num_sessions)

    def write_to(self, owner: Engine) -> str | None:
        """Write some bytes; return why not."""
        ops = [TransferOp(self.region.region_id, 0, owner.region.region_id, 0, SIZE)]
        return move(self.transfer, Op.WRITE, owner.transfer.segment, ops).error


class Looks:
    """The looks at sessions that all engines of a test take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: Counter[Standing] = Counter()
        look = Standing.look

        def counted(standing: Standing, *words: Any) -> None:
            look(standing, *words)
            self._counts[standing] += 1

        monkeypatch.setattr(Standing, "look", counted)

    def all_have_shown(self) -> bool:
        """Whether each engine has proven its newest certificate to all owners."""
        return all(
            standing._shown is standing._credential.signed and not standing._is_proving
            for standing in self._counts
        )

    def wait_for(self, num: int) -> None:
        """Wait until each engine has looked so many times more."""
        goals = {standing: count + num for standing, count in self._counts.items()}
        until(lambda: all(self._counts[each] >= goals[each] for each in goals), "all have looked")


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture(params=["tcp", "shm", "rdma"])
def start(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, calendar: Calendar
) -> Iterator[Open]:
    monkeypatch.setattr("mooncake.transfer.net.standing.LOOK_S", 0.1)
    monkeypatch.setattr(factory, "Credentials", partial(Credentials, unix_time=calendar))
    opened: list[Engine] = []
    fabric = FakeFabric()

    def with_a_stand_in(
        credentials: Credentials,
        table: RegionTable,
        loop: IoLoop,
        router: RoutedTransfer,
        settings: RdmaSettings,
        listen: ListenAddress,
    ) -> RdmaBackend:
        nic = FakeNic(fabric, credentials.engine_id, 0)
        matrix = build_matrix([Place(name=nic.address.name, numa_node=0)])
        memory = RdmaMemory(table, [nic], matrix)
        return RdmaBackend(credentials, memory, [nic], loop, router, settings, listen)

    monkeypatch.setattr(factory, "open_rdma", with_a_stand_in)

    def make(name: str, credential: Credential) -> Engine:
        opened.append(Engine(name, credential, request.param))
        return opened[-1]

    yield make
    for each in opened:
        each.transfer.close()


def expiring(name: str) -> Credential:
    issued = issue("s", name, [WORKER], expires_s=time.time() + 600.0)
    return own_credential(issued.text, WORKER)


def test_a_session_ends_when_its_client_s_credential_expires(
    start: Open, calendar: Calendar
) -> None:
    owner, client = start("owner", own_credential("s", WORKER)), start("us", expiring("late"))
    other = start("other", own_credential("s", WORKER))
    assert client.write_to(owner) is other.write_to(owner) is None
    assert owner.num_sessions == 2
    calendar.ahead_s = 1000.0
    until(lambda: owner.num_sessions == 1, "one session is left")
    assert other.write_to(owner) is None
    # A write that is under way while the session ends learns only that.
    until(lambda: "'late' has expired" in str(client.write_to(owner)), "it says why")


def test_a_session_ends_when_its_owner_s_credential_expires(
    start: Open, calendar: Calendar, caplog: pytest.LogCaptureFixture
) -> None:
    owner, client = start("owner", expiring("late")), start("us", own_credential("s", WORKER))
    assert client.write_to(owner) is None
    calendar.ahead_s = 1000.0
    until(lambda: owner.num_sessions == 0, "the client has hung up")
    assert any("session with owner ends: the credential 'late'" in each for each in caplog.messages)
    # One may be opened again in the moment before the credential expires.
    until(lambda: "'late' has expired" in str(client.write_to(owner)), "it says why")
    assert sum("session with owner ends" in each for each in caplog.messages) <= 2


def test_a_secret_that_is_taken_out_of_use_ends_the_sessions_of_who_has_no_other(
    start: Open,
) -> None:
    proofs = [own_credential("old\nnew", WORKER) for _ in range(2)]
    owner, client = (
        start(name, proof) for name, proof in zip(("owner", "us"), proofs, strict=True)
    )
    assert client.write_to(owner) is None
    proofs[0].renew("new")
    until(lambda: owner.num_sessions == 0, "it has ended")
    assert client.write_to(owner) is not None


def test_sessions_outlive_a_rotation_of_the_secret(
    start: Open, looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    """Each side proves the new one to the other without a new session: nothing fails or waits."""
    proofs = [own_credential("old", WORKER) for _ in range(2)]
    first, second = (start(name, proof) for name, proof in zip("ab", proofs, strict=True))
    errors: list[str | None] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.002):
            errors.append(first.write_to(second))

    assert second.write_to(first) is None
    assert first.write_to(second) is None
    writer = threading.Thread(target=write)
    writer.start()
    for given in ("old\nnew", "new\nold", "new"):
        for proof in proofs:
            proof.renew(given)
        num_before = len(errors)
        until(looks.all_have_shown, "each has proven the new one")
        looks.wait_for(3)
        until(lambda num=num_before: len(errors) > num, "it goes on writing")
    stop.set()
    writer.join()
    assert set(errors) == {None}
    assert second.write_to(first) is None, "an idle session has stayed, too"
    for each in (first, second):
        assert each.num_sessions == 1
        assert all(link.num_failures == 0 for link in each.transfer.links())
    assert not any(" ends: " in each for each in caplog.messages)


def test_sessions_outlive_certificates_that_are_issued_anew(
    start: Open, looks: Looks, calendar: Calendar, caplog: pytest.LogCaptureFixture
) -> None:
    """For the same keys, as the signer does."""
    proofs = [expiring(name) for name in "ab"]
    first, second = (start(name, proof) for name, proof in zip("ab", proofs, strict=True))
    assert first.write_to(second) is None
    for proof in proofs:
        issued = certify("s", proof.certificate.name, [WORKER], proof.keys.public)
        proof.renew(Credential(proof.keys.seed, issued.signed, issued.cluster).text)
    until(looks.all_have_shown, "each has proven the new one")
    calendar.ahead_s = 1000.0
    looks.wait_for(3)
    assert second.num_sessions == 1
    assert first.write_to(second) is second.write_to(first) is None
    assert not any(" ends: " in each for each in caplog.messages)
