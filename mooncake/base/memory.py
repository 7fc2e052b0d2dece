"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from mooncake.base.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Return the number of bytes in `text` ("512MiB", "1.5GB", 4096).

    Raises:
        ConfigError: `text` is not a size; the message contains `name`.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}: {text!r} is not a size; write bytes or e.g. 512MiB, 4GiB, 1.5TB"
        )
    return int(float(match.group(1)) * unit)


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` as text in binary units with three digits ("1.5 GiB")."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if unit == "B" and size < 1024:
            return f"{size:.0f} B"
        if unit != "B" and size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
