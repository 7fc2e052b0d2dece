"""The settings of scaling: how many replicas of each role there may be. Frozen values."""

from __future__ import annotations

import re

import msgspec

from mooncake.base import ConfigError, Role

ROLES = (Role.PREFILL, Role.DECODE)
_RANGE = re.compile(r"^([0-9]+)\.\.([0-9]+)$")
_SECONDS = re.compile(r"^[0-9]+(\.[0-9]+)?$")
FORM = "prefill=MIN..MAX,decode=MIN..MAX[,total=N][,start=S][,quiet=S]"


class Bounds(msgspec.Struct, frozen=True):
    """The least and the largest number of replicas of a role. None: there is no largest."""

    least: int = 1
    most: int | None = None

    def clamp(self, count: int) -> int:
        """Return the allowed number that is nearest to `count`."""
        count = max(count, self.least)
        return count if self.most is None else min(count, self.most)


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of `ReplicaPolicy`, and how fast a cluster changes."""

    prefill: Bounds = Bounds()
    decode: Bounds = Bounds()
    total: int | None = None
    """The largest number of replicas of both roles together. None: there is none."""
    start_s: float = 60.0
    """How long a new replica needs until it serves: so far ahead the load is predicted."""
    quiet_s: float = 300.0
    """A replica is given up when fewer have been enough for this long."""

    def bounds(self, role: Role) -> Bounds:
        """Return the bounds of prefill or decode."""
        return self.prefill if role is Role.PREFILL else self.decode

    @classmethod
    def parse(cls, text: str) -> ScalingConfig:
        """Read a text such as "prefill=1..4,decode=0..8,total=10,start=120,quiet=600".

        Raises:
            ConfigError: the text has another form, or its numbers contradict each other.
        """
        values: dict[str, str] = {}
        for part in text.split(","):
            name, sign, value = part.strip().partition("=")
            if not sign or name in values:
                raise _refusal(f"{part!r} is not one of NAME=VALUE, each name once")
            values[name] = value
        prefill = _bounds("prefill", values.pop("prefill", None))
        decode = _bounds("decode", values.pop("decode", None))
        seconds = {
            f"{name}_s": _seconds(name, values.pop(name)) for name in ("start", "quiet")
            if name in values
        }  # fmt: skip
        total: int | None = None
        if "total" in values:
            if not values["total"].isdecimal():
                raise _refusal(f"total={values['total']} is not a number of replicas")
            total = int(values.pop("total"))
        if values:
            raise _refusal(f"{next(iter(values))!r} is not known")
        if total is not None and total < max(1, prefill.least + decode.least):
            raise _refusal(f"total={total} is less than the least of both roles, or 0")
        return cls(prefill=prefill, decode=decode, total=total, **seconds)


def _bounds(name: str, text: str | None) -> Bounds:
    if text is None:
        raise _refusal(f"{name}=MIN..MAX is missing")
    found = _RANGE.match(text)
    if found is None:
        raise _refusal(f"{name}={text} is not MIN..MAX, such as 1..4")
    least, most = int(found[1]), int(found[2])
    if least > most:
        raise _refusal(f"{name}={text}: {least} is above {most}")
    if name == "decode" and not most:
        raise _refusal("decode=0..0: without a decode replica nothing is served")
    return Bounds(least, most)


def _seconds(name: str, text: str) -> float:
    if not _SECONDS.match(text):
        raise _refusal(f"{name}={text} is not a number of seconds")
    return float(text)


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"autoscale: {why}; write {FORM}", param="autoscale")
