"""Headers of weights files that say what cannot be: each is refused in words that can be shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.safetensors_file import SafetensorsFile


def opened(path: Path, header: bytes | str) -> SafetensorsFile:
    data = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
    return SafetensorsFile(PlainBytes(path))


def test_metadata_is_no_tensor_and_padding_no_mistake(tmp_path: Path) -> None:
    row = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": row})
    file = opened(tmp_path / "a.safetensors", header + "   ")
    assert [(name, one.shape, one.num_bytes) for name, one in file.tensors.items()] == [
        ("a", (2, 1), 8)
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}', "malformed"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}', "malformed"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [0]}', "malformed"),
        ('{"dtype": "F32", "shape": "11", "data_offsets": [0, 4]}', "malformed"),
        ('{"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}', "malformed"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}', "malformed"),
        ('{"dtype": "F32", "shape": [9' + "9" * 4000 + '], "data_offsets": [0, 4]}', "malformed"),
        ('{"dtype": "\\udffd", "shape": [3], "data_offsets": [0, 8]}', "malformed"),
        ('{"dtype": "F' + "3" * 9000 + '", "shape": [3], "data_offsets": [0, 8]}', "malformed"),
        ('{"dtype": "F32", "shape": [' + "7, " * 5000 + '7], "data_offsets": [0, 8]}', "malformed"),
        ('{"dtype": "F32", "shape": [3], "data_offsets": [8, 0]}', "does not fit"),
        ('{"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}', "truncated"),
        ("[" * 5000, "malformed"),
        ("7", "malformed"),
    ],
    ids=lambda text: text[:60],
)
def test_a_row_that_cannot_be_is_refused(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match=message) as refused:
        opened(path, f'{{"{"n" * 9000}": {row}}}')
    assert len(refused.value.message.encode()) < 2000
    assert str(path) in refused.value.message
