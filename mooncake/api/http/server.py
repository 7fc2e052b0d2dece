"""Serves the application with uvicorn inside a running event loop, and shuts it down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette

from mooncake.api.config import ApiConfig
from mooncake.api.http.connection import limited_protocol
from mooncake.api.running_calls import Serving
from mooncake.base import ConfigError, Unavailable
from mooncake.base.tls_files import TlsFiles

_log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
START_POLL_S = 0.01
GRACE_S = 2.0
"""Seconds after the drain time in which the last events may still be sent."""
MAX_SHAKING = 512
"""TLS handshakes at a time. When there are more, the connection whose handshake began first is
closed. So a flood of connections that say nothing takes no client's place: a client shakes hands
within milliseconds.
"""
REST_S = 0.5
"""When descriptors run out, no connection is accepted for this long."""
OTHER_FILES = 2048
"""Descriptors for all but connections of clients: sockets to workers, files, libraries."""
RENEWAL_S = 2.0
"""Seconds between two looks at the files of a certificate."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher handles signals."""

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection. Call it once the server has started."""
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ApiConfig) -> socket.socket:
    """Return a listening socket for `config`.

    Raises:
        ConfigError: the address is taken or is not this machine's, or a TLS file is wrong.
    """
    if config.tls is not None:
        config.tls.context()
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


def fitted(config: ApiConfig) -> ApiConfig:
    """Return `config` with no more connections than this process has descriptors for: without a
    free one it could accept no client, whatever gives way. The process' own limit is raised first,
    as far as it may be; often it is 1,024.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + OTHER_FILES
    if not 0 <= limit < wanted:  # negative: there is no limit
        return config
    limit = wanted if most < 0 else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    if limit == wanted:
        return config
    fits = max(1, min(config.max_connections, max(limit - OTHER_FILES, limit // 2)))
    _log.warning(
        "only %d connections are kept open, not %d (`max-connections`): this process may open %d "
        "files (ulimit -n)", fits, config.max_connections, limit,
    )  # fmt: skip
    return replace(config, max_connections=fits)


def _tls_settings(tls: TlsFiles | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": tls.ca_certs,
        "ssl_cert_reqs": tls.verify_mode,
    }


async def _renew(tls: TlsFiles, context: ssl.SSLContext) -> None:
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
            tls.context()
            context.load_cert_chain(tls.certfile, tls.keyfile, password="")
        except (ConfigError, OSError) as error:
            _log.error("the new certificate is not used, and the old one stays: %s", error)
        else:
            _log.info("ssl-certfile: the certificate was read again from %s", tls.certfile)


def _looks(tls: TlsFiles) -> list[tuple[int, ...]]:
    """Return what changes when the files, or the links that lead to them, change."""
    found: list[tuple[int, ...]] = []
    for path in (tls.certfile, tls.keyfile or tls.certfile):
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found


class _TlsDoor:
    """Accepts connections and shakes hands with them: until then uvicorn and our limits do not know
    them. A handshake has as long as the headers of a request.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.BaseProtocol],
        limit_s: float,
    ) -> None:
        """`make` returns the protocol of a new connection."""
        self._listener = listener
        self._context = context
        self._make = make
        self._limit_s = limit_s
        self._shaking: dict[asyncio.Task[None], None] = {}
        """The handshakes under way, the oldest first."""

    async def open(self) -> None:
        """Accept connections until cancelled; that ends the handshakes under way, too."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    _log.warning("cannot accept a connection: %s", error)
                    await asyncio.sleep(REST_S)
                    continue
                shaking = asyncio.create_task(self._shake_hands(accepted))
                self._shaking[shaking] = None
                shaking.add_done_callback(partial(self._ended, accepted))
                if len(self._shaking) > MAX_SHAKING:
                    _log.warning(
                        "a connection was closed: %d others are in their TLS handshake",
                        MAX_SHAKING,
                    )
                    oldest = next(iter(self._shaking))
                    del self._shaking[oldest]
                    oldest.cancel()
                await asyncio.sleep(0)  # others' turn: with a connection there, nothing above waits
        finally:
            for shaking in self._shaking:
                shaking.cancel()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._limit_s,
            )
        except OSError as error:  # those of TLS are some, too
            _log.debug("a TLS handshake failed: %s", error)
            accepted.close()

    def _ended(self, accepted: socket.socket, shaking: asyncio.Task[None]) -> None:
        self._shaking.pop(shaking, None)
        if shaking.cancelled():
            accepted.close()  # it may not have begun


async def serve(
    app: Starlette,
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
    serving: Serving = app.state.api_server
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
        http=limited_protocol(fitted(config)),
        **_tls_settings(config.tls),
    )
    settings.load()
    server = _Server(settings)
    is_tls = config.tls is not None and settings.ssl is not None
    running = asyncio.create_task(server.serve(sockets=[] if is_tls else [listener]))
    stopping = asyncio.create_task(stop.wait())
    aside = [asyncio.create_task(app.state.watch_loop())]
    accepting: set[asyncio.Task[None]] = set()
    batches = app.state.batches
    running_batches = None if batches is None else asyncio.create_task(batches.runner.run())
    try:
        while not server.started and not running.done():
            await asyncio.sleep(START_POLL_S)
        if config.tls is not None and settings.ssl is not None:
            door = _TlsDoor(listener, settings.ssl, server.protocol, config.header_timeout_s)
            accepting.add(asyncio.create_task(door.open()))
            aside.append(asyncio.create_task(_renew(config.tls, settings.ssl)))
        if ready is not None and server.started:
            host, port = listener.getsockname()[:2]
            ready(host, port)
        await asyncio.wait({running, stopping, *accepting}, return_when=asyncio.FIRST_COMPLETED)
        serving.drain()
        end_s = asyncio.get_running_loop().time() + config.drain_s
        await serving.calls_ended(config.drain_s)
        for plain in server.servers:  # at once, not at the server's next look around
            plain.close()
        for each in accepting:
            each.cancel()
        server.should_exit = True
        left_s = max(0.0, end_s - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait({running}, timeout=left_s)
        if not done:
            _log.warning("ending %d calls that did not finish in time", serving.num_calls)
            serving.fail_all(Unavailable("the server is shutting down", retry_after_s=1.0))
        await running
    finally:
        for each in (stopping, *accepting, *aside):
            each.cancel()
        await asyncio.gather(*aside, return_exceptions=True)
        for end in await asyncio.gather(*accepting, return_exceptions=True):
            if isinstance(end, Exception):
                _log.error("the API server accepts no connections any more", exc_info=end)
        if not running.done():
            running.cancel()
        listener.close()
        if running_batches is not None:
            running_batches.cancel()
            await asyncio.gather(running_batches, return_exceptions=True)
            await batches.close()
        serving.close()
