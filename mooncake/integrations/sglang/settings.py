"""The user's settings for the HiCache backend. Values only."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake.base import ConfigError
from mooncake.integrations.settings import PoolSettings

KEY = "mooncake"
"""The key in SGLang's `--hicache-storage-backend-extra-config` that has the settings: other keys
are SGLang's.
"""


class BackendSettings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that is used, whose blocks are shared, and what the use may cost."""

    model: str = ""
    """The directory of the model's files, or its repository. Empty: what SGLang calls the model."""
    revision: str = ""
    """The commit of the model's repository, where SGLang downloads it."""

    @classmethod
    def of_sglang(cls, extra_config: Mapping[str, object] | None) -> BackendSettings:
        """Return the settings in SGLang's extra configuration. Raises a ConfigError that names a
        wrong key.
        """
        given = (extra_config or {}).get(KEY)
        if not isinstance(given, Mapping):
            raise ConfigError(
                f'hicache-storage-backend-extra-config: give an object "{KEY}" with the pool\'s '
                "settings (pool_urls, cluster_secret_file)"
            )
        return cls.read(given, f"hicache-storage-backend-extra-config: {KEY}")
