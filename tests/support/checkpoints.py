"""Directories that look like checkpoints, for tests that never open a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.specs import small_config


def write_config_only(directory: Path, *, weight_bytes: int = 1000, **changes: Any) -> Path:
    """Write config.json and a weights file of that size that holds no tensors; return the path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(small_config(**changes)))
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    return directory
