"""Asks the port of a Ray cluster whether it answers, and by TLS or in clear: Ray itself would go on
asking for minutes, and says less. Imports no ray.
"""

from __future__ import annotations

import os
import socket
import ssl

from mooncake.base import ConfigError, Unreachable
from mooncake.launch.host import environment

CONNECT_S = 10.0
"""Ray must answer within this time."""


def reach(address: str) -> None:
    """Raise ConfigError when `address` refuses connections, when only one of the two sides speaks
    TLS, or when one does not trust the other.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    files = environment.ray_tls(os.environ)
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S) as plain:
            if files is None:
                speaks = _speaks(plain)
            else:
                with _client_tls(files).wrap_socket(plain, server_hostname=host) as wrapped:
                    speaks = _speaks(wrapped)
    except ssl.SSLError as error:
        raise _distrust(address, error.reason or str(error)) from error
    except OSError as error:
        raise Unreachable(
            f"no Ray cluster at {address}: {error.strerror or error}; is Ray running there, and is "
            "this its address?"
        ) from error
    if not speaks and files is not None:
        raise _distrust(address, "it hung up")
    if not speaks:
        raise ConfigError(
            f"ray-address: Ray at {address} does not answer without TLS: set RAY_USE_TLS=1 and "
            "name certificates of its authority by RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and "
            "RAY_TLS_CA_CERT"
        )


def _distrust(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"ray-address: Ray at {address} and this machine do not trust each other's "
        f"certificates, or Ray speaks in clear there ({why})"
    )


def _client_tls(files: tuple[str, str, str]) -> ssl.SSLContext:
    certfile, keyfile, ca_certs = files
    context = ssl.create_default_context(cafile=ca_certs)
    context.load_cert_chain(certfile, keyfile, password="")
    context.set_alpn_protocols(["h2"])
    return context


def _speaks(connection: socket.socket) -> bool:
    """Return whether the other side sends anything. Ray speaks first, in clear or once TLS is
    agreed on. A server that asks for a client's certificate refuses it here, not in the handshake.
    """
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return False
