"""A directory appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.model.checkpoint.files.whole_directory import whole_directory


def test_it_appears_when_all_is_written(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with whole_directory(out) as staging:
        (staging / "file").write_text("x")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["file"]
    assert list(out.parent.iterdir()) == [out]
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        whole_directory(out).__enter__()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("other")])
def test_nothing_is_left_of_what_failed(tmp_path: Path, error: Exception) -> None:
    def write() -> None:
        with whole_directory(tmp_path / "out") as staging:
            (staging / "file").write_text("x")
            raise error

    with pytest.raises(
        ConfigError if isinstance(error, OSError) else ValueError, match=error.args[-1]
    ):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file/out: cannot be written"):
        whole_directory(tmp_path / "file" / "out").__enter__()
