"""Tells which build of the package this is: its version, and its git revision if that is known."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
from pathlib import Path

import mooncake

DISTRIBUTION = "mooncake-serve"


@functools.cache
def revision() -> str:
    """Return the git revision of the package at the time of the first call: a checkout may change
    while a process runs. It is empty if it is not known.
    """
    return revision_of(Path(mooncake.__file__).parents[1])


def revision_of(top: Path) -> str:
    """Return the git revision of the running package, as `revision` does.

    It is the revision that pip was given, or that of the checkout at `top`, read without running
    git, or the one that an image was built with, in a file beside its Python.
    """
    try:
        told = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        return str(json.loads(told or "{}")["vcs_info"]["commit_id"])
    except (importlib.metadata.PackageNotFoundError, KeyError, ValueError):
        pass
    try:
        return _head(top / ".git")
    except OSError:
        pass
    try:
        return (Path(sys.prefix) / "mooncake-revision").read_text().strip()
    except OSError:
        return ""


def _head(git: Path) -> str:
    """Return the commit of a checkout. Raises OSError if it is not a checkout."""
    if git.is_file():  # of a worktree: "gitdir: PATH"
        git = git.parent / git.read_text().partition(":")[2].strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    shared = git / "commondir"
    common = git / shared.read_text().strip() if shared.exists() else git
    if (common / name).exists():
        return (common / name).read_text().strip()
    for line in (common / "packed-refs").read_text().splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return commit
    return ""
