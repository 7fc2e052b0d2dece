"""Lets a machine compute stages of engines that other machines lead: `mooncake ranks`.

It listens for leads of the cluster. Each connection asks for one follower, a child of this process,
and is the link to it. When one of the two ends, the other ends too. Owns listener, children and
links.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import msgspec

from mooncake.base import ConfigError, MooncakeError, Unavailable
from mooncake.identity.credential import Credential
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.ranks.far_ranks import HOSTS_NAME, RankWanted
from mooncake.launch.worker.ranks.rank_processes import start_follower
from mooncake.launch.worker.ranks.sealed_link import SealedLink
from mooncake.model.options import ModelOptions
from mooncake.telemetry.audit import audit

MAX_RANKS = 64
MAX_UNPROVEN = 64
"""Connections that have not proven themselves yet. They take no rank's place; when there are more,
the oldest is closed. A lead proves itself within milliseconds.
"""
_log = logging.getLogger(__name__)


class RankHost:
    """Runs ranks of other machines' engines on this one."""

    def __init__(self, host: str, port: int, credential: Credential) -> None:
        """Listen at `host`, where these ranks listen too. Raises ConfigError if that is not
        possible.
        """
        self._host = host
        self._credential = credential
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"bind-host: cannot listen at {host}:{port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._places = threading.BoundedSemaphore(MAX_RANKS)
        self._gpus = machine_facts.seen_gpus()
        """Those that no rank has; a rank gets one alone."""
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, str] = {}
        """The origin of each connection, the oldest first."""

    def run(self) -> None:
        """Start a follower for each lead that comes, until `close`."""
        while True:
            try:
                sock, whence = self._listener.accept()
            except OSError:
                return
            self._admit(sock, whence[0])
            threading.Thread(target=self._serve, args=(sock, whence[0]), daemon=True).start()

    def _admit(self, sock: socket.socket, whence: str) -> None:
        """Have a connection prove itself. If too many are doing so, close the oldest."""
        with self._lock:
            self._unproven[sock] = whence
            if len(self._unproven) <= MAX_UNPROVEN:
                return
            oldest = next(iter(self._unproven))
            from_oldest = self._unproven.pop(oldest)
            with contextlib.suppress(OSError):  # its thread closes it
                oldest.shutdown(socket.SHUT_RDWR)
        _log.warning(
            "the connection from %s was closed: %d others have not proven who they are",
            from_oldest,
            MAX_UNPROVEN,
        )

    def close(self) -> None:
        """Stop listening. Ranks end with this process."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def finish(self, limit_s: float) -> None:
        """Wait until all leads have gone, for `limit_s` at most. Call it after `run`."""
        end_s = time.monotonic() + limit_s
        for _ in range(MAX_RANKS):
            if not self._places.acquire(timeout=max(0.0, end_s - time.monotonic())):
                _log.warning("ranks still compute after %.0f s; they end now", limit_s)
                return

    def _serve(self, sock: socket.socket, whence: str) -> None:
        """Start a follower for the lead that has connected, and relay between the two until one has
        ended.
        """
        try:
            with sock:
                try:
                    link = SealedLink.accept(sock, self._credential, HOSTS_NAME)
                except EOFError:  # a probe
                    return
                except MooncakeError as error:
                    audit("proof_failed", proof="rank", whence=whence, reason=error.message)
                    raise
                finally:
                    with self._lock:
                        self._unproven.pop(sock, None)
                if not self._places.acquire(blocking=False):
                    raise Unavailable(f"{MAX_RANKS} ranks already run here, which is the limit")
                try:
                    self._follow(link, whence)
                finally:
                    self._places.release()
        except (OSError, MooncakeError, msgspec.MsgspecError) as error:
            _log.warning("no rank is started for %s: %s", whence, error)

    def _follow(self, link: SealedLink, whence: str) -> None:
        """Run the follower of a proven lead for as long as both live."""
        if not (first := link.receive()):  # a greeting
            return
        wanted = msgspec.msgpack.decode(first, type=RankWanted)
        far = self._host, repr(time.monotonic() - wanted.sent_s)
        with self._one_gpu() if wanted.on_gpu else contextlib.nullcontext() as gpu:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    key = ModelOptions().weights_key
                    child = start_follower(theirs.fileno(), (), key, far, gpu)
                _log.info("rank %d follows a lead at %s", child.pid, whence)
                try:
                    link.relay(ours)
                finally:
                    child.kill()
                    child.wait()
            _log.info("rank %d has ended", child.pid)

    @contextlib.contextmanager
    def _one_gpu(self) -> Iterator[str]:
        """Lend a GPU that no rank has. Raises Unavailable: there is none."""
        with self._lock:
            if not self._gpus:
                raise Unavailable("no GPU of this machine is free for a rank")
            gpu = self._gpus.pop(0)
        try:
            yield gpu
        finally:
            with self._lock:
                self._gpus.append(gpu)
