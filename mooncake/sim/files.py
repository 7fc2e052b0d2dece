"""Files that the simulator reads: traces, faults, and bundles of receipts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import yaml

from mooncake.base import ConfigError
from mooncake.scheduler.placement.choice_replay import BundledPlacement
from mooncake.sim.faults.plan import Fault
from mooncake.sim.workload import TraceLine, parse_trace


def read_trace(name: str) -> list[TraceLine]:
    """Return the requests of a trace file. Raises ConfigError when it cannot be read."""
    try:
        with open(name, "rb") as file:
            return parse_trace(file, name)
    except OSError as error:
        raise ConfigError(f"{name}: the file cannot be read: {error.strerror}") from None


def read_faults(path: str) -> list[Fault]:
    """Return the faults in a YAML list or in JSONL.

    Raises:
        ConfigError: the file cannot be read; the message names the wrong fault.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()]
        if lines and all(line.lstrip().startswith("{") for line in lines):
            values = [yaml.safe_load(line) for line in lines]
        else:
            values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}", param="faults") from None
    if not isinstance(values, list):
        raise ConfigError(f"{path}: must hold a list of faults", param="faults")
    faults = []
    for number, value in enumerate(values, 1):
        try:
            faults.append(msgspec.convert(value, Fault))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}, fault {number}: {error}", param="faults") from None
    return faults


class ReplayEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One placement of a call (`telemetry.receipt.BundleEntry`)."""

    request_id: str
    attempt: int
    placement: BundledPlacement


class ReplayFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All placements of a call (`telemetry.receipt.Bundle`)."""

    receipt: str
    placements: list[ReplayEntry]
    version: Literal[2]


def read_bundle(name: str) -> ReplayFile:
    """Return the placements in a file of `mooncake explain --bundle`.

    Raises:
        ConfigError: the file cannot be read, or is none; the message names what is wrong.
    """
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=ReplayFile)
    except OSError as error:
        raise ConfigError(
            f"{name}: the file cannot be read: {error.strerror}",
            param="replay",
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{name} is not the bundle of a receipt: {error}", param="replay"
        ) from None
