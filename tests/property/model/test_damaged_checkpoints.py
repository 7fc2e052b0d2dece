"""A damaged weights file is a CheckpointError that names it, or reads as tensors of its header."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.safetensors_file import SafetensorsFile
from mooncake.model.checkpoint.weights import view_tensor

WHOLE = save(
    {
        "a.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "b.weight_packed": torch.arange(4, dtype=torch.int32),
        "c": torch.ones(3),
    }
)
HEADER_END = 8 + int.from_bytes(WHOLE[:8], "little")


def read_all(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(data)
        refusal = None
        try:
            file = SafetensorsFile(PlainBytes(path))
            for name, entry in file.tensors.items():
                tensor = view_tensor(file, name)
                assert tuple(tensor.shape) == entry.shape
                assert tensor.nbytes == entry.num_bytes
                tensor.clone()  # touches every byte: past the end of the file this would be fatal
        except CheckpointError as error:
            refusal = error.message
        assert refusal is None or str(path) in refusal


@given(st.integers(0, len(WHOLE) - 1))
def test_cut_anywhere(length: int) -> None:
    read_all(WHOLE[:length])


@given(
    st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_header_bytes_changed(changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place] = value
    read_all(bytes(data))


@given(st.integers(8, HEADER_END - 1), st.sampled_from(b'0123456789-,[]{}":eIFB \\'))
def test_a_header_character_changed(place: int, value: int) -> None:
    data = bytearray(WHOLE)
    data[place] = value
    read_all(bytes(data))


@given(st.binary(max_size=300))
def test_anything_at_all(data: bytes) -> None:
    read_all(data)
    read_all(len(data).to_bytes(8, "little") + data + bytes(64))
