"""The header of one `.safetensors` file. Knows no models and no tensors.

The format (huggingface.co/docs/safetensors) is 8 bytes of little-endian header length, a JSON
header (name -> dtype, shape, data_offsets), then the bytes of the tensors. Everything in the header
is checked against the file's real size before the first tensor is read, because a mapping past the
end of a file kills the process instead of raising.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.files.file_bytes import FileBytes

MAX_HEADER_BYTES = 100 * 2**20
"""The limit of the reference implementation: a longer header is an attack or garbage."""
MAX_NAME_CHARS = 200
"""How many characters of a tensor's name an error shows."""

ITEM_BYTES = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1,
}  # fmt: skip
"""The bytes of one number, by the dtype's name in the header."""

_Place = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Row(msgspec.Struct):
    """A header's entry for one tensor. Its shape must be short, because its product is computed."""

    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[_Place], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Place, _Place]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROW = msgspec.json.Decoder(_Row)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of one tensor. `dtype` is spelled as in the header; the tensor is bytes [begin,
    end) of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class SafetensorsFile:
    """Reads one file: its header, and the bytes of its tensors."""

    def __init__(self, content: FileBytes) -> None:
        """Check the header of the file that holds `content`.

        Raises:
            CheckpointError: it is not safetensors, or ends early. The message names the file and,
                if there is one, the tensor.
        """
        self.content = content
        self.path = content.path
        header = _read_header(content)
        self.tensors = _entries(self.path, header, content.num_bytes)


def _read_header(content: FileBytes) -> bytes:
    path, file_bytes = content.path, content.num_bytes
    if file_bytes < 8:
        raise CheckpointError(
            f"{path}: not a safetensors file, since it is shorter than its length field; copy it "
            "again"
        )
    length = int.from_bytes(content.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: not a safetensors file, since its header would have {length} bytes; copy it "
            "again"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(f"{path}: truncated within its header; copy the file again")
    return bytes(content.read(8, 8 + length))


def _entries(path: Path, header: bytes, file_bytes: int) -> dict[str, StoredTensor]:
    try:
        raw = _HEADER.decode(header)
        raw.pop("__metadata__", None)
        rows = {name: _ROW.decode(row) for name, row in raw.items()}
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is malformed ({error})") from error
    start = 8 + len(header)
    entries = {}
    for name, row in rows.items():
        dtype, shape, (begin, end) = row.dtype, tuple(row.shape), row.data_offsets
        item = ITEM_BYTES.get(dtype)
        wrong_size = item is not None and end - begin != math.prod(shape) * item
        if end < begin or wrong_size or start + end > file_bytes:
            problem = (
                f"the file is truncated: it has {file_bytes} bytes, the tensor ends at "
                f"{start + end}"
                if begin <= end and not wrong_size
                else f"{dtype} {list(shape)} does not fit the bytes {begin} to {end}"
            )
            raise CheckpointError(f"{name[:MAX_NAME_CHARS]} in {path}: {problem}")
        entries[name] = StoredTensor(dtype, shape, start + begin, start + end)
    return entries
