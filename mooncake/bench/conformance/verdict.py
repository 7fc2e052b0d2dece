"""What a check found. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Result = Literal["pass", "fail", "not possible here"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    complaint: str
    """An id of `COMPLAINTS`."""
    result: Result
    why: str = ""
    """Why it failed, or is not possible here."""
    evidence: str = ""
    """What was seen."""


class NotPossible(Exception):
    """Raised by a check that this server does not allow; the message says what it would take."""


class Failed(Exception):
    """Raised by a check that does not hold; the message says what was seen."""
