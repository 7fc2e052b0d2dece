"""Directories that look like checkpoints, for tests that never open a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.model.specs import small_config


def write_config_only(directory: Path, **changes: Any) -> Path:
    """Write config.json and a weights file without tensors; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(small_config(**changes)))
    header = b"{}"
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory
