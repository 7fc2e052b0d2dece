"""The protections of bytes between processes, as settings and handshakes name them."""

from __future__ import annotations

from enum import Enum


class Protection(Enum):
    """How the bytes of a connection are protected on their way, weakest first."""

    NONE = "none"
    MAC = "mac"
    """Bytes cannot be changed unnoticed: a tag follows each message."""
    ENCRYPT = "encrypt"
    """In addition, payloads cannot be read."""

    def is_weaker(self, other: Protection) -> bool:
        """Return whether `other` protects from more."""
        order = list(Protection)
        return order.index(self) < order.index(other)


PROTECTIONS = tuple(each.value for each in Protection)
