"""docs/vllm.md says what the code takes."""

from __future__ import annotations

import ast
import re

from mooncake.integrations.settings import PoolSettings
from tests.vllm.docs import PAGE, ROOT, documented_config

DEFAULTS = PoolSettings(pool_urls=["-"], cluster_secret_file="-")


def test_the_documented_configuration_names_the_connector() -> None:
    config = documented_config()
    module = ROOT / (config["kv_connector_module_path"].replace(".", "/") + ".py")
    classes = [n.name for n in ast.parse(module.read_text()).body if isinstance(n, ast.ClassDef)]
    assert config["kv_connector"] in classes
    PoolSettings.read(config["kv_connector_extra_config"], "it")


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
    assert list(rows) == list(PoolSettings.__struct_fields__)
    for name, said in rows.items():
        value = getattr(DEFAULTS, name)
        if isinstance(value, int | float):
            assert f"(default: {value:g})" in said.replace("268435456", f"{2**28:g}"), name
