"""Describes how one setting is written, read, checked and explained. Knows no particular setting.

Command line and configuration file are read alike, so both accept and refuse the same values.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from mooncake.base import ConfigError, parse_bytes
from mooncake.base.urls import server_url
from mooncake.scheduler.scaling.config import ScalingConfig

_COUNT = re.compile(r"^(-?[0-9]+)([kKmM]?)$")
_PLACE = re.compile(r"^(anywhere|cpu:[0-9]+|gpu:[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$")
_LABEL = re.compile(r"[A-Za-z0-9._/-]+=[^=,\s]+")
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
DIRECT = "tcp://"
"""Prefix of the address at which a cluster is joined."""
_WORDS = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What describes a setting besides its name and default."""

    read: Callable[[str, object], Any]
    """(name, value as written) -> value; raises ConfigError."""
    text: str
    """The setting's help; empty: it is accepted for compatibility and not shown."""
    group: str
    metavar: str = ""
    short: str = ""
    repeat: bool = False
    """True if it may be given several times."""
    many: str = ""
    """"*" or "+": the flag takes several words, as argparse's nargs."""
    positional: bool = False
    required: bool = False
    env: str = ""
    """The environment variable that may give it."""
    other_env: str = ""
    """Another variable, used if that one is not set."""
    secret: bool = False
    """True if its value is never shown."""
    owner: tuple[type, str, float] | None = None
    """The struct and field that it sets, and how many of its units are one of the field's."""

    @property
    def switch(self) -> bool:
        """True for a truth value: `--name` and `--no-name` on the command line."""
        return self.read is truth

    @property
    def variables(self) -> list[str]:
        """The environment variables that may give it; the first that is set counts."""
        return [name for name in (self.env, self.other_env) if name]

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed; empty if the setting is not a choice."""
        return self.read.choices if isinstance(self.read, OneOf) else ()


def setting(
    default: Any,
    read: Callable[[str, object], Any],
    group: str,
    metavar: str,
    text: str,
    **more: Any,
) -> Any:
    """Return a dataclass field that carries its `Option`; `more` holds further fields of the
    `Option`.
    """
    return _field(Option(read=read, group=group, metavar=metavar, text=text, **more), default)


def _field(option: Option, default: Any) -> Any:
    return dataclasses.field(default=default, repr=not option.secret, metadata={"option": option})


def owned(
    owner: type,
    field: str,
    read: Callable[[str, object], Any],
    group: str,
    metavar: str,
    text: str,
    *,
    per_unit: float = 1,
    **more: Any,
) -> Any:
    """Return a setting whose default is that of `field` in the struct `owner`.

    `per_unit`: how many units of the setting are one of the field's (1000 for ms over s).
    """
    default = _default_of(owner, field)
    if per_unit != 1 and default is not None:
        default *= per_unit
    more["owner"] = (owner, field, per_unit)
    return setting(default, read, group, metavar, text, **more)


def same_as(kind: type, name: str, group: str) -> Any:
    """Return the setting `name` of another dataclass of settings, for a command that shares it."""
    option, default = options_of(kind)[name]
    return _field(dataclasses.replace(option, group=group, owner=None, short=""), default)


def values_of(settings: object, owner: type) -> dict[str, Any]:
    """Return the fields of the struct `owner` that `settings` give, in its units."""
    values = {}
    for name, (option, _) in options_of(type(settings)).items():
        if option.owner is not None and option.owner[0] is owner:
            _, field, per_unit = option.owner
            value = getattr(settings, name)
            values[field] = value if value is None or per_unit == 1 else value / per_unit
    return values


def shared_values(settings: object, kind: type) -> dict[str, Any]:
    """Return the values in `settings` for the settings that they share with the dataclass
    `kind`.
    """
    names = options_of(kind).keys() & options_of(type(settings)).keys()
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _default_of(owner: Any, name: str) -> Any:
    if issubclass(owner, msgspec.Struct):
        fields: Iterable[Any] = msgspec.structs.fields(owner)
    else:
        fields = dataclasses.fields(owner)
    [default] = [field.default for field in fields if field.name == name]
    assert default not in (msgspec.NODEFAULT, dataclasses.MISSING), f"{owner}.{name} has none"
    return default


def options_of(kind: type) -> dict[str, tuple[Option, Any]]:
    """Return the settings of a configuration dataclass: name -> (option, default)."""
    return {
        field.name: (field.metadata["option"], field.default)
        for field in dataclasses.fields(kind)
        if "option" in field.metadata
    }


def flag(name: str) -> str:
    """Return a setting's name as it is written on the command line and in files."""
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


