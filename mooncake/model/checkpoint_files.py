"""The files of a checkpoint directory: config, where tensors lie, what names the weights.

Reads headers only and needs no tensors, so a launcher can check a checkpoint before anything heavy
is loaded. Nothing is downloaded and no code in the directory is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.base import CheckpointError
from mooncake.model.safetensors_file import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"

_WHOLE_FILE_BYTES = 8 * 2**20
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096

Homes = dict[str, tuple[SafetensorsFile, str]]
"""Tensor name -> the file that holds it and its name there."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A directory in Hugging Face's layout: `config.json`, one safetensors file or an index."""

    path: Path
    config: Mapping[str, Any]
    homes: Homes

    @classmethod
    def open(cls, path: Path) -> CheckpointFiles:
        """Open the directory `path`.

        Raises:
            CheckpointError: there is no readable checkpoint; the message names the file.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; give a local checkpoint directory")
        return cls(path, _read_json(path / "config.json"), _find_tensors(path))

    def revision(self) -> str:
        """Return a name for the weights: 16 hex digits of SHA-256.

        Over `config.json` and, for each file in name order, its name, size, safetensors header and
        data: all of it up to 8 MiB, of a larger file 64 evenly spread samples of 4 KiB. Two
        checkpoints with one revision may be taken to give the same KV; it is no defence against
        forgery.
        """
        files = dict.fromkeys(file for file, _ in self.homes.values())
        return _revision(self.path, list(files))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return parsed


def _find_tensors(path: Path) -> Homes:
    if (path / INDEX_NAME).exists():
        return _find_indexed(path, _read_json(path / INDEX_NAME))
    found = sorted(path.glob("*.safetensors"))
    homes: Homes = {}
    for file in map(SafetensorsFile, found):
        for name in file.tensors:
            if name in homes:
                raise CheckpointError(f"{name}: both in {homes[name][0].path} and in {file.path}")
            homes[name] = (file, name)
    if found:
        return homes
    pickled = sorted(file.name for end in ("*.bin", "*.pt", "*.pth") for file in path.glob(end))
    if pickled:
        raise CheckpointError(
            f"{path}: only pickled weights ({pickled[0]}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{path}: no .safetensors file")


def _find_indexed(path: Path, index: Mapping[str, Any]) -> Homes:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_NAME}: no weight_map")
    for file_name in weight_map.values():
        # An index from elsewhere must not make us open files outside its directory.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{path / INDEX_NAME}: {file_name!r} is not a plain file name")
    files = {name: SafetensorsFile(path / name) for name in sorted(set(weight_map.values()))}
    for name, file_name in weight_map.items():
        if name not in files[file_name].tensors:
            raise CheckpointError(f"{path / file_name}: lacks {name}, which the index places there")
    return {name: (files[file_name], name) for name, file_name in weight_map.items()}


def _revision(path: Path, files: list[SafetensorsFile]) -> str:
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(files, key=lambda file: file.path.name):
        digest.update(f"\n{file.path.name} {file.num_bytes}\n".encode())
        digest.update(file.header)
        begin = 8 + len(file.header)
        if file.num_bytes - begin <= _WHOLE_FILE_BYTES:
            digest.update(file.bytes_at(begin, file.num_bytes))
            continue
        room = file.num_bytes - begin - _SAMPLE_BYTES
        for sample in range(_SAMPLES_PER_FILE):
            place = begin + room * sample // (_SAMPLES_PER_FILE - 1)
            digest.update(file.bytes_at(place, place + _SAMPLE_BYTES))
    return digest.hexdigest()[:16]
