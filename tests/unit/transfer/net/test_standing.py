"""The looks at what sessions depend on; the sessions are in `tests/integration/transfer`."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Certificate, own_credential
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.handshake import ConnectingSide
from mooncake.transfer.net.standing import Standing
from tests.support.fuzz.sockets import LoopStub

FLOOD = 5_000
"""Keys that come and go between two looks."""


class Failing:
    """Sessions at which a look fails."""

    def look(self, standing: Standing) -> list[PeerKey]:
        raise RuntimeError("can't start new thread")

    def owners(self) -> list[PeerKey]:
        return []


def test_a_look_that_fails_is_not_the_last() -> None:
    standing = Standing(own_credential("s", CredentialRole.WORKER), lambda: 0.0)
    sessions, loop = Failing(), LoopStub()
    standing.watch(sessions)

    def connect(engine_id: str) -> ConnectingSide:
        raise AssertionError(engine_id)

    with pytest.raises(RuntimeError, match="new thread"):
        standing.keep_looking(loop, connect)
    assert len(loop.timers) == 1


class Sessions:
    """Open sessions of peers: what a listener and a directory have."""

    def __init__(self) -> None:
        self.clients: list[Certificate] = []
        self.engines: list[str] = []
        self.objections: list[str | None] = []

    def look(self, standing: Standing) -> list[PeerKey]:
        self.objections = [standing.objection(each) for each in self.clients]
        self.objections += [standing.objection_to(each) for each in self.engines]
        return []

    def owners(self) -> list[PeerKey]:
        return []


def no_connect(engine_id: str) -> ConnectingSide:
    raise AssertionError(engine_id)


def stranger(number: int) -> Certificate:
    key = number.to_bytes(32, "big")
    return Certificate("flood", [CredentialRole.WORKER], None, 0.0, key, key)


def test_a_flood_of_keys_hides_no_open_session_from_a_change_of_the_secret() -> None:
    own = own_credential("old", CredentialRole.WORKER)
    client, owner = (own_credential("old", CredentialRole.WORKER) for _ in range(2))
    standing, sessions = Standing(own, lambda: 0.0), Sessions()
    standing.watch(sessions)
    standing.learn(client.signed, client.certificate)
    standing.learn(owner.signed, owner.certificate, "owner")
    for number in range(2 * FLOOD):
        if number == 1:  # opened in the middle of it
            sessions.clients, sessions.engines = [client.certificate], ["owner"]
        standing.learn(b"", stranger(number), f"engine-{number}")
        if number % FLOOD == FLOOD - 1:
            standing.look(no_connect)
            assert sessions.objections == [None, None]
    own.renew("new")
    standing.look(no_connect)
    assert [str(each).partition(" credential")[0] for each in sessions.objections] == [
        "the secret that signed the"
    ] * 2


def test_what_no_session_depends_on_is_forgotten() -> None:
    standing = Standing(own_credential("s", CredentialRole.WORKER), lambda: 0.0)
    for number in range(FLOOD):
        standing.learn(b"", stranger(number), f"engine-{number}")
    assert standing.num_known == 2 * FLOOD
    for _ in range(2):
        standing.look(no_connect)
    assert standing.num_known == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(("learn", "open", "close", "look", "expire")), st.integers(0, 5)),
        max_size=60,
    )
)
def test_sessions_are_objected_to_as_if_nothing_were_forgotten(
    steps: list[tuple[str, int]],
) -> None:
    now = [0.0]
    standing = Standing(own_credential("s", CredentialRole.WORKER), lambda: now[0])
    sessions = Sessions()
    standing.watch(sessions)
    newest: dict[bytes, Certificate] = {}
    for at, (what, number) in enumerate(steps):
        certificate = msgspec.structs.replace(stranger(number), expires_s=now[0] + 1 + at % 3)
        if what in ("learn", "open"):  # a session is opened by a proof
            newest[certificate.signing_key] = certificate
            standing.learn(b"", certificate, f"engine-{number}")
            if what == "open":
                sessions.clients.append(certificate)
                sessions.engines.append(f"engine-{number}")
        elif what == "close" and sessions.clients:
            place = number % len(sessions.clients)
            del sessions.clients[place], sessions.engines[place]
        elif what == "expire":
            now[0] += 1
        elif what == "look":
            standing.look(no_connect)
            proven = [newest[each.signing_key] for each in sessions.clients]
            wanted = [now[0] >= each.expires_s for each in proven]
            assert [each is not None for each in sessions.objections] == 2 * wanted