def bounds(name: str, value: object) -> str:
    """Read how many replicas of each role there may be (`ScalingConfig.parse`)."""
    written = text(name, value)
    ScalingConfig.parse(written)
    return written


class OneOf:
    """Reads one of a few words."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def __call__(self, name: str, value: object) -> str:
        word = str(value)
        if word not in self.choices:
            raise ConfigError(
                f"{flag(name)}: {word!r} is not one of {', '.join(self.choices)}"
                f"{nearest(word, self.choices)}"
            )
        return word


class SomeOf(OneOf):
    """Reads several of a few words: a list, or one text with commas; order is kept."""

    def __call__(self, name: str, value: object) -> Any:
        listed = value if isinstance(value, list | tuple) else [value]
        parts = [part.strip() for item in listed for part in str(item).split(",")]
        return tuple(dict.fromkeys(super(SomeOf, self).__call__(name, part) for part in parts))


def count(minimum: int, maximum: int = 2**62) -> Callable[[str, object], int]:
    """Read a whole number in a range; `32k` is 32,000 and `32K` is 32,768, as in vLLM."""

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


def counts(name: str, value: object) -> tuple[int, ...]:
    """Read several whole numbers: a list, or one text with commas."""
    listed = value if isinstance(value, list | tuple) else str(value).split(",")
    return tuple(count(0)(name, item) for item in listed)


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


ROLE_SETTINGS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "decode-context-parallel-size",
    "data-parallel-size",
)
"""Settings that may differ for one role's engines."""


def role_settings(name: str, value: object) -> tuple[tuple[str, int], ...]:
    """Read settings of one role, "NAME=VALUE": one text or a list of them."""
    found: dict[str, int] = {}
    for written in texts(name, value):
        setting_name, _, number = written.partition("=")
        known = setting_name.replace("_", "-")
        if known not in ROLE_SETTINGS:
            raise ConfigError(
                f"{flag(name)}: {written!r} is not NAME=VALUE with a name of "
                f"{', '.join(ROLE_SETTINGS)}{nearest(known, ROLE_SETTINGS)}"
            )
        if known in found:
            raise ConfigError(f"{flag(name)}: {known} is given twice")
        found[known] = count(1, 1024)(f"{name} {known}", number)
    return tuple(found.items())


