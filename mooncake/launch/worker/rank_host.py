"""A machine that computes stages of engines which other machines lead: `mooncake ranks`.

It listens for leads of the cluster. Each connection asks for one follower, a child of this process,
and is its link; whichever of the two ends, the other does. Owns listener, children and links.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

import msgspec

from mooncake.base import ConfigError, MooncakeError
from mooncake.identity import Credential
from mooncake.launch.worker.far_ranks import HOSTS_NAME, RankWanted
from mooncake.launch.worker.rank_processes import start_follower
from mooncake.launch.worker.sealed_link import SealedLink
from mooncake.model.options import ModelOptions

MAX_RANKS = 64
_log = logging.getLogger(__name__)


class RankHost:
    """The ranks of other machines' engines that run on this one."""

    def __init__(self, host: str, port: int, credential: Credential) -> None:
        """Listen at `host`, where these ranks listen, too. ConfigError: it cannot."""
        self._host = host
        self._credential = credential
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(f"bind-host: cannot listen at {host}:{port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._places = threading.BoundedSemaphore(MAX_RANKS)

    def run(self) -> None:
        """Start a follower for each lead that comes, until `close`."""
        while True:
            try:
                sock, whence = self._listener.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                sock.close()
                _log.warning("%s asked for a rank, and there are %d", whence[0], MAX_RANKS)
                continue
            threading.Thread(target=self._serve, args=(sock, whence[0]), daemon=True).start()

    def close(self) -> None:
        """Listen no more; ranks end with this process."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, sock: socket.socket, whence: str) -> None:
        """Start a follower for who has connected, and be between the two until one has ended."""
        try:
            with sock:
                link = SealedLink.accept(sock, self._credential, HOSTS_NAME)
                wanted = msgspec.msgpack.decode(link.receive(), type=RankWanted)
                ours, theirs = socket.socketpair()
                ahead_s = time.monotonic() - wanted.sent_s
                with theirs:
                    far = self._host, repr(ahead_s)
                    child = start_follower(theirs.fileno(), (), ModelOptions().weights_key, far)
                _log.info("rank %d follows a lead at %s", child.pid, whence)
                try:
                    link.relay(ours)
                finally:
                    child.kill()
                    child.wait()
                _log.info("rank %d has ended", child.pid)
        except (OSError, EOFError, MooncakeError, msgspec.MsgspecError) as error:
            _log.warning("%s asked for a rank in vain: %s", whence, error)
        finally:
            self._places.release()
