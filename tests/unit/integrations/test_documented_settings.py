"""The pages of engines that take the same settings document each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mooncake.integrations.settings import BackendSettings

DOCS = Path(__file__).parents[3] / "docs"
DEFAULTS = BackendSettings(pool_urls=["-"], cluster_secret_file="-")


@pytest.mark.parametrize("page", ["lmcache.md", "sglang.md"])
def test_every_setting_is_documented_with_its_default(page: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", (DOCS / page).read_text(), re.MULTILINE))
    assert sorted(rows) == sorted(BackendSettings.__struct_fields__)
    for name, said in rows.items():
        value = getattr(DEFAULTS, name)
        if isinstance(value, int | float):
            assert f"(default: {value:g})" in said.replace("268435456", f"{2**28:g}"), name
