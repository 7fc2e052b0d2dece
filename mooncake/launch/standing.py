"""How a node of a pool that stands alone stands in it: the name it holds on this machine, and what
its log says of joining, waiting and leaving.

Owns a lock that the kernel takes back when the process ends, and a thread until the node has
joined.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
from concurrent.futures import CancelledError

from mooncake.base import ConfigError
from mooncake.launch.driver import Driver

LOOK_S = 0.05
PATIENCE_S = 5.0
"""A pool that has not answered for so long is worth a line in the log."""
REMIND_S = 60.0

_log = logging.getLogger(__name__)


def hold_name(worker_id: str, node_id: str, pool_address: str) -> socket.socket:
    """Hold the name of a node of one pool until the socket is closed, or the process has ended.

    A pool takes a second node of one name for the first one started again, and gives that up: on
    one machine, where both have its host name, that is a mistake of whoever starts the second.

    Raises:
        ConfigError: a process on this machine holds it.
    """
    host, _, port = pool_address.removeprefix("tcp://").rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        where = str(found[0][4])
    except OSError:
        where = pool_address
    digest = hashlib.sha256(f"{where} {worker_id}".encode()).hexdigest()
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0mooncake-pool-{digest}")
    except OSError as error:
        held.close()
        raise ConfigError(
            f"node-id: {node_id} of the pool at {pool_address} runs on this machine already; stop "
            "it first, or give this one a name, and a port, of its own: --node-id NAME "
            "--admin-port PORT"
        ) from error
    return held


class JoinWatch:
    """Says in the log that the node has joined, or that nobody answers. `close` it at the end."""

    def __init__(self, driver: Driver, worker_id: str, pool_address: str) -> None:
        self._driver = driver
        self._worker_id = worker_id
        self._pool_address = pool_address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="join-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say nothing more."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        num_looks, next_word = 0, round(PATIENCE_S / LOOK_S)
        while not self._ended.wait(LOOK_S):
            num_looks += 1
            try:
                if self._driver.call(lambda node, _: bool(node.joined)).result():
                    _log.info("%s has joined the pool at %s", self._worker_id, self._pool_address)
                    return
            except CancelledError:
                return
            if num_looks >= next_word:
                next_word += round(REMIND_S / LOOK_S)
                _log.warning(
                    "no answer from %s, still asking: is the pool there, with the same secret and "
                    "model? Where it is, its log says whom it does not take, and why",
                    self._pool_address,
                )
