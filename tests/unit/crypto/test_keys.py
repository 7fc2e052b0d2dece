"""Keys as operators write them, and what follows from them."""

from __future__ import annotations

import base64
import os

import pytest

from mooncake.base import ConfigError
from mooncake.crypto.keys import Key, KeyRing, KeySource, derive

SECRETS = [os.urandom(32) for _ in range(3)]


@pytest.mark.parametrize("write", [bytes.hex, lambda key: base64.b64encode(key).decode()])
def test_keys_are_hexadecimal_or_base64(write) -> None:
    ring = KeyRing.parse("\n".join(map(write, SECRETS)) + "\n", "here")
    keys = [Key(secret) for secret in SECRETS]
    assert ring.first.id == keys[0].id
    found = [ring.get(key.id) for key in keys]
    assert [key.derive("x") for key in found if key] == [key.derive("x") for key in keys]
    assert ring.get(Key(os.urandom(32)).id) is None


@pytest.mark.parametrize(
    "word", ["secret", "ab" * 31, "ab" * 33, "zz" * 32, base64.b64encode(bytes(31)).decode(), "é"]
)
def test_what_is_no_key_is_told_by_its_place_and_not_repeated(word: str) -> None:
    with pytest.raises(ConfigError, match="there: word 2 is not a key; give 32 random") as refused:
        KeyRing.parse(f"{SECRETS[0].hex()} {word}", "there")
    assert word not in str(refused.value)
    assert SECRETS[0].hex() not in str(refused.value)


def test_no_key_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there contains no key"):
        KeyRing.parse(" \n", "there")


def test_keys_for_different_purposes_differ_and_none_is_printed() -> None:
    key = SECRETS[0]
    made = {derive(key, "a"), derive(key, "b"), derive(key, "a", b"b"), derive(SECRETS[1], "a")}
    assert len(made) == 4
    assert len({Key(key).id, Key(SECRETS[1]).id}) == 2
    assert key.hex() not in repr(Key(key))


def test_a_source_names_what_can_be_given() -> None:
    source = KeySource(name="weights-key")
    assert source.variable == "MOONCAKE_WEIGHTS_KEY"
    for word in ("`weights-key-file`", "`weights-key-command`", "MOONCAKE_WEIGHTS_KEY"):
        assert word in source.cure
