"""docs/lmcache.md says what the code takes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import yaml

from tests.support.integrations.lmcache import PLUGIN, Backend, Config, stand_in

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "lmcache.md").read_text()


def test_the_documented_configuration_opens_the_connector() -> None:
    [text] = re.findall(r"\n\n(    chunk_size:.*?)\n\n", PAGE, re.DOTALL)
    given = yaml.safe_load(textwrap.dedent(text))
    extra = given["extra_config"]
    assert {name: extra[name] for name in PLUGIN} == PLUGIN
    extra["mooncake"]["revision"] = "abc"
    with stand_in():
        backend = Backend(Config(extra, tuple(given["remote_storage_plugins"])))
        backend.close()
