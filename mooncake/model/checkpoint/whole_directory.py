"""A directory that appears whole or not at all: written beside its place, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mooncake.base import ConfigError


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Give the body a directory to fill that becomes `out` when it ends well; else it is removed.

    Raises:
        ConfigError: `out` holds something already, or cannot be written.
    """
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(
                f"{out}: exists and is not an empty directory; remove it or choose another"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            yield staging
            staging.chmod(0o755)
            os.rename(staging, out)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror or error})") from error
