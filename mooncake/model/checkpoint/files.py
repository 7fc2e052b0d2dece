"""The files of a checkpoint directory: configuration, location of tensors, revision of the weights.

Reads headers only and needs no tensors, so a launcher can check a checkpoint before anything heavy
is loaded. Nothing is downloaded and no code in the directory is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.revision import Progress, weights_revision
from mooncake.model.checkpoint.safetensors_file import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"

_PICKLED = (".bin", ".pt", ".pth")
_WEIGHTS = (".safetensors", *_PICKLED)

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

    @classmethod
    def open_config(cls, path: Path) -> CheckpointFiles:
        """Open a directory that may hold no more than `config.json`, which is enough for a plan.

        Raises:
            CheckpointError: there is no readable configuration, or weights that `open` refuses.
        """
        if any(file.suffix in _WEIGHTS for file in path.iterdir()):
            return cls.open(path)
        return cls(path, _read_json(path / "config.json"), {})

    def revision(self, cache_dir: Path | None = None, progress: Progress | None = None) -> str:
        """Return the name of these weights (see `revision.weights_revision`): two checkpoints with
        one revision give the same KV.
        """
        files = list(dict.fromkeys(file for file, _ in self.homes.values()))
        config = (self.path / "config.json").read_bytes()
        return weights_revision(config, files, cache_dir, progress)


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
    pickled = sorted(file.name for end in _PICKLED for file in path.glob(f"*{end}"))
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
