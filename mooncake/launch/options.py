"""How one setting is written and read: its kind, its help, its checks. Knows no particular setting.

Command line and configuration file are read alike, so both accept and refuse the same values.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from mooncake.base import ConfigError, parse_bytes

_COUNT = re.compile(r"^(-?[0-9]+)([kKmM]?)$")
_PLACE = re.compile(r"^(anywhere|cpu:[0-9]+|gpu:[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$")
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
DIRECT = "tcp://"
"""Before the address of a channel that is joined without Ray."""
_WORDS = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of a setting besides its name and default."""

    read: Callable[[str, object], Any]
    """(name, value as written) -> value; raises ConfigError."""
    text: str
    group: str
    metavar: str = ""
    short: str = ""
    switch: bool = False
    """A truth: `--name` and `--no-name` on the command line."""
    repeat: bool = False
    """May be given several times."""
    positional: bool = False


def setting(
    default: Any,
    read: Callable[[str, object], Any],
    group: str,
    metavar: str,
    text: str,
    **more: Any,
) -> Any:
    """Return a dataclass field that carries its `Option`; `more` are further fields of it."""
    option = Option(read=read, group=group, metavar=metavar, text=text, **more)
    return dataclasses.field(default=default, metadata={"option": option})


def options_of(kind: type) -> dict[str, tuple[Option, Any]]:
    """Return the settings of a configuration dataclass: name -> (option, default)."""
    return {
        field.name: (field.metadata["option"], field.default)
        for field in dataclasses.fields(kind)
        if "option" in field.metadata
    }


def flag(name: str) -> str:
    """Return a setting's name as it stands on the command line and in files."""
    return name.replace("_", "-")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" for the known word closest to `word`, or nothing."""
    matches = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""


# ---------------------------------------------------------------- kinds of values


def text(name: str, value: object) -> str:
    """Read a non-empty text; numbers in a file count as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ConfigError(f"{flag(name)}: {value!r} is not a text")
    return str(value)


def texts(name: str, value: object) -> tuple[str, ...]:
    """Read one text or a list of them."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise ConfigError(f"{flag(name)}: needs at least one value")
    return tuple(text(name, item) for item in items)


def truth(name: str, value: object) -> bool:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    word = _WORDS.get(str(value).lower())
    if word is None:
        raise ConfigError(f"{flag(name)}: {value!r} is neither true nor false")
    return word


def one_of(*choices: str) -> Callable[[str, object], str]:
    """Read one of a few words."""

    def read(name: str, value: object) -> str:
        word = str(value)
        if word not in choices:
            raise ConfigError(
                f"{flag(name)}: {word!r} is not one of {', '.join(choices)}{nearest(word, choices)}"
            )
        return word

    return read


def some_of(*choices: str) -> Callable[[str, object], tuple[str, ...]]:
    """Read several of a few words: a list, or one text with commas; order is kept."""

    def read(name: str, value: object) -> tuple[str, ...]:
        listed = value if isinstance(value, list | tuple) else [value]
        parts = [part.strip() for item in listed for part in str(item).split(",")]
        return tuple(dict.fromkeys(one_of(*choices)(name, part) for part in parts))

    return read


def count(minimum: int, maximum: int = 2**62) -> Callable[[str, object], int]:
    """Read a whole number in a range; `32k` is 32,000 and `32K` is 32,768, as vLLM has it."""

    def read(name: str, value: object) -> int:
        match = _COUNT.match(str(value).strip()) if not isinstance(value, bool) else None
        if match is None:
            raise ConfigError(
                f"{flag(name)}: {value!r} is not a whole number (8, 4096, 32k and 32K are)"
            )
        number = int(match.group(1)) * _COUNT_UNITS[match.group(2)]
        if not minimum <= number <= maximum:
            upper = f" and at most {maximum}" if maximum < 2**62 else ""
            raise ConfigError(f"{flag(name)}: must be at least {minimum}{upper}, not {number}")
        return number

    return read


