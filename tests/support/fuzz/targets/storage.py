"""Targets: what lies on disks: records of the pool, safetensors files, configurations."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from pathlib import Path
from typing import ClassVar

import msgspec
import xxhash

from mooncake.base.errors import CheckpointError, ConfigError, MooncakeError
from mooncake.base.models.model_spec import ModelSpec
from mooncake.crypto.aead import TAG_BYTES
from mooncake.crypto.keys import Key, KeyRing
from mooncake.kvstore.storage.block_record import (
    PAGE_BYTES,
    pack_block_header,
    pack_file_header,
    unpack_block_header,
    unpack_file_header,
)
from mooncake.kvstore.storage.record_cipher import EXTRA_BYTES, OtherKey, RecordCipher
from mooncake.model.checkpoint.files.encryption import (
    MANIFEST_NAME,
    SUFFIX,
    Manifest,
    SealedBytes,
    StoredFile,
    data_key_of,
    file_chunks,
    new_manifest,
    read_manifest,
    rewrapped,
    sealed_bytes,
)
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.safetensors_file import SafetensorsFile
from tests.support.fuzz.target import Shape, Target

_FILE, _BLOCK = struct.Struct("<8sQQI"), struct.Struct("<8s32sQQQI")


class SsdRecords(Target):
    """The page about a file, and that about a block. The first byte says which one it is."""

    name = "ssd-records"
    modules = ("mooncake.kvstore.storage.block_record",)
    max_bytes = 1 + PAGE_BYTES
    tokens = (b"MCKVBLK2", b"MCKVSEG2", b"\xff" * 8, b"\x80", b"\0" * 8)

    def run(self, data: bytes) -> str:
        page = data[1:].ljust(PAGE_BYTES, b"\0")[:PAGE_BYTES]
        if data[:1] == b"\1":
            file = unpack_file_header(page)
            assert file is None or unpack_file_header(pack_file_header(file)) == file
            return f"file {file is not None}"
        block = unpack_block_header(memoryview(page))
        if block is None:
            return "no block"
        again = memoryview(bytearray(PAGE_BYTES))
        pack_block_header(again, block)
        assert unpack_block_header(again) == block
        return f"block {bool(block.tenant)}"

    def repair(self, data: bytes) -> bytes:
        head = _FILE if data[:1] == b"\1" else _BLOCK
        page = data[1:].ljust(PAGE_BYTES, b"\0")[:PAGE_BYTES]
        end = head.size + head.unpack_from(page)[-1] % 2048
        digest = xxhash.xxh3_64_intdigest(page[:end]).to_bytes(8, "little")
        return data[:1] + page[:end] + digest + page[end + 8 :]


class SealedRecords(Target):
    """Encrypted slots of a disk: a header page and a block behind it. The first byte says whose it
    is: of a stranger (0), or of one who has the key and says nonsense (1).
    """

    name = "sealed-records"
    modules = (
        "mooncake.kvstore.storage.record_cipher", "mooncake.kvstore.storage.block_record",
        "mooncake.crypto.aead",
    )  # fmt: skip
    max_bytes = 1 + 2 * PAGE_BYTES
    tokens = (b"MCKVENC1", b"MCKVBLK2", b"\xff" * 8, b"\x80")

    def __init__(self) -> None:
        self._cipher = record_cipher()

    def run(self, data: bytes) -> str:
        page = memoryview(bytearray(data[1 : 1 + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")))
        block = memoryview(bytearray(data[1 + PAGE_BYTES :]))
        said = None
        if data[:1] == b"\1":
            said = unpack_block_header(page)
            out = memoryview(bytearray(len(block) + EXTRA_BYTES))
            of_block, _ = self._cipher.seal("", 7, block, out)
            self._cipher.seal_header(page, of_block)
        try:
            found = self._cipher.open_header(page)
        except OtherKey:
            return "other key"
        if found is None:
            assert said is None, "a header that was written and is not found"
            return "no header"
        header, opener = found
        assert said is None or header == said
        plain = memoryview(bytearray(len(block)))
        is_whole = self._cipher.open(opener, block, plain)
        assert said is None or not said.tenant or not is_whole, "a block of another tenant"
        return f"header {bool(header.tenant)} {is_whole}"

    def repair(self, data: bytes) -> bytes:
        if data[:1] != b"\1":
            return data
        return data[:1] + SsdRecords().repair(b"\0" + data[1 : 1 + PAGE_BYTES])[1:]


def record_cipher() -> RecordCipher:
    return RecordCipher(KeyRing([Key(bytes(32))]), "weights dtype shape")


class SealedWeights(Target):
    """Encrypted weights. The first byte says what the rest is: `encryption.json` of a stranger (0),
    or of one who has the key (1); else a file, of which the next two bytes say what is read.
    """

    name = "sealed-weights"
    modules = ("mooncake.model.checkpoint.files.encryption", "mooncake.crypto.aead")
    shape = Shape.JSON
    skip = 1
    allowed = (CheckpointError, ConfigError)
    max_bytes = 131_072
    memory_per_byte: ClassVar[int] = 256
    tokens = (b'"files"', b'"chunk_bytes"', b'"num_bytes"', b"1e9", b"-1", b"0", b"67108864")
    plain: ClassVar = bytes(range(256)) * 2 + b"the end"
    chunk_bytes: ClassVar = 100

    def __init__(self) -> None:
        self._keys = KeyRing([Key(bytes(32))])
        self._files = tempfile.TemporaryDirectory(
            dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        )
        self._folder = Path(self._files.name)
        self._data_key = bytes(range(32))
        stored = {"a.safetensors": StoredFile(len(self.plain), "0" * 64)}
        self._genuine = new_manifest(stored, self.chunk_bytes, self._data_key, self._keys)
        self._whole = sealed_file("a.safetensors", self.plain, self.chunk_bytes, self._data_key)

    def run(self, data: bytes) -> str:
        manifest: Manifest | None = self._genuine
        content = self._whole
        begin, end = 0, len(self.plain)
        if data[:1] in (b"\0", b"\1"):
            (self._folder / MANIFEST_NAME).write_bytes(data[1:])
            manifest = read_manifest(self._folder)
        else:
            begin, end = sorted(byte * end // 255 for byte in data[1:3].ljust(2, b"\xff"))
            content = data[3:]
        assert manifest is not None
        data_key = data_key_of(self._folder, manifest, self._keys)
        (self._folder / f"a.safetensors{SUFFIX}").write_bytes(content)
        for name in list(manifest.files)[:4]:
            file = SealedBytes(self._folder, name, manifest, data_key)
            read = bytes(file.read(min(begin, file.num_bytes), min(end, file.num_bytes)))
            assert read == self.plain[begin:end], "bytes that were not encrypted"
        return f"read {len(manifest.files).bit_length()}"

    def repair(self, data: bytes) -> bytes:
        if data[:1] != b"\1":
            return data
        try:
            said = msgspec.json.decode(data[1:], type=Manifest)
            made = rewrapped(said.with_tag(self._data_key), self._data_key, self._keys)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return data
        return data[:1] + msgspec.json.encode(made)

    def close(self) -> None:
        self._files.cleanup()


def sealed_file(name: str, plain: bytes, chunk_bytes: int, data_key: bytes) -> bytes:
    """Return a file as it lies encrypted on disk."""
    chunks = file_chunks(data_key, name, len(plain), chunk_bytes)
    made = bytearray(sealed_bytes(len(plain), chunk_bytes))
    for number, at in enumerate(range(0, len(plain), chunk_bytes)):
        piece = plain[at : at + chunk_bytes]
        place = number * (chunk_bytes + TAG_BYTES)
        chunks.seal_into(number, piece, memoryview(made)[place : place + len(piece) + TAG_BYTES])
    return bytes(made)


class Safetensors(Target):
    """The header of a weights file, with some bytes of tensors behind it."""

    name = "safetensors"
    modules = ("mooncake.model.checkpoint.files.safetensors_file",)
    shape = Shape.JSON
    allowed = (CheckpointError,)
    max_bytes = 1_000_000
    memory_per_byte: ClassVar[int] = 256
    tokens = (
        b'"shape"', b'"dtype"', b'"data_offsets"', b"1e999", b"[", b"9" * 4000, b"4294967296,",
        b"F32", b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},', b"0,", b"NaN", b"-1",
    )  # fmt: skip

    def __init__(self) -> None:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        descriptor, name = tempfile.mkstemp(".safetensors", dir=folder)
        os.unlink(name)  # it goes with this process, however that ends
        self._path, self._descriptor = Path(f"/proc/self/fd/{descriptor}"), descriptor

    def run(self, data: bytes) -> str:
        whole = len(data).to_bytes(8, "little") + data + bytes(4096)
        self._path.write_bytes(whole)
        content = PlainBytes(self._path)
        file = SafetensorsFile(content)
        for tensor in file.tensors.values():
            assert 8 + len(data) <= tensor.begin <= tensor.end <= len(whole)
            assert len(content.read(tensor.begin, tensor.end)) == tensor.num_bytes
        return f"{len(file.tensors).bit_length()}"

    def close(self) -> None:
        os.close(self._descriptor)


class ModelConfig(Target):
    """The `config.json` of a checkpoint."""

    name = "model-config"
    modules = ("mooncake.base.models.model_spec",)
    shape = Shape.JSON
    allowed = (MooncakeError,)
    tokens = (b"1e999", b"-1", b"null", b'"yarn"', b'"rope_scaling"', b"9" * 100, b"0.0", b"NaN")

    def run(self, data: bytes) -> str:
        try:
            config = json.loads(data)
        except (ValueError, RecursionError):
            return "no JSON"
        if not isinstance(config, dict):
            return "no object"
        spec = ModelSpec.from_config(config)
        assert math.isfinite(spec.softmax_scale)
        return f"spec {spec.num_hidden_layers.bit_length()}"
