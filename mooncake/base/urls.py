"""URLs of servers, as people write them. Pure."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from mooncake.base.errors import ConfigError


class ServerUrl(NamedTuple):
    """Where a server is."""

    is_tls: bool
    host: str
    port: int
    netloc: str
    """The host, and the port if it was named, as they were written."""
    prefix: str
    """The path before all paths of the server, without a slash at its end."""


def server_url(setting: str, url: str, schemes: tuple[str, ...] = ("http", "https")) -> ServerUrl:
    """Read the URL of a server.

    Raises:
        ConfigError: it is none; the message names the setting.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{setting}: {url!r} is not a URL of a server: {error}") from error
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        example = f"{schemes[0]}://127.0.0.1:8000"
        raise ConfigError(f"{setting}: {url!r} is not a URL of a server; write it like {example}")
    is_tls = parts.scheme == "https"
    netloc = parts.netloc.rpartition("@")[2]
    port = port or (443 if is_tls else 80)
    return ServerUrl(is_tls, parts.hostname, port, netloc, parts.path.rstrip("/"))
