"""Reads `--api-keys-file`, a YAML list of keys with their names, tenants, classes and limits, and
reads it again when it changes. A running server keeps its keys when new ones cannot be read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mooncake.api.config import MAX_SLO_MS, ApiKey
from mooncake.base import ConfigError, Priority
from mooncake.launch.config.options import nearest
from mooncake.launch.host.secrets.credentials import check_mode
from mooncake.launch.host.secrets.secret_file import LOOK_S, SecretFollower

LATENCIES = ("slo_ttft_ms", "slo_tbt_ms")
LIMITS = (
    "requests_per_min", "tokens_per_min", "max_concurrent", *LATENCIES,
    *(f"min_{name}" for name in LATENCIES),
)  # fmt: skip
FIELDS = ("name", "key", "sha256", "tenant", "priorities", "operator", *LIMITS)
_NAMES_OF_PLAIN_KEYS = re.compile(r"key [0-9]+")
"""`unlimited_keys` numbers the keys of `api-key` so. A name is also a tenant, and owns answers that
are kept for repeats.
"""
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class KeyFollower(SecretFollower):
    """Follows a file of keys: a mistake in it changes nothing."""

    stays = "the keys stay as they were"
    kind = "keys"
    named = "api-keys-file"

    def __init__(
        self, file: str, use: Callable[[tuple[ApiKey, ...]], object], look_s: float = LOOK_S
    ) -> None:
        """Call `use` with the keys when they have changed, in another thread."""

        def use_all(_: str) -> list[str]:
            keys = read_keys(file)
            use(keys)
            return sorted(key.name for key in keys)

        super().__init__(file, use_all, look_s)

    def read(self, file: Path) -> str:
        """Return the contents; no file is a mistake, too."""
        try:
            return file.read_text(errors="replace")
        except OSError as error:
            return str(error)


def read_keys(path: str) -> tuple[ApiKey, ...]:
    """Return the keys in the file at `path`.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; the message says where and never
            repeats a key.
    """
    try:
        check_mode(Path(path), "api-keys-file")
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api-keys-file: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:  # its own words may repeat a line of the file
        raise ConfigError(f"api-keys-file: {path} is not YAML") from error
    entries = loaded.get("keys") if isinstance(loaded, dict) and len(loaded) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"api-keys-file: {path} must hold `keys:` and a list under it")
    keys = tuple(_read(entry, f"{path}: key {at}") for at, entry in enumerate(entries, 1))
    for what, values in (
        ("name", [key.name for key in keys]), ("key", [key.digest for key in keys]),
    ):  # fmt: skip
        if len(set(values)) < len(values):
            raise ConfigError(f"api-keys-file: {path}: two keys have the same {what}")
    return keys


def _read(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"api-keys-file: {where} must be `name: value` lines")
    for field in entry:
        if field not in FIELDS:
            hint = nearest(str(field), FIELDS) or f" (there are {', '.join(FIELDS)})"
            raise ConfigError(f"api-keys-file: {where}: unknown field {field}{hint}")
    name, tenant = entry.get("name"), entry.get("tenant", "")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"api-keys-file: {where} needs a name")
    if _NAMES_OF_PLAIN_KEYS.fullmatch(name):
        raise ConfigError(
            f"api-keys-file: {where}: the keys of `api-key` are named {name!r} and so on: choose "
            "another name"
        )
    if not isinstance(tenant, str):
        raise ConfigError(f"api-keys-file: {where} ({name}): tenant must be a text")
    operator = entry.get("operator", False)
    if not isinstance(operator, bool):
        raise ConfigError(f"api-keys-file: {where} ({name}): operator must be true or false")
    limits = {}
    for field in LIMITS:
        value = entry.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"api-keys-file: {where} ({name}): {field} must be a whole number")
        if value is not None and value < 1:
            raise ConfigError(f"api-keys-file: {where} ({name}): {field} must be at least 1")
        limits[field] = value
    for field in LATENCIES:
        value, least = limits[field], limits[f"min_{field}"] or 1
        if not least <= (value or least) <= MAX_SLO_MS:
            raise ConfigError(
                f"api-keys-file: {where} ({name}): {field} and min_{field} are milliseconds, up to "
                f"{MAX_SLO_MS}, and the default ({field}) must not be below the least (min_{field})"
            )
    return ApiKey(
        digest=_digest(entry, f"{where} ({name})"), name=name, tenant=tenant,
        priorities=_priorities(entry, f"{where} ({name})"), operator=operator, **limits,
    )  # fmt: skip


def _priorities(entry: dict[str, Any], where: str) -> tuple[Priority, ...]:
    if "priorities" not in entry:
        return (Priority.INTERACTIVE,)
    words, known = entry["priorities"], [priority.value for priority in Priority]
    if not isinstance(words, list) or not words or any(word not in known for word in words):
        raise ConfigError(
            f"api-keys-file: {where}: priorities must be a list of some of {', '.join(known)}"
        )
    return tuple(priority for priority in Priority if priority.value in words)


def _digest(entry: dict[str, Any], where: str) -> bytes:
    key, digest = entry.get("key"), entry.get("sha256")
    if (key is None) == (digest is None):
        raise ConfigError(f"api-keys-file: {where} needs one of key and sha256")
    if digest is not None:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ConfigError(f"api-keys-file: {where}: sha256 must be 64 hexadecimal digits")
        return bytes.fromhex(digest)
    if not isinstance(key, str) or not key or not key.isascii() or key != key.strip():
        raise ConfigError(
            f"api-keys-file: {where}: key must be a text of ASCII characters, in quotes"
        )
    return hashlib.sha256(key.encode()).digest()
