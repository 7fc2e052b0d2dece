"""The files of a checkpoint directory: configuration, location of tensors, revision of the weights.

It reads headers only and needs no tensors, so a launcher can check a checkpoint before anything
heavy is loaded. Weights may be encrypted (`encryption`); the layers above see no difference. It
downloads nothing and runs no code from the directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base import CheckpointError
from mooncake.crypto.keys import KeyRing
from mooncake.model.checkpoint.files.encryption import (
    SUFFIX,
    SealedBytes,
    data_key_of,
    read_manifest,
)
from mooncake.model.checkpoint.files.file_bytes import FileBytes, PlainBytes
from mooncake.model.checkpoint.files.revision import (
    STATED_NAME,
    Progress,
    StatedDigests,
    file_digests,
    stated_digests,
    weights_revision,
)
from mooncake.model.checkpoint.files.safetensors_file import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
"""The name of weights in one file. transformers prefers it to an index."""

_PICKLED = (".bin", ".pt", ".pth")
_SAFE = (".safetensors", SUFFIX)
_WEIGHTS = (*_SAFE, *_PICKLED)

Homes = dict[str, tuple[SafetensorsFile, str]]
"""Tensor name -> the file that holds it and its name there."""


@dataclass(frozen=True)
class LentFiles:
    """Weights that lie elsewhere. `digests` has the digest of each file in `contents`, by its
    name. `close` is called once when nothing more is read.
    """

    contents: Mapping[str, FileBytes]
    digests: Mapping[str, str]
    close: Callable[[], None]

    def open(self, path: Path) -> Homes:
        """Return the home of each tensor of the checkpoint whose other files are at `path`."""

        def content(name: str) -> FileBytes:
            found = self.contents.get(name)
            if found is None:
                raise CheckpointError(
                    f"{path / INDEX_NAME}: it names {name}, which the engines that run do not have"
                )
            return found

        return _find_tensors(path, sorted(self.contents), content)


@dataclass(frozen=True)
class CheckpointFiles:
    """Opens a directory in Hugging Face's layout: `config.json`, and weights in one file or
    several with an index.
    """

    path: Path
    config: Mapping[str, Any]
    homes: Homes
    """The home of each tensor. Empty when the weights were not opened."""
    stated: Mapping[str, str] | None = None
    """Digests of the weights' files from the checkpoint's own statement: for encrypted weights, and
    for plain ones that were not opened; or from those that lend them. None: hash the files.
    """

    @classmethod
    def open(
        cls,
        path: Path,
        keys: KeyRing | None = None,
        *,
        reads_weights: bool = True,
        lent: LentFiles | None = None,
    ) -> CheckpointFiles:
        """Open the directory `path`. If there are `keys`, only weights that one of them decrypts
        are accepted.

        lent: weights to use in place of those in the directory.
        reads_weights: if false, the checkpoint's statement about its weights is believed. They may
        be missing, encrypted ones need no keys, and their tensors are left out.

        Raises:
            CheckpointError: there is no readable checkpoint; the message names the file.
            ConfigError: these are not its keys.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; give a local checkpoint directory")
        config = _read_json(path / "config.json")
        if lent is not None:
            return cls(path, config, lent.open(path), lent.digests)
        manifest = read_manifest(path)
        if manifest is None:
            if keys is not None:
                raise CheckpointError(
                    f"{path}: its weights are not encrypted, but a key is given; leave the key out "
                    "to serve them as they are"
                )
            names = sorted(file.name for file in path.glob("*.safetensors"))
            if not reads_weights and (stated := stated_digests(path)) is not None:
                return cls(path, config, {}, stated)
            if not reads_weights and not any(file.suffix in _WEIGHTS for file in path.iterdir()):
                raise CheckpointError(
                    f"{path}: it has neither weights nor {STATED_NAME}, the file that says which "
                    "weights the engines have; run `mooncake model digests DIR --out FOLDER` where "
                    "the weights are, and copy that file here"
                )
            return cls(
                path, config, _find_tensors(path, names, lambda name: PlainBytes(path / name))
            )
        if keys is not None:
            data_key = data_key_of(path, manifest, keys)
            homes = _find_tensors(
                path, sorted(manifest.files),
                lambda name: SealedBytes(path, name, manifest, data_key),
            )  # fmt: skip
        elif not reads_weights:
            homes = {}
        else:
            raise CheckpointError(
                f"{path}: its weights are encrypted; give the key (`weights-key-file`, "
                "`weights-key-command` or MOONCAKE_WEIGHTS_KEY), or a plain copy, which "
                "`mooncake model decrypt` writes"
            )
        return cls(path, config, homes, manifest.digests)

    @property
    def contents(self) -> list[FileBytes]:
        """The files that hold tensors, each once."""
        return [file.content for file in dict.fromkeys(file for file, _ in self.homes.values())]

    @classmethod
    def open_config(
        cls, path: Path, keys: KeyRing | None = None, *, reads_weights: bool = True
    ) -> CheckpointFiles:
        """Open a directory that may hold only `config.json`, which is enough for a plan.

        Raises:
            CheckpointError: there is no readable configuration, or there are weights that `open`
                refuses.
            ConfigError: there are weights, and these are not their keys.
        """
        if any(file.suffix in _WEIGHTS for file in path.iterdir()):
            return cls.open(path, keys, reads_weights=reads_weights)
        return cls(path, _read_json(path / "config.json"), {})

    @property
    def plain_contents(self) -> list[PlainBytes]:
        """The files that hold tensors, each once, if they are plain files of this machine; else
        none.
        """
        plain = [content for content in self.contents if isinstance(content, PlainBytes)]
        return plain if len(plain) == len(self.contents) else []

    def revision(self, cache_dir: Path | None = None, progress: Progress | None = None) -> str:
        """Return the name of these weights (see `revision.weights_revision`). Two checkpoints with
        one revision give the same KV, however they are stored. Plain weights that are not in
        `cache_dir` are hashed for it; encrypted ones were hashed when they were written.

        Raises:
            CheckpointError: the weights are not what the checkpoint states.
        """
        digests = self.stated
        if digests is None:
            digests = file_digests(self.plain_contents, cache_dir, progress)
            stated = stated_digests(self.path)
            if stated is not None and stated != digests:
                names = digests.keys() | stated.keys()
                wrong = min(name for name in names if stated.get(name) != digests.get(name))
                raise CheckpointError(
                    f"{self.path / wrong}: it is not what {STATED_NAME} says; fetch it again, or "
                    f"write {STATED_NAME} anew if you trust it (`mooncake model digests`)"
                )
        return weights_revision((self.path / "config.json").read_bytes(), digests)


