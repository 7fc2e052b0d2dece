"""One thread's connection to the pool: a session that is opened when it is first needed, and again
after a failure. After a failure it waits before it tries again, so a pool that is down costs an
engine no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from mooncake.base import MooncakeError, Unavailable
from mooncake.integrations.settings import PoolSettings
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.launch.pool_client.session import PoolSession, locate

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LOCATE_S = 2.0
"""A pool node that has not said by then where the pool is counts as down."""

T = TypeVar("T")


class PoolLink:
    """The pool, or the error while it is away. Only one thread may use it."""

    def __init__(
        self,
        settings: PoolSettings,
        timeout_s: float,
        logger: logging.Logger,
        memory_bytes: int = 0,
    ) -> None:
        """`timeout_s` bounds each call. `logger` is below the engine's, so that the engine's log
        settings apply. A session has `memory_bytes` of memory of its own, and room for one block at
        least.
        """
        self._settings = settings
        self._logger = logger
        self._memory_bytes = memory_bytes
        self._timeout_s = timeout_s
        self._session: PoolSession | None = None
        self._pause_s = 0.0
        self._retry_s = float("-inf")

    def call(self, work: Callable[[PoolSession], T]) -> T:
        """Return the result of `work` with a session. Raises MooncakeError when the pool fails, and
        for a while afterwards.
        """
        if time.monotonic() < self._retry_s:
            raise Unavailable("the pool failed a moment ago")
        try:
            if self._session is None:
                self._session = self._open()
            answer = work(self._session)
        except MooncakeError as error:
            self._failed(error)
            raise
        if self._pause_s:
            self._logger.warning("the pool is used again")
        self._pause_s = 0.0
        return answer

    def close(self) -> None:
        """End the session. Nothing touches its memory any more."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _open(self) -> PoolSession:
        errors = []
        for url in self._settings.pool_urls:
            try:
                secret = read_secret(Path(self._settings.cluster_secret_file))
                config = locate(url, secret, timeout_s=LOCATE_S)
                config = msgspec.structs.replace(
                    config,
                    num_places=max(1, self._memory_bytes // config.layout.block_bytes),
                    timeout_s=self._timeout_s,
                )
                session = PoolSession(config)
            except MooncakeError as error:
                errors.append(error.message)
                continue
            self._logger.info("prefixes are shared through the pool at %s", url)
            return session
        raise Unavailable("; ".join(errors))

    def _failed(self, error: MooncakeError) -> None:
        if not self._pause_s:
            self._logger.warning("the pool fails, so prefixes are computed: %s", error.message)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._retry_s = time.monotonic() + self._pause_s
        self.close()
