"""The git revision of a checkout, read as git lays it out, and of an image."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from mooncake.launch.host.build import revision_of

COMMIT, OTHER = "a" * 40, "b" * 40


def write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


@pytest.fixture(autouse=True)
def _not_from_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)


def test_a_branch_is_followed_loose_or_packed(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    write(git / "HEAD", "ref: refs/heads/x\n")
    write(git / "packed-refs", f"# pack-refs\n{OTHER} refs/heads/y\n{COMMIT} refs/heads/x\n")
    assert revision_of(tmp_path) == COMMIT
    write(git / "refs/heads/x", f"{OTHER}\n")
    assert revision_of(tmp_path) == OTHER
    write(git / "HEAD", f"{COMMIT}\n")
    assert revision_of(tmp_path) == COMMIT, "a detached head"


def test_a_worktree_is_followed_to_its_repository(tmp_path: Path) -> None:
    git = tmp_path / "main" / "worktrees" / "w"
    write(git / "HEAD", "ref: refs/heads/x\n")
    write(git / "commondir", "../..\n")
    write(tmp_path / "main/refs/heads/x", f"{COMMIT}\n")
    write(tmp_path / "w/.git", f"gitdir: {git}\n")
    assert revision_of(tmp_path / "w") == COMMIT


def test_an_image_says_what_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    write(tmp_path / "mooncake-revision", COMMIT)
    assert revision_of(tmp_path / "nowhere") == COMMIT
    write(tmp_path / "mooncake-revision", "")
    assert revision_of(tmp_path / "nowhere") == "", "it was built without"


def test_what_pip_was_given_comes_first_and_nothing_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert revision_of(tmp_path) == ""

    class Told:
        @staticmethod
        def read_text(_: str) -> str:
            return '{"url": "u", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Told)
    assert revision_of(tmp_path) == "c0ffee"
