"""Follows a file of secrets, such as the cluster secret or API keys: what is new in it is used
within seconds, without a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
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

    stays = "the cluster secret stays as it was"
    """Why a refusal does no harm, for the log."""
    kind = "secret"
    """What the audit log calls it."""
    named = "cluster-secret-file"

    def __init__(
        self,
        file: Path | str | None,
        use: Callable[[str], Sequence[str] | None],
        look_s: float = LOOK_S,
    ) -> None:
        """Call `use` with the contents whenever they have changed. `use` may raise MooncakeError,
        which is logged, and may return the names in them for the audit log. There is nothing to
        follow if no file is named.
        """
        self._use = use
        self._look_s = look_s
        self._wake = threading.Event()
        self._is_asked = self._is_closed = False
        if file is not None:
            VitalThread(self._follow, self.named, Path(file), self.read(Path(file))).start()

    def read(self, file: Path) -> str | None:
        """Return the contents, or None if they do not count now."""
        return _read(file)

    def ask(self) -> None:
        """Have the contents used now, whether they have changed or not. Any thread may call
        this.
        """
        self._is_asked = True
        self._wake.set()

    def close(self) -> None:
        """Stop following the file. Any thread may call this, more than once."""
        self._is_closed = True
        self._wake.set()

    def _follow(self, file: Path, known: str | None) -> None:
        before = known
        while True:
            self._wake.wait(self._look_s)
            self._wake.clear()
            if self._is_closed:
                return
            asked, self._is_asked = self._is_asked, False
            found = self.read(file)
            settled, before = found == before, found
            if found is None or not (asked or (settled and found != known)):
                continue
            known = found
            try:
                names = self._use(found)
            except MooncakeError as error:
                _log.error("%s: %s", self.stays, error.message)
                audit(f"{self.kind}_refused", file=str(file), reason=error.message)
            else:
                _log.info("%s: %s has been read again and is used now", self.named, file)
                audit(f"{self.kind}_read", file=str(file), names=names)


def _read(file: Path) -> str | None:
    try:
        return read_secret(file)
    except ConfigError:  # it is just being replaced, or gone: the secret stays as it was
        return None
