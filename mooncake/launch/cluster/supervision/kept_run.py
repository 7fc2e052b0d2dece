"""The name by which the next start of the same `mooncake serve` finds the workers that this one
leaves behind when it is killed.

Owns a lock, so that two that run do not share a name, and the file of the secret.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from mooncake.launch.cluster.supervision.worker_handle import running
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.secrets.credentials import private_dir, read_secret


class KeptRun:
    """Names the workers of one `mooncake serve`. `close` it when they have ended."""

    def __init__(self, config: ServeConfig) -> None:
        """Take the name. There is none where nobody could take it again, another one has it, or
        workers are not to wait.
        """
        self.name = ""
        self._lock: int | None = None
        place = _place(config)
        if not place or not config.orphan_timeout:
            return
        name = hashlib.sha256(place.encode()).hexdigest()[:16]
        self._file = private_dir() / f"run-{name}"
        lock = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had the name may have removed the file meanwhile; another process then makes it.
            is_here = self._file.stat().st_ino == os.fstat(lock).st_ino
        except OSError:
            is_here = False
        if not is_here:
            os.close(lock)
            return
        self.name, self._lock = name, lock

    @property
    def secret_file(self) -> Path | None:
        """The file in which workers find the cluster secret, if there is a name."""
        return self._file.with_suffix(".secret") if self.name else None

    def secret(self) -> str | None:
        """Return the secret of the workers that were left behind, if any were."""
        if self.secret_file is None or not self.secret_file.exists():
            return None
        return read_secret(self.secret_file)

    def has_workers(self, worker_ids: Iterable[str]) -> bool:
        """Return whether one of these workers was left behind on this machine and still runs."""
        return bool(self.name and running(self.name, worker_ids))

    def close(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
            os.close(self._lock)
            self._lock, self.name = None, ""


def _place(config: ServeConfig) -> str:
    """Return what is the same for each start of a command, and for no two that run; empty: nothing
    is.
    """
    if config.colocated or config.role is not None:
        return ""
    place = f"{config.host}:{config.port}" if config.port else ""
    if config.headless:
        model = Path(config.model).resolve()
        place = f"headless {model} at {config.bind_host}, health {config.health_port}"
    if place and config.ray_address is not None:  # its workers may be on other machines
        place += f" of {machine_facts.host_name()}, by Ray at {config.ray_address}"
    return place
