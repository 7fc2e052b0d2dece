"""What is encrypted comes back the same, and nothing else comes back ever."""

from __future__ import annotations

import os

import pytest

from mooncake.crypto.aead import (
    SALT_BYTES,
    TAG_BYTES,
    Altered,
    Chunks,
    decrypt_into,
    encrypt_into,
    record_key,
    seal,
    unseal,
)
from mooncake.crypto.keys import derive

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.mark.parametrize("size", [0, 1, 16, 5000])
def test_a_record_comes_back(size: int) -> None:
    data = os.urandom(size)
    sealed = seal(KEY, data, b"here")
    assert len(sealed) == SALT_BYTES + size + TAG_BYTES
    assert unseal(KEY, sealed, b"here") == data
    for key, context in ((OTHER, b"here"), (KEY, b"there"), (KEY, b"")):
        with pytest.raises(Altered):
            unseal(key, sealed, context)


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    sealed = seal(KEY, b"what was written", b"")
    for place in range(len(sealed)):
        for bit in range(8):
            altered = bytearray(sealed)
            altered[place] ^= 1 << bit
            with pytest.raises(Altered):
                unseal(KEY, altered)
    for length in range(len(sealed)):
        with pytest.raises(Altered):
            unseal(KEY, sealed[:length])


def test_equal_data_is_never_equal_twice() -> None:
    """Each record has a key of its own, so that one nonce is enough for all."""
    made = {seal(KEY, b"the same") for _ in range(100)}
    assert len(made) == 100
    assert len({one[SALT_BYTES:] for one in made}) == 100


def test_a_record_goes_into_memory_that_is_there() -> None:
    data, out, back = os.urandom(300), bytearray(316), bytearray(300)
    record = record_key(KEY, os.urandom(32))
    encrypt_into(record, memoryview(data), memoryview(out), b"c")
    sealed, tag = memoryview(out)[:300], bytes(out[300:])
    decrypt_into(record, tag, sealed, memoryview(back), b"c")
    assert bytes(back) == data
    for other, changed, context in (
        (record_key(KEY, bytes(32)), tag, b"c"), (record, bytes(16), b"c"), (record, tag, b"d"),
    ):  # fmt: skip
        with pytest.raises(Altered):
            decrypt_into(other, changed, sealed, memoryview(back), context)
    decrypt_into(record, tag, sealed, sealed, b"c")
    assert bytes(sealed) == data, "in place"


def test_a_record_is_aes_256_gcm_under_the_key_of_its_salt() -> None:
    """The reference: the library's one call, and the derivation written out."""
    import hashlib
    import hmac

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    sealed = seal(KEY, b"data", b"context")
    salt = sealed[:SALT_BYTES]
    info = b"mooncake record 1\0" + salt
    key = HKDFExpand(SHA256(), 32, info).derive(KEY)
    assert key == derive(KEY, "mooncake record 1", salt)
    assert key == hmac.new(KEY, info + b"\x01", hashlib.sha256).digest()
    assert AESGCM(key).decrypt(bytes(12), sealed[SALT_BYTES:], b"context") == b"data"


def test_a_chunk_is_good_for_its_number_and_file_only() -> None:
    file, other, out = Chunks(KEY), Chunks(OTHER), memoryview(bytearray(4 + TAG_BYTES))
    file.seal_into(7, b"data", out)
    back = memoryview(bytearray(4))
    file.unseal_into(7, out, back)
    assert bytes(back) == b"data"
    for chunks, number in ((file, 6), (file, 8), (other, 7)):
        with pytest.raises(Altered):
            chunks.unseal_into(number, out, back)
