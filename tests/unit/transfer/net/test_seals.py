"""Seals: what is altered, repeated, dropped or moved does not pass; keys differ by direction."""

from __future__ import annotations

import os

import pytest

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.seals import TAG_BYTES, Seals, session_keys

KEY = bytes(range(32))
ALTERED = "bytes were altered on their way"


def test_messages_and_payloads_pass_in_their_order() -> None:
    sent, received = Seals(KEY), Seals(KEY)
    payload = [memoryview(os.urandom(100)), memoryview(os.urandom(7))]
    assert received.open(sent.seal(b"first")) == b"first"
    sealed, checked = sent.begin(), received.begin()
    sealed.update(payload, 107)
    whole = b"".join(payload)
    for index in range(107):  # however it is cut up
        checked.update([memoryview(whole)[index : index + 1]], 1)
    checked.check(sealed.tag())
    assert received.open(memoryview(sent.seal(b"last"))) == b"last"


def test_what_is_altered_repeated_dropped_or_moved_is_refused() -> None:
    sent = Seals(KEY)
    first, second = sent.seal(b"first"), sent.seal(b"second")
    for index in range(len(first)):
        bad = bytearray(first)
        bad[index] ^= 1
        with pytest.raises(ProtocolError, match=ALTERED):
            Seals(KEY).open(bytes(bad))
    received = Seals(KEY)
    assert received.open(first) == b"first"
    with pytest.raises(ProtocolError, match=ALTERED):
        received.open(first)
    with pytest.raises(ProtocolError, match=ALTERED):
        Seals(KEY).open(second)
    with pytest.raises(ProtocolError, match=ALTERED):
        Seals(KEY).open(b"short")
    with pytest.raises(ProtocolError, match=ALTERED):
        Seals(KEY).begin().check(bytes(TAG_BYTES))


def test_keys_belong_to_one_handshake_and_one_direction() -> None:
    keys = [*session_keys("secret", b"a"), *session_keys("secret", b"b"), *session_keys("x", b"a")]
    assert len(set(keys)) == 6


def test_without_a_key_nothing_is_added() -> None:
    seals = Seals(None)
    assert seals.open(seals.seal(b"as it is")) == b"as it is"
    assert seals.begin().tag() == b""