def size(minimum: int) -> Callable[[str, object], int]:
    """Read a number of bytes ("512MiB", "4GiB", 1073741824)."""

    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{flag(name)}: {value!r} is not a size; write e.g. 512MiB or 4GiB")
        number = parse_bytes(value, flag(name))
        if number < minimum:
            raise ConfigError(f"{flag(name)}: must be at least {minimum} bytes, not {number}")
        return number

    return read


def disks(name: str, value: object) -> tuple[tuple[str, int], ...]:
    """Read directories with a size each, "DIR:SIZE": a list, or one text with commas."""
    listed = value if isinstance(value, list | tuple) else [value]
    found: dict[str, int] = {}
    for part in (part.strip() for item in listed for part in str(item).split(",")):
        directory, _, written = part.rpartition(":")
        if not directory:
            raise ConfigError(f"{flag(name)}: {part!r} is not DIR:SIZE (e.g. /mnt/nvme0:2TiB)")
        directory = os.path.normpath(directory)
        if directory in found:
            raise ConfigError(f"{flag(name)}: {directory} is named twice")
        found[directory] = size(1)(name, written)
    return tuple(found.items())


def quotas(name: str, value: object) -> tuple[tuple[str, int], ...]:
    """Read sizes by tenant, "TENANT=SIZE": a list, or one text with commas."""
    listed = value if isinstance(value, list | tuple) else [value]
    found: dict[str, int] = {}
    for part in (part.strip() for item in listed for part in str(item).split(",")):
        tenant, equals, written = part.rpartition("=")
        if not equals:
            raise ConfigError(f"{flag(name)}: {part!r} is not TENANT=SIZE (e.g. alice=20GiB)")
        if tenant in found:
            raise ConfigError(f"{flag(name)}: {tenant!r} is named twice")
        found[tenant] = size(0)(name, written)
    return tuple(found.items())


def nearby(name: str, value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read NICs by place, "PLACE=NIC,NIC": one text or a list of them."""
    found: dict[str, tuple[str, ...]] = {}
    for written in texts(name, value):
        place, _, listed = written.partition("=")
        nics = tuple(dict.fromkeys(nic.strip() for nic in listed.split(",") if nic.strip()))
        if not nics or not _PLACE.match(place):
            raise ConfigError(
                f"{flag(name)}: {written!r} is not PLACE=NIC,NIC (e.g. cpu:0=mlx5_0,mlx5_1; places "
                "are cpu:NUMA-NODE, gpu:PCI-ADDRESS as in gpu:0000:3b:00.0, and anywhere)"
            )
        if place in found:
            raise ConfigError(f"{flag(name)}: {place} is named twice")
        found[place] = nics
    return tuple(found.items())


def positive(name: str, value: object) -> float:
    """Read a number above zero."""
    try:
        number = float(str(value)) if not isinstance(value, bool) else float("nan")
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ConfigError(f"{flag(name)}: {value!r} is not a number above zero")
    return number


def share(name: str, value: object) -> float:
    """Read a number above zero and at most 1."""
    number = positive(name, value)
    if number > 1:
        raise ConfigError(f"{flag(name)}: {value!r} is more than the whole (1)")
    return number


def part(name: str, value: object) -> float:
    """Read a number from 0 to 1."""
    return 0.0 if str(value) in ("0", "0.0") else share(name, value)


def host_and_port(name: str, value: object) -> str:
    """Read "HOST:PORT"."""
    host, colon, port = str(value).rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{flag(name)}: {value!r} is not HOST:PORT (e.g. 10.0.0.7:6379)")
    return str(value)


def joinable(name: str, value: object) -> str:
    """Read "HOST:PORT" or "tcp://HOST:PORT"."""
    written = str(value)
    return DIRECT * written.startswith(DIRECT) + host_and_port(name, written.removeprefix(DIRECT))


def only_one(reason: str) -> Callable[[str, object], int]:
    """Read a degree of parallelism of which only 1 exists so far."""

    def read(name: str, value: object) -> int:
        number = count(1)(name, value)
        if number != 1:
            raise ConfigError(f"{flag(name)}={number} is not supported yet: {reason}")
        return number

    return read
