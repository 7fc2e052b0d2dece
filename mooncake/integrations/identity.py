"""Names the weights that another engine runs: the name is equal only for equal bytes."""

from __future__ import annotations

from pathlib import Path

from mooncake.base import ConfigError
from mooncake.launch.host import environment
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import file_digests, weights_revision

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_name(model: str, commit: str | None, load_format: str) -> str:
    """Return the name of the weights of `model`, as it was given to vLLM. The files of a directory
    are hashed completely, once: their digests are kept in this user's cache.

    Args:
        model: a directory, a file, or the name of a repository.
        commit: the commit of the repository that was downloaded.
        load_format: vLLM's `--load-format`; empty for other engines.

    Raises:
        ConfigError: nothing identifies these weights.
        CheckpointError: a file cannot be read.
    """
    path = Path(model)
    if load_format == "dummy":
        raise ConfigError(
            "load-format: dummy weights have no revision, so their KV cannot be shared; load "
            "the model's own"
        )
    if path.is_dir() or path.is_file():
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [PlainBytes(file) for file in found if file.suffix in WEIGHTS]
        if not files:
            raise ConfigError(f"model: {model} has no weights ({', '.join(WEIGHTS)})")
        return weights_revision(b"", file_digests(files, environment.cache_dir()))
    if not commit:
        raise ConfigError(
            f"model: the revision of {model} is unknown; give the engine the directory of its "
            "files, or a commit as the revision"
        )
    return f"{model}@{commit}"
