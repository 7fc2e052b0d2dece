"""Files that a command writes: its results, where the user asks for them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from mooncake.base import ConfigError


def as_json(value: object) -> str:
    """Return JSON text; equal values give equal text."""
    return json.dumps(msgspec.to_builtins(value), indent=1, sort_keys=True) + "\n"


def check_writable(*names: str | None) -> None:
    """Raise ConfigError when a file could not be written. Call this before the work, not
    after it.
    """
    for name in names:
        if name is None:
            continue
        path = Path(name).absolute()
        if not path.parent.is_dir():
            raise ConfigError(
                f"{name}: its directory does not exist; create it, or name another file"
            )
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{name}: the file cannot be written; name another")


def write(name: str | None, text: str) -> None:
    """Write a file if the user asked for it."""
    if name is None:
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
