"""Where the owners of one machine's shared memory listen: at abstract Unix sockets, which all
processes of one network see, or at sockets in a directory that others share, such as pods.

Owns the files of this process's sockets. A process that was killed leaves its file; the next one
that listens in the directory removes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from mooncake.base.errors import ConfigError

_PREFIX = "mooncake-"
_BACKLOG = 128


def directory_of(endpoint: str) -> str:
    """Return the directory of an endpoint's socket; empty: its socket is abstract."""
    return os.path.dirname(endpoint)


class Place:
    """A socket at which one owner listens."""

    def __init__(self, name: str, directory: str) -> None:
        """Listen under a name that no other owner has, in `directory`, or at an abstract socket if
        that is empty.

        Raises:
            ConfigError: no socket can be made in the directory.
        """
        self.socket = socket.socket(socket.AF_UNIX)
        self._file: Path | None = None
        if not directory:
            self.endpoint = f"@{_PREFIX}{name}"
            self.socket.bind(f"\0{_PREFIX}{name}")
            self.socket.listen(_BACKLOG)
            return
        self.endpoint = os.path.join(directory, _PREFIX + name)
        draft = Path(directory, f".{_PREFIX}{name}")
        try:
            _remove_ended(Path(directory))
            self.socket.bind(str(draft))
            self._file = draft
            self.socket.listen(_BACKLOG)
            # Under this name it is looked for only now: it would refuse whoever asks before.
            self._file = draft.rename(self.endpoint)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"`shm-directory`: no socket can be made in {directory} "
                f"({error.strerror or error}); give a directory in which this process may write, "
                "with a short path"
            ) from error

    def forget(self) -> None:
        """Remove the file, if there is one. The socket stays open."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def close(self) -> None:
        """Close the socket and remove the file."""
        self.forget()
        self.socket.close()


def _remove_ended(directory: Path) -> None:
    """Remove the sockets at which no process listens any more, as far as that is allowed."""
    for file in directory.glob(f"{_PREFIX}*"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(file))
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    file.unlink()
            except OSError:
                continue
