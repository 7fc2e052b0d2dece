"""A directory that appears whole or not at all: it is written beside its place, then renamed. Files
beside the weights of a checkpoint are copied with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from mooncake.base import ConfigError

BESIDE = {"", ".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt"}
"""The endings of files beside the weights: configuration, tokenizer, templates, licenses. A file
with another ending may be weights in another format, and is never copied.
"""


def copy_beside(source: Path, out: Path, skip: Collection[str] = ()) -> None:
    """Copy the files beside the weights of a checkpoint, except those in `skip`."""
    for file in sorted(source.iterdir()):
        is_beside = file.suffix in BESIDE and file.name not in skip
        if file.is_file() and is_beside and not file.name.startswith("."):
            shutil.copyfile(file, out / file.name)


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Give the body a directory to fill. It becomes `out` when the body succeeds; otherwise it is
    removed.

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
