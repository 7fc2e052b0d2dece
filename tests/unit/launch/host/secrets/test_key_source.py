"""Keys from files and the environment; commands are in `tests/integration/launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.crypto.keys import Key
from mooncake.launch.host.secrets.key_source import key_source, needed_keys, read_keys

HEX, OTHER = "ab" * 32, "cd" * 32


def id_of(text: str) -> bytes:
    return Key(bytes.fromhex(text)).id


def test_a_file_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_SSD_KEY", OTHER)
    file = tmp_path / "key"
    file.write_text(f"{HEX}\n")
    monkeypatch.chdir(tmp_path)
    from_file = key_source("ssd-key", "key", None)
    monkeypatch.chdir("/")  # a relative path is one of the process that was told it
    ring = read_keys(from_file)
    assert ring is not None
    assert ring.first.id == id_of(HEX)
    ring = read_keys(key_source("ssd-key", None, None))
    assert ring is not None
    assert ring.first.id == id_of(OTHER)


def test_without_any_there_is_none_and_the_error_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOONCAKE_SSD_KEY", raising=False)
    source = key_source("ssd-key", None, None)
    assert read_keys(source) is None
    with pytest.raises(ConfigError, match="ssd-key: so it is; give `ssd-key-file`, `ssd-key-com"):
        needed_keys(source, "so it is")


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ssd-key-file and ssd-key-command exclude each other"):
        key_source("ssd-key", "a", "b")
    with pytest.raises(ConfigError, match=r"ssd-key-file: cannot read .*nowhere"):
        read_keys(key_source("ssd-key", str(tmp_path / "nowhere"), None))
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match=r"ssd-key-file: .*key is empty"):
        read_keys(key_source("ssd-key", str(tmp_path / "key"), None))
    (tmp_path / "key").write_text("correct horse battery staple")
    with pytest.raises(ConfigError, match=r"ssd-key-file: .*key: word 1 is not a key") as refused:
        read_keys(key_source("ssd-key", str(tmp_path / "key"), None))
    assert "horse" not in str(refused.value)
    monkeypatch.setenv("MOONCAKE_SSD_KEY", "short")
    with pytest.raises(ConfigError, match="MOONCAKE_SSD_KEY: word 1 is not a key"):
        read_keys(key_source("ssd-key", None, None))
