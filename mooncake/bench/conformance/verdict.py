"""What a check has found. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Result = Literal["pass", "fail", "not possible here"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    complaint: str
    """The id of a complaint in `COMPLAINTS`."""
    result: Result
    why: str = ""
    """Why the check failed, or is not possible here."""
    evidence: str = ""
    """What was seen."""


class NotPossible(Exception):
    """A check raises this when the server does not allow it. The message says what the
    check needs.
    """


class Failed(Exception):
    """A check raises this when the server does not pass it. The message says what was seen."""