def json_object(
    name: str, value: object, fields: str = "names and values, in braces"
) -> dict[str, Any]:
    """Read a JSON object; in a file also a mapping. `fields`: what it holds."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{flag(name)}: {value!r} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{flag(name)}: {value!r} is not a JSON object of {fields}")
    return given


def table(kind: type) -> Callable[[str, object], Any]:
    """Read a JSON object (in a file: a mapping) of the fields of the dataclass `kind`."""
    known = {field.name: field for field in dataclasses.fields(kind)}

    def read(name: str, value: object) -> Any:
        if isinstance(value, kind):
            return value
        given = json_object(name, value, ", ".join(known))
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"{flag(name)}: {key!r} is not one of {', '.join(known)}{nearest(key, known)}"
                )
        for key, field in known.items():
            if field.default is dataclasses.MISSING and key not in given:
                raise ConfigError(f"{flag(name)}: {key} is missing")
        try:
            return kind(**given)
        except ConfigError as error:
            raise ConfigError(f"{flag(name)}: {error.message}") from None

    return read


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


def labels(name: str, value: object) -> tuple[str, ...]:
    """Read labels of a machine: "KEY=VALUE,KEY=VALUE", or in a file a mapping."""
    if isinstance(value, Mapping):
        value = [f"{key}={text(f'{name}: {key}', each)}" for key, each in value.items()]
    found: dict[str, str] = {}
    for word in [word.strip() for written in texts(name, value) for word in written.split(",")]:
        key = word.partition("=")[0]
        if not _LABEL.fullmatch(word):
            raise ConfigError(f"{flag(name)}: {word!r} is not KEY=VALUE, such as rack=r7")
        if key in found:
            raise ConfigError(f"{flag(name)}: {key} is named twice")
        found[key] = word
    return tuple(sorted(found.values()))


def pairs(name: str, value: object) -> tuple[tuple[str, str], ...]:
    """Read "NAME=VALUE", one text or a list of them."""
    found = []
    for written in texts(name, value):
        key, sign, given = written.partition("=")
        if not (sign and key.strip()):
            raise ConfigError(f"{flag(name)}: {written!r} is not NAME=VALUE")
        found.append((key.strip(), given.strip()))
    return tuple(found)


def percentiles(name: str, value: object) -> tuple[float, ...]:
    """Read numbers from 0 to 100: a list, or one text with commas."""
    listed = value if isinstance(value, list | tuple) else str(value).split(",")
    found = tuple(number(name, each) for each in listed)
    if not all(0 <= each <= 100 for each in found):
        raise ConfigError(f"{flag(name)}: {value!r} has a number that is not from 0 to 100")
    return found


def number(name: str, value: object) -> float:
    """Read any number, infinity too."""
    try:
        return float("" if isinstance(value, bool) else str(value))
    except ValueError:
        raise ConfigError(f"{flag(name)}: {value!r} is not a number") from None


def above_zero(name: str, value: object) -> float:
    """Read a number above zero, infinity too."""
    found = number(name, value)
    if not found > 0:
        raise ConfigError(f"{flag(name)}: must be more than 0, not {found:g}")
    return found


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


def amount(name: str, value: object) -> float:
    """Read a number of at least zero."""
    return 0.0 if str(value) in ("0", "0.0") else positive(name, value)


def part(name: str, value: object) -> float:
    """Read a number from 0 to 1."""
    return 0.0 if str(value) in ("0", "0.0") else share(name, value)


def web_url(name: str, value: object) -> str:
    """Read a URL of HTTP or HTTPS."""
    server_url(flag(name), str(value))
    return str(value)


def engine_urls(name: str, value: object) -> tuple[str, ...]:
    """Read URLs of OpenAI-compatible servers: a list, or one text with commas. A "/v1" at the end
    is left out.
    """
    parts = [part.strip() for item in texts(name, value) for part in item.split(",")]
    urls = [web_url(name, part).rstrip("/").removesuffix("/v1") for part in parts]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(f"{flag(name)}: {twice} is named twice")
    return tuple(urls)


def engine_events(name: str, value: object) -> tuple[tuple[str, str, str | None], ...]:
    """Read where engines publish block events, "URL=EVENTS" or "URL=EVENTS,REPLAY": one text or a
    list of them.
    """
    found: list[tuple[str, str, str | None]] = []
    for written in texts(name, value):
        url, _, listed = written.rpartition("=")
        places = [place.strip() for place in listed.split(",")]
        if not url or len(places) > 2 or any(
            not place.startswith((DIRECT, "ipc://")) for place in places
        ):  # fmt: skip
            raise ConfigError(
                f"{flag(name)}: {written!r} is not URL=EVENTS,REPLAY (e.g. "
                "http://10.0.0.7:8000=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558)"
            )
        [engine] = engine_urls(name, url)
        found.append((engine, places[0], places[1] if len(places) > 1 else None))
    return tuple(found)


def port_range(name: str, value: object) -> tuple[int, int]:
    """Read "FIRST-LAST"."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", str(value))
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 0 < first <= last < 65536:
        raise ConfigError(f"{flag(name)}: {value!r} is not FIRST-LAST (e.g. 7000-7099)")
    return first, last


def host_and_port(name: str, value: object) -> str:
    """Read "HOST:PORT"."""
    host, colon, port = str(value).rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or "/" in host:
        raise ConfigError(f"{flag(name)}: {value!r} is not HOST:PORT (e.g. 10.0.0.7:6379)")
    return str(value)


def bracketed(host: str) -> str:
    """Return how a host is written before a port."""
    return f"[{host}]" if ":" in host else host


def hosts_and_ports(name: str, value: object) -> tuple[str, ...]:
    """Read "HOST:PORT", one text or a list of them."""
    return tuple(host_and_port(name, each) for each in texts(name, value))


def _place_and_key(name: str, written: str) -> str:
    place, mark, key = written.partition("#")
    if mark and not re.fullmatch("[0-9a-f]{64}", key):
        raise ConfigError(
            f"{flag(name)}: the part after # in {written!r} is not a key; copy the whole address"
        )
    return host_and_port(name, place.rstrip("/")) + mark + key


def joinable(name: str, value: object) -> str:
    """Read addresses of gateways, "HOST:PORT" or "tcp://HOST:PORT", with commas. Each is returned
    with its "tcp://" and may end in "#" and a public key.
    """
    places = [each.strip().removeprefix(DIRECT) for each in str(value).split(",")]
    return ",".join(DIRECT + _place_and_key(name, place) for place in places)
