"""One `.safetensors` file, memory mapped. Owns the mapping; knows no models, no tensors.

The format (huggingface.co/docs/safetensors): 8 bytes little-endian header length, a JSON header
(name -> dtype, shape, data_offsets), then the bytes of the tensors. Everything in the header is
checked against the file's real size before the first tensor is read, because a mapping past the end
of a file kills the process instead of raising.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.base import CheckpointError

MAX_HEADER_BYTES = 100 * 2**20
"""As in the reference implementation: a longer header is an attack or garbage."""

ITEM_BYTES = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1,
}  # fmt: skip
"""Bytes of one number, by the header's name of its dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor: `dtype` as the header spells it, bytes [begin, end) of the
    file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """The header and the mapped bytes of one file."""

    def __init__(self, path: Path) -> None:
        """Open `path` and check its header.

        Raises:
            CheckpointError: the file is missing, is not safetensors, or ends early; names the file
                and, where there is one, the tensor.
        """
        self.path = path
        self._mapping: mmap.mmap | None = None
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                self.header = _read_header(path, file.read(8), file)
                if self.num_bytes > 0:
                    self._mapping = mmap.mmap(
                        file.fileno(),
                        0,
                        flags=mmap.MAP_PRIVATE,
                        prot=mmap.PROT_READ | mmap.PROT_WRITE,
                    )
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        self.tensors = _entries(path, self.header, self.num_bytes)

    @property
    def mapping(self) -> mmap.mmap | None:
        """The file's bytes (private: writing to them changes no file); None when it is empty."""
        return self._mapping

    def bytes_at(self, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of the file."""
        return b"" if self._mapping is None else self._mapping[begin:end]


def _read_header(path: Path, prefix: bytes, file: Any) -> bytes:
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: not a safetensors file (shorter than its length field)")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: not a safetensors file (header of {length} bytes)")
    header = file.read(length)
    if len(header) < length:
        raise CheckpointError(f"{path}: truncated within its header")
    return bytes(header)


def _entries(path: Path, header: bytes, file_bytes: int) -> dict[str, StoredTensor]:
    try:
        parsed = json.loads(header)
        rows = {
            name: (
                str(row["dtype"]),
                tuple(int(size) for size in row["shape"]),
                int(row["data_offsets"][0]),
                int(row["data_offsets"][1]),
            )
            for name, row in parsed.items()
            if name != "__metadata__"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is malformed ({error})") from error
    start = 8 + len(header)
    entries = {}
    for name, (dtype, shape, begin, end) in rows.items():
        item = ITEM_BYTES.get(dtype)
        wrong_size = item is not None and end - begin != math.prod(shape) * item
        if begin < 0 or end < begin or min(shape, default=0) < 0 or wrong_size:
            raise CheckpointError(
                f"{name} in {path}: {dtype} {list(shape)} does not fit the bytes {begin} to {end}"
            )
        if start + end > file_bytes:
            raise CheckpointError(
                f"{name} in {path}: the file is truncated: it has {file_bytes} bytes, "
                f"the tensor ends at {start + end}"
            )
        entries[name] = StoredTensor(dtype, shape, start + begin, start + end)
    return entries
