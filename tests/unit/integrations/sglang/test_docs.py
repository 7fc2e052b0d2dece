"""docs/sglang.md says what the code takes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from mooncake.integrations.settings import BackendSettings
from tests.support.integrations.hicache import BACKEND

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "sglang.md").read_text()


def test_the_documented_configuration_names_the_backend() -> None:
    [text] = re.findall(r"extra-config '(\{.*?\n      \})'", PAGE, re.DOTALL)
    config = json.loads(text)
    assert {name: config[name] for name in BACKEND} == BACKEND
    module = ROOT / (config["module_path"].replace(".", "/") + ".py")
    classes = [n.name for n in ast.parse(module.read_text()).body if isinstance(n, ast.ClassDef)]
    assert config["class_name"] in classes
    assert BackendSettings.of_extra(config, "-").pool_urls == ["http://127.0.0.1:8100"]
