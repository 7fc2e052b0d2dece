"""What bytes between processes can be protected from, as settings and handshakes name it."""

from __future__ import annotations

from enum import Enum


class Protection(Enum):
    """What the bytes of a connection are protected from on their way, weakest first."""

    NONE = "none"
    MAC = "mac"
    """From changes: a tag follows each message."""
    ENCRYPT = "encrypt"
    """And payloads from readers."""

    def is_weaker(self, other: Protection) -> bool:
        """Return whether `other` protects from more."""
        order = list(Protection)
        return order.index(self) < order.index(other)


PROTECTIONS = tuple(each.value for each in Protection)
