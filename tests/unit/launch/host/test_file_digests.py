"""Lists of digests: every file counts, and what is wrong is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mooncake.base import CheckpointError, ConfigError
from mooncake.launch.host.file_digests import check, digests_of, read_list

FILES = {"config.json": b"{}", "sub/a.txt": b"a", "model.safetensors": b"w"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        file = tmp_path / "m" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return tmp_path / "m"


def test_all_files_are_listed_but_those_of_the_download(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").touch()
    (folder / ".complete-0a").touch()
    wanted = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    assert digests_of(folder) == wanted
    assert check(folder, wanted) == len(FILES)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", b"[]", "config.json has the SHA-256"),
        ("config.json", None, "config.json is missing"),
        ("more.py", b"", "more.py is not in the list"),
    ],
)
def test_a_file_that_is_missing_altered_or_more_is_named(
    folder: Path, name: str, content: bytes | None, problem: str
) -> None:
    wanted = digests_of(folder)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        check(folder, wanted)


def test_a_link_to_nowhere_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "gone").symlink_to("/nowhere")
    with pytest.raises(CheckpointError, match="gone: cannot be read"):
        digests_of(folder)


def test_weights_may_be_away_where_none_are_read_but_never_wrong(folder: Path) -> None:
    wanted = digests_of(folder)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has the"):
        check(folder, wanted, weights=False)
    (folder / "model.safetensors").unlink()
    assert check(folder, wanted, weights=False) == 2
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        check(folder, wanted)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "lists no file"),
        ("abc  file", "line 1 of .* is not a digest and a path"),
        (f"{'0' * 64}  /etc/passwd", "line 1"),
        (f"\n{'0' * 64}  ../x", "line 2"),
        (f"{'0' * 63}g  x", "line 1"),
    ],
)
def test_a_list_that_is_none_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_list(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_list(tmp_path / "none")
