"""What settings, handshakes and peers name: endpoints ("host:port", or "@name" and "/path" for a
socket that only processes of this host can reach), peers, and protections of bytes.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from typing import NamedTuple

from mooncake.base.errors import ConfigError


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return (host, port) of "host:port" or "[v6]:port". Raises ConfigError."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"{endpoint!r} is not a TCP endpoint; it looks like 10.0.0.7:4301")
    return host.strip("[]"), int(port)


Address = tuple[str, int] | str
"""An address in the form that sockets take."""


def address_of(endpoint: str) -> Address:
    """Return the address of an endpoint. Raises ConfigError."""
    if endpoint.startswith("/"):
        return endpoint
    return "\0" + endpoint[1:] if endpoint.startswith("@") else parse_endpoint(endpoint)


def new_stream(address: Address) -> socket.socket:
    """Return a stream socket that can be connected to an address. Raises OSError."""
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX)
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)


@dataclass(frozen=True)
class ListenAddress:
    """The address at which an engine listens, and the host under which peers reach it."""

    bind_host: str = "127.0.0.1"
    advertise_host: str | None = None
    """The numeric address to which peers connect, if it is not `bind_host`."""
    ports: tuple[int, int] | None = None
    """First and last port to try; the first free one is used. None: any free port."""

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this machine reach it; False for names, which may mean any."""
        try:
            hosts = [ip_address(host) for host in (self.bind_host, self.advertise_host) if host]
        except ValueError:
            return False
        return all(host.is_loopback for host in hosts)

    def endpoint(self, port: int) -> str:
        """Return the endpoint that peers connect to."""
        host = self.advertise_host or self.bind_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class PeerKey(NamedTuple):
    """Names one peer of one protocol. An engine that restarts has another id, so it is another
    peer.
    """

    endpoint: str
    engine_id: str


class Protection(Enum):
    """How the bytes of a connection are protected on their way, weakest first."""

    NONE = "none"
    MAC = "mac"
    """Bytes cannot be changed unnoticed: a tag follows each message."""
    ENCRYPT = "encrypt"
    """Payloads cannot be read either."""

    def is_weaker(self, other: Protection) -> bool:
        """Return whether `other` protects from more."""
        order = list(Protection)
        return order.index(self) < order.index(other)


PROTECTIONS = tuple(each.value for each in Protection)
