"""What a user may say in `kv_connector_extra_config`, and the weights' name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.integrations.settings import PoolSettings, weights_name

GIVEN = {"pool_urls": ["http://127.0.0.1:8100"], "cluster_secret_file": "/secret"}


def test_settings_are_read() -> None:
    found = PoolSettings.read({**GIVEN, "load_timeout_s": 3}, "it")
    assert found.pool_urls == ["http://127.0.0.1:8100"]
    assert found.load_timeout_s == 3.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pool_url": "x"}, "pool_url"),
        ({"pool_urls": []}, "pool_urls"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"staging_bytes": "much"}, "staging_bytes"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"it: .*{words}"):
        PoolSettings.read({**GIVEN, **changes}, "it")


def test_the_secret_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match="cluster_secret_file"):
        PoolSettings.read({"pool_urls": ["http://a:1"]}, "it")


def test_equal_weights_have_one_name_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = []
    for place, content in {"a": b"1" * 999, "b": b"1" * 999, "c": b"1" * 998 + b"2"}.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / "model.safetensors").write_bytes(content)
        names.append(weights_name(str(tmp_path / place), None, "auto"))
    assert names[0] == names[1] != names[2]


def test_weights_without_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no weights"):
        weights_name(str(tmp_path), None, "auto")
    with pytest.raises(ConfigError, match="is unknown"):
        weights_name("org/model", None, "auto")
    with pytest.raises(ConfigError, match="dummy"):
        weights_name("org/model", "abc", "dummy")
    assert weights_name("org/model", "abc", "auto") == "org/model@abc"
