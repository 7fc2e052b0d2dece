"""Directories whose code is run: who may write to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mooncake_kernels import trusted


def why_not(folder: Path) -> str | None:
    try:
        trusted.checked(folder)
    except trusted.Untrusted as error:
        return str(error)
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    (made / "in").mkdir(parents=True)
    (made / "in" / "code.so").write_bytes(b"")
    return made


def test_a_directory_of_this_user_is_trusted(folder: Path) -> None:
    assert why_not(folder) is None


@pytest.mark.parametrize("place", ["", "in", "in/code.so"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_nothing_in_it_may_be_written_by_others(folder: Path, place: str, mode: int) -> None:
    path = folder / place
    path.chmod(path.stat().st_mode | mode)
    reason = why_not(folder)
    assert reason == f"others may write to {path}: chmod go-w it"


def test_what_is_above_it_may_only_be_written_by_others_where_it_is_sticky(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert why_not(folder) == f"others may write to {folder.parent}: chmod go-w it"
    folder.parent.chmod(0o1777)
    assert why_not(folder) is None


def test_links_in_it_are_refused_and_a_link_to_it_is_followed_once(folder: Path) -> None:
    """Others may change the link afterwards, so the code is read where the link pointed to."""
    to_it = folder.with_name("link")
    to_it.symlink_to(folder)
    assert trusted.checked(to_it) == folder
    (folder / "in" / "other.so").symlink_to("/usr/lib/other.so")
    assert why_not(folder) == f"{folder / 'in' / 'other.so'} is a link"


def test_a_file_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder / "in" / "code.so", 4711, 4711)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    reason = why_not(folder)
    assert reason is not None
    assert "belongs to user" in reason


def test_a_directory_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert why_not(tmp_path / "none") == f"{tmp_path / 'none'}: No such file or directory"
