"""Follows the file of the cluster secret: a new secret is used within seconds, without a
restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from mooncake.base import ConfigError, MooncakeError
from mooncake.base.threads import VitalThread
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.telemetry.audit import audit

LOOK_S = 2.0
"""Seconds between two reads of the file. New contents are used once two reads agree, because a file
that is being written may be incomplete.
"""

SECRET_FILE = "MOONCAKE_CLUSTER_SECRET_FILE"
"""The variable that names the file of the cluster secret, or of a credential."""
_log = logging.getLogger(__name__)


class SecretFollower:
    """Reads a file again and again, in its own thread, until closed."""

    def __init__(
        self, file: Path | str | None, use: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        """Call `use` with the contents whenever they have changed. `use` may raise MooncakeError,
        which is logged. Without a file there is nothing to follow.
        """
        self._use = use
        self._look_s = look_s
        self._stop = threading.Event()
        if file is not None:
            VitalThread(self._follow, "cluster secret", Path(file), _read(Path(file))).start()

    def close(self) -> None:
        """End it. From any thread, any number of times."""
        self._stop.set()

    def _follow(self, file: Path, known: str | None) -> None:
        before = known
        while not self._stop.wait(self._look_s):
            found = _read(file)
            settled, before = found == before, found
            if not settled or found is None or found == known:
                continue
            known = found
            try:
                self._use(found)
            except MooncakeError as error:
                _log.error("the cluster secret stays as it was: %s", error.message)
                audit("secret_refused", file=str(file), reason=error.message)
            else:
                _log.info("cluster-secret-file: %s has been read again and is used now", file)
                audit("secret_read", file=str(file))


def _read(file: Path) -> str | None:
    try:
        return read_secret(file)
    except ConfigError:  # it is just being replaced, or gone: the secret stays as it was
        return None
