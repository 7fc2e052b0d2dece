"""Which tile sizes a kernel is launched with: from tables measured on a device, else by a rule of
thumb.

A table is a JSON file in `tuned/`, made by `mooncake tune` and never while serving: `{"device":
..., "triton": "3.6", "entries": {"experts/int4/384/256/7168": {"128": {...}}}}`. The inner key is
the batch; the nearest one is used, unless it is more than `_FARTHEST` times as large or as small.
Knows no torch and no Triton.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tuned"

_FARTHEST = 2.0
"""Tiles measured for a few tokens' rows would slow a prompt's down."""
_FEW_ROWS = (16, 32, 64)
"""Up to this many rows of an expert, weights are made the rows of the product."""


@dataclass(frozen=True)
class ProductTile:
    """How one grouped product is cut. `programs`: per multiprocessor. columns_step 0: all of K."""

    block_w: int
    block_k: int
    group_t: int
    programs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeTile:
    """How the absorbed decode walks a context: step_tokens of a page at a time, in so many stages.
    0: what suits the number of rows and the cache. warpgroups: whether to use Hopper's own form
    (`triton.mla_decode_hopper`), which has steps and stages of its own; None: where it is faster,
    if all else is 0 too.
    """

    stages: int = 0
    step_tokens: int = 0
    warpgroups: bool | None = None


DEFAULT_DECODE = DecodeTile()


@dataclass(frozen=True)
class ExpertsConfig:
    """Tiles of a layer of experts: `block_t` rows of one expert, weights as rows where `swap`."""

    block_t: int
    swap: bool
    gate_up: ProductTile
    down: ProductTile

    @classmethod
    def from_table(cls, entry: Mapping[str, Any]) -> ExpertsConfig:
        """Read what `to_table` wrote. Raises TypeError when keys are missing or unknown."""
        tiles = {name: ProductTile(**entry.get(name, {})) for name in ("gate_up", "down")}
        values: dict[str, Any] = {**entry, **tiles}
        return cls(**values)

    def to_table(self) -> dict[str, object]:
        """Return the configuration in a form for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ExpertsShape:
    """The key of an entry. inner, hidden: of this rank; format: plain, fp8 or int4."""

    format: str
    num_experts: int
    inner: int
    hidden: int

    @property
    def key(self) -> str:
        parts = [str(getattr(self, field.name)) for field in fields(self)]
        return "/".join(["experts", *parts])


@dataclass(frozen=True)
class Target:
    """A device and a Triton release. The tables of one target say nothing about another."""

    device: str
    triton: str

    @property
    def file_name(self) -> str:
        """Return the name of the target's file, e.g. `nvidia-h200.triton-3.6.json`."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"{slug}.triton-{'.'.join(self.triton.split('.')[:2])}.json"


def experts_config(
    shape: ExpertsShape, pairs: int, target: Target | None, tables: Path = TABLES
) -> ExpertsConfig:
    """Return the configuration for `pairs` (token, choice) pairs: the table's nearest, else by a
    rule.

    target: None when there is nothing to measure (the interpreter).
    """
    if target is not None:
        batches = _table(tables / target.file_name).get(shape.key)
        if batches:
            nearest = min(batches, key=lambda batch: abs(math.log(batch / max(pairs, 1))))
            if 1 / _FARTHEST <= nearest / max(pairs, 1) <= _FARTHEST:
                return batches[nearest]
    return default_experts_config(shape, pairs)


@functools.cache
def _table(path: Path) -> dict[str, dict[int, ExpertsConfig]]:
    if not path.exists():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
    return {
        key: {int(batch): ExpertsConfig.from_table(entry) for batch, entry in batches.items()}
        for key, batches in entries.items()
    }


def save_table(
    path: Path, target: Target, entries: Mapping[str, Mapping[int, ExpertsConfig]]
) -> None:
    """Write or extend the table at `path`. Entries of the same key and batch are replaced."""
    merged = {key: dict(batches) for key, batches in _table(path).items()}
    for key, batches in entries.items():
        merged.setdefault(key, {}).update(batches)
    plain = {
        key: {str(batch): merged[key][batch].to_table() for batch in sorted(merged[key])}
        for key in sorted(merged)
    }
    content = {"device": target.device, "triton": target.triton, "entries": plain}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _table.cache_clear()


def default_experts_config(shape: ExpertsShape, pairs: int) -> ExpertsConfig:
    """Return a configuration from the mean number of rows an expert has."""
    rows = pairs / min(shape.num_experts, max(pairs, 1))
    for block_t in _FEW_ROWS:
        if rows <= block_t // 2:
            tile = ProductTile(64, 128, 1, 3 if block_t < 64 else 2, 4, 4)
            # Use two steps over an expert's short inner width, because around these, wider tiles
            # spend less.
            wide = shape.format == "int4" and block_t < _FEW_ROWS[-1]
            return ExpertsConfig(block_t, True, tile, replace(tile, block_w=128) if wide else tile)
    if shape.format == "fp8":  # eight warps would spill nothing; four were measured on an H200
        gate_up = ProductTile(64, 128, 8, 1, 4, 4)
        return ExpertsConfig(128, False, gate_up, replace(gate_up, block_w=128))
    gate_up = ProductTile(64, 128 if shape.format != "plain" else 64, 8, 1, 8, 3)
    down = ProductTile(128, gate_up.block_k, 8, 1, 8, 3)
    return ExpertsConfig(128, False, gate_up, down)
