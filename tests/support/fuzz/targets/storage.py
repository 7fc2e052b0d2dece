"""Targets: what lies on disks: records of the pool, safetensors files, configurations."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from pathlib import Path
from typing import ClassVar

import xxhash

from mooncake.base.errors import CheckpointError, MooncakeError
from mooncake.base.model_spec import ModelSpec
from mooncake.kvstore.storage.block_record import (
    PAGE_BYTES,
    pack_block_header,
    pack_file_header,
    unpack_block_header,
    unpack_file_header,
)
from mooncake.model.checkpoint.file_bytes import PlainBytes
from mooncake.model.checkpoint.safetensors_file import SafetensorsFile
from tests.support.fuzz.target import Shape, Target

_FILE, _BLOCK = struct.Struct("<8sQQI"), struct.Struct("<8s32sQQQI")


class SsdRecords(Target):
    """The page about a file, and that about a block. The first byte says which one it is."""

    name = "ssd-records"
    modules = ("mooncake.kvstore.storage.block_record",)
    max_bytes = 1 + PAGE_BYTES
    tokens = (b"MCKVBLK1", b"MCKVSEG2", b"\xff" * 8, b"\x80", b"\0" * 8)

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


class Safetensors(Target):
    """The header of a weights file, with some bytes of tensors behind it."""

    name = "safetensors"
    modules = ("mooncake.model.checkpoint.safetensors_file",)
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
    modules = ("mooncake.base.model_spec",)
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
