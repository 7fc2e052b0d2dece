"""What the users of integrations say: which pool is used, what its use may cost, and whose weights
another engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

import msgspec

from mooncake.base import ConfigError
from mooncake.launch.host import environment
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import file_digests, weights_revision

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that is used, the tenant, and what the use may cost."""

    pool_urls: Annotated[list[str], msgspec.Meta(min_length=1)]
    """Admin addresses of pool nodes, such as `http://127.0.0.1:8100`: the nearest node first. The
    others are asked while it does not answer.
    """
    cluster_secret_file: str
    """A file with the pool's secret, or with a credential of the role `pool-client`."""
    tenant: str = ""
    """The tenant whose quota the blocks count against."""
    namespace: str = ""
    """Engines share blocks only with engines of the same namespace."""
    staging_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 * 2**20
    """Memory of each rank through which blocks are copied, half for each direction."""
    lookup_timeout_s: _Seconds = 0.5
    """A prompt whose prefix is not found within this time counts as a miss."""
    load_timeout_s: _Seconds = 5.0
    """Blocks that have not arrived within this time are computed."""

    @classmethod
    def read(cls, given: Mapping[str, object], place: str) -> Self:
        """Return the settings that were given at a place. Raises a ConfigError that names the place
        and a wrong key.
        """
        try:
            return msgspec.convert(dict(given), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{place}: {error}") from error


KEY = "mooncake"
"""The key in the extra configuration of SGLang and LMCache that has the settings: other keys are
theirs.
"""


class BackendSettings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that is used, whose blocks are shared, and what the use may cost."""

    model: str = ""
    """The directory of the model's files, or its repository. Empty: what the engine calls the
    model.
    """
    revision: str = ""
    """The commit of the model's repository, where the engine downloads it."""

    @classmethod
    def of_extra(cls, extra_config: Mapping[str, object] | None, place: str) -> BackendSettings:
        """Return the settings in an engine's extra configuration, which was given at a place.
        Raises a ConfigError that names the place and a wrong key.
        """
        given = (extra_config or {}).get(KEY)
        if not isinstance(given, Mapping):
            raise ConfigError(
                f'{place}: give an object "{KEY}" with the pool\'s settings (pool_urls, '
                "cluster_secret_file)"
            )
        return cls.read(given, f"{place}: {KEY}")


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_name(model: str, commit: str | None, load_format: str) -> str:
    """Return the name of the weights of `model`, as it was given to vLLM: it is equal only for
    equal bytes. The files of a directory are hashed completely, once: their digests are kept in
    this user's cache.

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
