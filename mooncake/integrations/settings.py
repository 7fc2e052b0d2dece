"""The settings that all integrations have: which pool is used, and what its use may cost. Values
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

import msgspec

from mooncake.base import ConfigError

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
