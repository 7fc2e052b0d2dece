"""An encrypted file reads as the plain one at every range, for every length and chunk size; and not
at all where anything was changed.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import CheckpointError
from mooncake.crypto.aead import TAG_BYTES
from mooncake.crypto.keys import Key, KeyRing
from mooncake.model.checkpoint.files.encryption import (
    SUFFIX,
    SealedBytes,
    StoredFile,
    data_key_of,
    file_chunks,
    new_manifest,
    read_manifest,
    sealed_bytes,
    write_manifest,
)

NAME = "model.safetensors"
KEYS = KeyRing([Key(bytes(32))])
DATA_KEY = bytes(range(32))


def write(directory: Path, plain: bytes, chunk_bytes: int) -> Path:
    """The plain reference of the writer: one chunk after the other."""
    chunks, sealed = file_chunks(DATA_KEY, NAME, len(plain), chunk_bytes), b""
    for number, begin in enumerate(range(0, len(plain), chunk_bytes)):
        piece = plain[begin : begin + chunk_bytes]
        out = bytearray(len(piece) + TAG_BYTES)
        chunks.seal_into(number, piece, memoryview(out))
        sealed += out
    assert len(sealed) == sealed_bytes(len(plain), chunk_bytes)
    stored = {NAME: StoredFile(len(plain), hashlib.sha256(plain).hexdigest())}
    write_manifest(directory, new_manifest(stored, chunk_bytes, DATA_KEY, KEYS))
    path = directory / f"{NAME}{SUFFIX}"
    path.write_bytes(sealed)
    return path


def opened(directory: Path) -> SealedBytes:
    manifest = read_manifest(directory)
    assert manifest is not None
    return SealedBytes(directory, NAME, manifest, data_key_of(directory, manifest, KEYS))


@given(st.binary(max_size=300), st.integers(1, 70), st.data())
def test_every_range(plain: bytes, chunk_bytes: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(plain)))
    end = data.draw(st.integers(begin, len(plain)))
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), plain, chunk_bytes)
        assert bytes(opened(Path(directory)).read(begin, end)) == plain[begin:end]


@given(st.binary(min_size=1, max_size=300), st.integers(1, 70), st.data())
def test_a_changed_byte_is_found_by_who_reads_its_chunk(
    plain: bytes, chunk_bytes: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), plain, chunk_bytes)
        sealed = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(sealed) - 1))
        sealed[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(sealed)
        first = place // (chunk_bytes + TAG_BYTES) * chunk_bytes
        last = min(first + chunk_bytes, len(plain))
        content = opened(Path(directory))
        assert bytes(content.read(0, first)) == plain[:first]
        assert bytes(content.read(last, len(plain))) == plain[last:]
        begin, end = data.draw(st.integers(0, last - 1)), data.draw(st.integers(last, len(plain)))
        with pytest.raises(CheckpointError, match=str(path)):
            content.read(min(begin, last - 1), max(end, last))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_anything_in_the_place_of_a_manifest_or_a_file(manifest: bytes, sealed: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), b"plain" * 20, 16)
        whole = path.read_bytes()
        path.write_bytes(sealed)
        with pytest.raises(CheckpointError, match="copy it again"):
            opened(Path(directory))
        path.write_bytes(whole)
        (Path(directory) / "encryption.json").write_bytes(manifest)
        with pytest.raises(CheckpointError, match=r"encryption\.json"):
            opened(Path(directory))
