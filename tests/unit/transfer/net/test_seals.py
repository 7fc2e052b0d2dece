"""Seals: what is altered, repeated, dropped or moved does not pass; keys differ by direction."""

from __future__ import annotations

import os

import pytest

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.seals import TAG_BYTES, Seals, session_keys

KEY = bytes(range(32))
ALTERED = "bytes were altered on their way"
SEALED = (Protection.MAC, Protection.ENCRYPT)


def on_the_wire(sent: Seals, *chunks: bytes) -> list[bytearray]:
    """Return each chunk of one payload as it travels, its tag at the end."""
    whole = b"".join(sent.begin().seal([memoryview(chunk) for chunk in chunks]))
    found = []
    for chunk in chunks:
        size = len(chunk) + TAG_BYTES
        found.append(bytearray(whole[:size]))
        whole = whole[size:]
    assert not whole
    return found


def opened(received: Seals, *chunks: bytearray) -> list[bytes]:
    """Open the chunks of one payload in place."""
    seal = received.begin()
    for chunk in chunks:
        seal.open(memoryview(chunk)[:-TAG_BYTES], memoryview(chunk)[-TAG_BYTES:])
    return [bytes(chunk[:-TAG_BYTES]) for chunk in chunks]


@pytest.mark.parametrize("protection", SEALED)
def test_messages_and_payloads_pass_in_their_order(protection: Protection) -> None:
    sent, received = Seals(protection, KEY), Seals(protection, KEY)
    payload = [os.urandom(100), os.urandom(7)]
    assert received.open(sent.seal(b"first")) == b"first"
    assert opened(received, *on_the_wire(sent, *payload)) == payload
    assert opened(received, *on_the_wire(sent, *payload)) == payload
    assert received.open(memoryview(sent.seal(b"last"))) == b"last"


def test_encrypted_payloads_cannot_be_read_and_never_look_the_same() -> None:
    sent = Seals(Protection.ENCRYPT, KEY)
    text = b"nobody on the wire reads this " * 30
    [first, second], [third] = on_the_wire(sent, text, text), on_the_wire(sent, text)
    for chunk in (first, second, third):
        assert not any(text[at : at + 4] in chunk for at in range(30))
    assert len({bytes(chunk) for chunk in (first, second, third)}) == 3
    assert on_the_wire(Seals(Protection.MAC, KEY), text)[0].startswith(text)


@pytest.mark.parametrize("protection", SEALED)
def test_chunks_that_are_altered_repeated_or_moved_are_refused(protection: Protection) -> None:
    sent = Seals(protection, KEY)
    first, second = on_the_wire(sent, b"first", b"other")
    [next_one] = on_the_wire(sent, b"third")
    for index in range(len(first)):
        bad = bytearray(first)
        bad[index] ^= 1
        with pytest.raises(ProtocolError, match=ALTERED):
            opened(Seals(protection, KEY), bad)
    for wrong in ([second], [first, first], [next_one], [bytearray(TAG_BYTES)]):
        with pytest.raises(ProtocolError, match=ALTERED):
            opened(Seals(protection, KEY), *(bytearray(chunk) for chunk in wrong))
    assert opened(Seals(protection, KEY), first, second) == [b"first", b"other"]


def test_messages_that_are_altered_repeated_or_dropped_are_refused() -> None:
    sent = Seals(Protection.MAC, KEY)
    first, second = sent.seal(b"first"), sent.seal(b"second")
    for index in range(len(first)):
        bad = bytearray(first)
        bad[index] ^= 1
        with pytest.raises(ProtocolError, match=ALTERED):
            Seals(Protection.MAC, KEY).open(bytes(bad))
    received = Seals(Protection.MAC, KEY)
    assert received.open(first) == b"first"
    with pytest.raises(ProtocolError, match=ALTERED):
        received.open(first)
    with pytest.raises(ProtocolError, match=ALTERED):
        Seals(Protection.MAC, KEY).open(second)
    with pytest.raises(ProtocolError, match=ALTERED):
        Seals(Protection.MAC, KEY).open(b"short")


def test_keys_belong_to_one_handshake_and_one_direction() -> None:
    keys = [*session_keys(b"s", b"a"), *session_keys(b"s", b"b"), *session_keys(b"x", b"a")]
    assert len(set(keys)) == 6


def test_without_protection_nothing_is_added() -> None:
    unsealed = Seals(Protection.NONE, b"")
    assert unsealed.open(unsealed.seal(b"as it is")) == b"as it is"
    chunks = [memoryview(b"one"), memoryview(b"two")]
    assert unsealed.begin().seal(chunks) == chunks
