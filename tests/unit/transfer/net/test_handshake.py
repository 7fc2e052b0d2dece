"""The handshake proves both sides, and nothing else gets in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from mooncake.base.ids import SeededIds, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import KeyAgreement, issue
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.handshake import (
    HANDSHAKE_VERSION,
    MAX_HANDSHAKE_BYTES,
    WORKERS,
    WORKERS_AND_CLIENTS,
    AcceptingSide,
    Challenge,
    ConnectingSide,
    Credentials,
    HandshakeRefused,
    Refusal,
    Welcome,
)

WORKER = CredentialRole.WORKER
ORDER = [Protection.NONE, Protection.MAC, Protection.ENCRYPT]


def party(
    engine_id: str,
    secret: str = "s",
    seed: int = 1,
    role: CredentialRole = WORKER,
    unix_s: float = 0.0,
    **protection: Protection,
) -> Credentials:
    return Credentials(
        engine_id=engine_id,
        credential=issue(secret, "etl", [role], expires_s=100.0, ids=SeededIds(seed)),
        ids=SeededIds(seed),
        unix_time=lambda: unix_s,
        **protection,
    )


def saying(**changed: Any) -> ConnectingSide:
    """Return a client whose hello is another than it should be."""
    us = party("a")
    hello = msgspec.structs.replace(us.connect("b").hello, **changed)
    return ConnectingSide(us, KeyAgreement(SeededIds(5)), hello)


def shake(client: ConnectingSide, owner: AcceptingSide) -> None:
    """Carry messages to and fro until the client is content or one side refuses."""
    message: bytes | None = client.first_message
    while message is not None:
        message = client.step(owner.step(message))


def test_both_sides_know_each_other_after_four_messages() -> None:
    client = party("a").connect("b", ["old-1", "old-2"])
    owner = party("b", seed=2).accept()
    shake(client, owner)
    assert client.done
    assert owner.refusal is None
    assert owner.identity is not None
    assert owner.identity.engine_id == "a"
    assert owner.identity.connection_id == client.hello.connection_id
    assert owner.identity.fenced == ("old-1", "old-2")


def test_a_wrong_secret_is_refused_and_both_sides_know_why() -> None:
    owner = party("b", secret="right").accept()
    with pytest.raises(HandshakeRefused, match="the peer refused: wrong cluster secret"):
        shake(party("a", secret="wrong").connect("b"), owner)
    assert owner.refusal == "wrong cluster secret"
    assert owner.identity is None


def test_while_the_secret_is_replaced_those_before_and_after_know_each_other() -> None:
    phases = ["old", "old\nnew", "new\nold", "new"]
    for one, other in pairwise(phases):
        for client, owner in ((one, other), (other, one)):
            ours = party("a", client, seed=1).connect("b")
            theirs = party("b", owner, seed=2).accept()
            shake(ours, theirs)
            assert theirs.identity is not None, (client, owner)
    with pytest.raises(HandshakeRefused, match="wrong cluster secret"):
        shake(party("a", "old").connect("b"), party("b", "new", seed=2).accept())


def test_another_engine_is_named_only_to_peers_that_know_the_secret() -> None:
    owner = party("b").accept()
    with pytest.raises(HandshakeRefused, match="engine c is not here, this is b"):
        shake(party("a").connect("c"), owner)
    stranger_sees = party("b").accept()
    with pytest.raises(HandshakeRefused) as error:
        shake(party("a", secret="wrong").connect("c"), stranger_sees)
    assert "this is b" not in error.value.message


def test_an_owner_that_does_not_know_the_secret_is_found_out() -> None:
    client = party("a", secret="right").connect("b")
    accepted = party("b", secret="right", seed=2).accept().step(client.first_message)
    challenge = msgspec.msgpack.decode(accepted, type=Challenge)
    forged = msgspec.structs.replace(
        challenge, certificate=party("b", secret="wrong").credential.signed
    )
    with pytest.raises(HandshakeRefused, match="wrong cluster secret"):
        client.step(msgspec.msgpack.encode(forged))
    assert client.step(accepted) is not None
    with pytest.raises(HandshakeRefused, match="does not hold the keys that its certificate names"):
        client.step(msgspec.msgpack.encode(Welcome(bytes(64))))
    assert not client.done


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    client = party("a").connect("b")
    owner = party("b", seed=2).accept()
    proof = client.step(owner.step(client.first_message))
    assert proof is not None
    again = party("b", seed=3).accept()
    again.step(client.first_message)
    again.step(proof)
    assert again.refusal == "the peer does not hold the keys that its certificate names"
    # Nor can the owner's own proof be mirrored back at it.
    mirror = party("b", seed=2).accept()
    challenge = mirror.step(client.first_message)
    mirror.step(challenge)
    assert mirror.refusal == "the peer sent an unexpected challenge in the handshake"


@pytest.mark.parametrize("position", range(0, 420, 13))
def test_a_changed_hello_spoils_the_proof(position: int) -> None:
    client = party("a").connect("b", ["x" * 40, "y" * 40])
    changed = bytearray(client.first_message)
    changed[position] ^= 1
    owner = party("b", seed=2).accept()
    answer = owner.step(bytes(changed))
    if owner.refusal is None:
        proof = client.step(answer)
        assert proof is not None
        owner.step(proof)
    assert owner.refusal is not None
    assert owner.identity is None


def test_another_version_is_named() -> None:
    with pytest.raises(HandshakeRefused, match=f"version {HANDSHAKE_VERSION + 1} is not"):
        shake(saying(version=HANDSHAKE_VERSION + 1), party("b").accept())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"nonce": b"short"}, "the hello is malformed"),
        ({"fenced": ["x"] * 300}, "the hello is malformed"),
        ({"certificate": b""}, "wrong cluster secret"),
        ({"exchange": b"short"}, "key for the exchange cannot be read"),
        ({"exchange": bytes(32)}, "key for the exchange cannot be read"),
    ],
)
def test_a_malformed_hello_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(HandshakeRefused, match=reason):
        shake(saying(**changed), party("b").accept())


@pytest.mark.parametrize("role", CredentialRole)
@pytest.mark.parametrize("let_in", [WORKERS, WORKERS_AND_CLIENTS])
def test_an_owner_lets_in_the_roles_it_serves(
    role: CredentialRole, let_in: frozenset[CredentialRole]
) -> None:
    owner = party("b", seed=2).accept(let_in)
    client = party("a", role=role).connect("b")
    if role in let_in:
        shake(client, owner)
        assert owner.identity is not None
        assert owner.identity.certificate.roles == [role]
        assert (owner.identity.borrower is None) == (role is WORKER)
    else:
        with pytest.raises(
            HandshakeRefused, match="'etl' may not move blocks this way; one of role"
        ):
            shake(client, owner)
        assert owner.identity is None


@pytest.mark.parametrize("role", sorted(set(CredentialRole) - {WORKER}))
def test_only_workers_own_memory(role: CredentialRole) -> None:
    with pytest.raises(HandshakeRefused, match="'etl' may not move blocks this way; one of role"):
        shake(party("a").connect("b"), party("b", seed=2, role=role).accept())


def test_a_credential_counts_until_it_expires() -> None:
    with pytest.raises(HandshakeRefused, match="refused: the credential 'etl' has expired"):
        shake(party("a").connect("b"), party("b", seed=2, unix_s=100.0).accept())
    with pytest.raises(HandshakeRefused, match="the credential 'etl' has expired"):
        shake(party("a", unix_s=100.0).connect("b"), party("b", seed=2).accept())


def test_keys_are_drawn_anew_for_each_connection() -> None:
    """Nobody who learns the credentials later can compute them."""
    client, owner = party("a", seed=1).connect("b"), party("b", seed=2).accept()
    shake(client, owner)
    assert client.channel is not None
    assert owner.channel is not None
    message = bytes(client.channel.sent.seal(b"hello"))
    assert owner.channel.received.open(message) == b"hello"
    first = party("a").connect("b").hello
    both = [Credentials(engine_id="a", credential=party("a").credential, ids=SystemIds())] * 2
    assert len({first.exchange, *(each.connect("b").hello.exchange for each in both)}) == 3


@pytest.mark.parametrize(
    "data",
    [
        b"", b"GET / HTTP/1.1", b"\xc1", msgspec.msgpack.encode({"type": "x"}),
        msgspec.msgpack.encode(Refusal("x" * MAX_HANDSHAKE_BYTES)),
    ],
    ids=["nothing", "http", "no message", "another message", "too long"],
)  # fmt: skip
def test_garbage_is_refused_on_both_sides(data: bytes) -> None:
    owner = party("b").accept()
    owner.step(data)
    assert owner.refusal is not None
    assert "does not speak this protocol" in owner.refusal
    with pytest.raises(HandshakeRefused, match="does not speak this protocol"):
        party("a").connect("b").step(data)


def test_messages_out_of_order_are_refused() -> None:
    client, owner = party("a").connect("b"), party("b", seed=2).accept()
    challenge = owner.step(client.first_message)
    assert client.step(challenge) is not None
    with pytest.raises(HandshakeRefused, match="an unexpected challenge"):
        client.step(challenge)
    owner.step(client.first_message)
    assert owner.refusal == "the peer sent an unexpected hello in the handshake"


@pytest.mark.parametrize("least", list(Protection))
@pytest.mark.parametrize("protection", list(Protection))
def test_bytes_are_protected_as_the_side_that_wants_more_wants_it(
    protection: Protection, least: Protection
) -> None:
    client = party("a", least=least).connect("b")
    owner = party("b", seed=2, protection=protection).accept()
    shake(client, owner)
    assert client.channel is not None
    assert owner.channel is not None
    ends = (client.channel.sent, owner.channel.received, client.channel.received)
    assert {each.protection for each in ends} == {max(protection, least, key=ORDER.index)}
    assert owner.channel.received.open(client.channel.sent.seal(b"ask")) == b"ask"


@pytest.mark.parametrize("least", list(Protection))
@pytest.mark.parametrize("protection", list(Protection))
def test_a_client_refuses_an_owner_that_does_not_know_what_it_wants(
    protection: Protection, least: Protection
) -> None:
    """As one of an earlier release."""
    client = party("a", least=least).connect("b")
    hello = msgspec.msgpack.decode(client.first_message)
    del hello["least"]
    owner = party("b", seed=2, protection=protection).accept()
    challenge = owner.step(msgspec.msgpack.encode(hello))
    if not protection.is_weaker(least):
        assert client.step(challenge) is not None
        return
    words = f"`transfer-protection` is {protection.value}, ours is {least.value}: start all"
    with pytest.raises(HandshakeRefused, match=words):
        client.step(challenge)
    assert not client.done


def test_a_relay_that_takes_the_protection_away_spoils_the_proof() -> None:
    client = party("a").connect("b")
    owner = party("b", seed=2, protection=Protection.ENCRYPT).accept()
    challenge = owner.step(client.first_message)
    changed = challenge.replace(b"\xa7encrypt", b"\xa3mac")
    assert changed != challenge
    proof = client.step(changed)
    assert proof is not None
    owner.step(proof)
    assert owner.refusal == "the peer does not hold the keys that its certificate names"
    again = party("a").connect("b")
    with pytest.raises(HandshakeRefused, match="does not speak this protocol"):
        again.step(challenge.replace(b"encrypt", b"rot-013"))