def plain_weights(path: Path) -> list[PlainBytes]:
    """Return the files that hold tensors in the directory `path`; none if it has no weights, or
    encrypted ones.

    Raises:
        CheckpointError: they cannot be read.
    """
    if not has_weights(path) or read_manifest(path) is not None:
        return []
    return CheckpointFiles.open(path).plain_contents


def has_weights(path: Path) -> bool:
    """Return whether the directory `path` has files of weights, and not only an index of them."""
    return any(file.suffix in _SAFE for file in path.glob("*"))


def state_digests(path: Path, folder: Path) -> None:
    """Write `weights-digests.json` into `folder`, with the digests of the plain weights in `path`.
    Processes that read no weights identify them by it.

    Raises:
        CheckpointError: there are no weights, or they cannot be read.
    """
    stated = StatedDigests(files=file_digests(CheckpointFiles.open(path).plain_contents))
    (folder / STATED_NAME).write_bytes(msgspec.json.encode(stated))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing; copy the checkpoint whole") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return parsed


def _find_tensors(
    path: Path, names: Sequence[str], open_bytes: Callable[[str], FileBytes]
) -> Homes:
    """Return the home of each tensor in the files `names`, or in the files that an index lists."""
    if (path / INDEX_NAME).exists():
        index = _read_json(path / INDEX_NAME)
        indexed = _find_indexed(path, index, open_bytes)
        if WHOLE_NAME in {*names} - {*index["weight_map"].values()}:
            raise CheckpointError(
                f"{path}: both {WHOLE_NAME} and {INDEX_NAME}, which names other files, are there; "
                "remove the one that is not the model's"
            )
        return indexed
    homes: Homes = {}
    for file in (SafetensorsFile(open_bytes(name)) for name in names):
        for name in file.tensors:
            if name in homes:
                raise CheckpointError(
                    f"tensor {name} is both in {homes[name][0].path} and in {file.path}; remove "
                    "the file that is not the model's"
                )
            homes[name] = (file, name)
    if names:
        return homes
    pickled = sorted(file.name for end in _PICKLED for file in path.glob(f"*{end}"))
    if pickled:
        raise CheckpointError(
            f"{path}: only pickled weights ({pickled[0]}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise CheckpointError(
        f"{path}: no .safetensors file is there; give the directory that has the model's weights"
    )


def _find_indexed(
    path: Path, index: Mapping[str, Any], open_bytes: Callable[[str], FileBytes]
) -> Homes:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_NAME}: it has no weight_map; copy the file again")
    strange = [file for file in weight_map.values() if not isinstance(file, str)]
    # An index from elsewhere must not make us open files outside its directory.
    named = [] if strange else sorted(set(weight_map.values()))
    strange += [file for file in named if Path(file).name != file]
    if strange:
        raise CheckpointError(f"{path / INDEX_NAME}: {strange[0]!r} is not a plain file name")
    files = {name: SafetensorsFile(open_bytes(name)) for name in named}
    for name, file_name in weight_map.items():
        if name not in files[file_name].tensors:
            raise CheckpointError(
                f"{path / file_name}: it lacks {name}, which the index places there; copy the "
                "file again"
            )
    return {name: (files[file_name], name) for name, file_name in weight_map.items()}
