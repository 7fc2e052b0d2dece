"""Serves the application with uvicorn inside a running event loop, and shuts it down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from mooncake.api.api_server import ApiServer
from mooncake.api.config import ApiConfig, TlsConfig
from mooncake.api.http.connection import limited_protocol
from mooncake.base import ConfigError, Unavailable

_log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
START_POLL_S = 0.01
GRACE_S = 2.0
"""Seconds after the drain time in which the last events may still be sent."""
RENEWAL_S = 2.0
"""Seconds between two looks at the files of a certificate."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ApiConfig) -> socket.socket:
    """Return a listening socket for `config`.

    Raises:
        ConfigError: the address is taken or is not this machine's, or a TLS file is wrong.
    """
    if config.tls is not None:
        check_tls(config.tls)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (config.host, config.port), family=family, backlog=LISTEN_BACKLOG
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
            "choose another `port`"
        ) from error
    # Connections inherit it. asyncio would set it itself only where the listener names its
    # protocol; without it a head and the event after it are 40 ms apart (delayed ACKs).
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def check_tls(tls: TlsConfig) -> None:
    """Read the files once, so that a mistake is found before anything starts.

    Raises:
        ConfigError: a file is missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password is for a key that needs one: reading it must fail rather than ask here.
        context.load_cert_chain(tls.certfile, tls.keyfile, password="")
        if tls.ca_certs is not None:
            context.load_verify_locations(tls.ca_certs)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (tls.certfile, tls.keyfile, tls.ca_certs)))
        raise ConfigError(f"TLS cannot be set up with {files}: {error}") from error


def _tls_settings(tls: TlsConfig | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": tls.ca_certs,
        "ssl_cert_reqs": tls.cert_reqs,
    }


async def _renew(tls: TlsConfig, context: ssl.SSLContext) -> None:
    """Use a new certificate for new connections once its file has changed. A certificate that
    cannot be used is logged once. Runs until cancelled.
    """
    seen = _looks(tls)
    while True:
        await asyncio.sleep(RENEWAL_S)
        if (looks := _looks(tls)) == seen:
            continue
        seen = looks
        try:
            check_tls(tls)
            context.load_cert_chain(tls.certfile, tls.keyfile, password="")
        except (ConfigError, OSError) as error:
            _log.error("the certificate stays as it was: %s", error)
        else:
            _log.info("ssl-certfile: read again from %s", tls.certfile)


def _looks(tls: TlsConfig) -> list[tuple[int, ...]]:
    """Return what changes when the files, or the links that lead to them, change."""
    found: list[tuple[int, ...]] = []
    for path in (tls.certfile, tls.keyfile or tls.certfile):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found


async def serve(
    app: FastAPI,
    config: ApiConfig,
    *,
    stop: asyncio.Event,
    ready: Callable[[str, int], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serve `app` until `stop` is set, then drain.

    `ready` is called with host and port once connections are accepted. After `stop`, running calls
    have `config.drain_s` to finish; the rest then end with a 503 error. Meanwhile connections are
    still accepted, and new calls are refused with 503, because load balancers notice only after a
    while.
    """
    api_server: ApiServer = app.state.api_server
    listener = listener or bind(config)
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,  # `AccessLog` does it, in our own format
        lifespan="off",
        ws="none",
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=int(config.drain_s + GRACE_S) + 1,
        server_header=False,
        http=limited_protocol(config),
        **_tls_settings(config.tls),
    )
    settings.load()
    server = _Server(settings)
    renewing: asyncio.Task[None] | None = None
    if config.tls is not None and settings.ssl is not None:
        renewing = asyncio.create_task(_renew(config.tls, settings.ssl))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(app.state.watch_loop())
    try:
        while not server.started and not running.done():
            await asyncio.sleep(START_POLL_S)
        if ready is not None and server.started:
            host, port = listener.getsockname()[:2]
            ready(host, port)
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        api_server.drain()
        end_s = asyncio.get_running_loop().time() + config.drain_s
        await api_server.calls_ended(config.drain_s)
        for accepting in server.servers:  # at once, not at the server's next look around
            accepting.close()
        server.should_exit = True
        left_s = max(0.0, end_s - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait({running}, timeout=left_s)
        if not done:
            _log.warning("ending %d calls that did not finish in time", api_server.num_calls)
            api_server.fail_all(Unavailable("the server is shutting down", retry_after_s=1.0))
        await running
    finally:
        stopping.cancel()
        watching.cancel()
        if renewing is not None:
            renewing.cancel()
        if not running.done():
            running.cancel()
        listener.close()
        api_server.close()
