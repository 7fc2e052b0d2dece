"""What docs/vllm.md shows, which the tests use as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.docs.blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "vllm.md"


def documented_config() -> Any:
    """Return the value of `--kv-transfer-config` on the page."""
    [shown] = re.findall(r"--kv-transfer-config '(.+?)'", PAGE.read_text(), re.DOTALL)
    return json.loads(shown)


def documented_block(beginning: str) -> str:
    """Return the code block of the page that begins so."""
    [found] = [block.text for block in blocks_of(PAGE) if block.text.startswith(beginning)]
    return found
