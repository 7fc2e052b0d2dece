"""The name that a pool node locks on its machine, and the log lines about joining its pool.

The kernel frees the lock when the process ends; a thread watches until the node has joined.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

from mooncake.base import ConfigError, Forbidden, MooncakeError
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.processes.abstract_name import foreign_holder

LOOK_S = 0.05
WARN_AFTER_S = 5.0
"""After this time without an answer a warning is logged, and again every `REMIND_S`."""
REMIND_S = 60.0

_log = logging.getLogger(__name__)


def lock_name(worker_id: str, node_id: str, pool_address: str) -> socket.socket:
    """Lock the name of a node of one pool until the socket is closed or the process has ended.

    If a second node has the same name, the pool assumes that the first was restarted, and gives the
    first up. On one machine both have the same host name, so starting a second one there is a
    mistake.

    Raises:
        ConfigError: another process on this machine has locked the name.
    """
    place = pool_address.removeprefix("tcp://").partition("#")[0]  # a key may follow it
    host, _, port = place.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        where = str(found[0][4])
    except OSError:
        where = place
    digest = hashlib.sha256(f"{where} {worker_id}".encode()).hexdigest()
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0mooncake-pool-{digest}"
    try:
        held.bind(name)
        held.listen()  # so that others can ask the kernel who holds it
    except OSError as error:
        held.close()
        if (holder := foreign_holder(name, socket.SOCK_STREAM)) is not None:
            raise ConfigError(
                f"node-id: {holder} holds the name of node {node_id} of the pool at {pool_address} "
                "on this machine; end that process, or take another --node-id"
            ) from error
        raise ConfigError(
            f"node-id: {node_id} of the pool at {pool_address} runs on this machine already; stop "
            "it first, or give this one a name, and a port, of its own: --node-id NAME "
            "--admin-port PORT"
        ) from error
    return held


class JoinWatch:
    """Logs that the node has joined, or why the pool does not let it in. It stops the node where
    that is because the pool has another secret or other blocks. Close it at the end.
    """

    def __init__(
        self,
        driver: Driver,
        worker_id: str,
        pool_address: str,
        why_silent: Callable[[], MooncakeError],
        limit_s: float,
    ) -> None:
        """`why_silent` looks for the pool and returns why it does not let the node in: Forbidden
        and ConfigError stop the node, but not before `limit_s`.
        """
        self.refusal: Forbidden | ConfigError | None = None
        """Why the node was stopped."""
        self._driver = driver
        self._worker_id = worker_id
        self._pool_address = pool_address
        self._why_silent = why_silent
        self._limit = round(max(limit_s, WARN_AFTER_S) / LOOK_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="join-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        num_looks, next_question = 0, round(WARN_AFTER_S / LOOK_S)
        refusal: Forbidden | ConfigError | None = None
        while not self._ended.wait(LOOK_S):
            try:
                joined = self._driver.call(lambda node, _: bool(node.joined)).result()
            except CancelledError:
                return
            if joined:
                _log.info("%s has joined the pool at %s", self._worker_id, self._pool_address)
                return
            if refusal is not None:
                self.refusal = refusal
                self._driver.stop()
                return
            num_looks += 1
            if num_looks < next_question:
                continue
            problem = self._why_silent()
            if isinstance(problem, Forbidden | ConfigError) and num_looks >= self._limit:
                refusal = problem
                continue
            _log.warning(
                "%s; still asking. The log of the pool says which nodes it refuses, and why",
                problem.message,
            )
            later = num_looks + round(REMIND_S / LOOK_S)
            next_question = min(later, self._limit) if num_looks < self._limit else later
