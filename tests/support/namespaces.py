"""Network namespaces and bridges of tests: their commands, and what killed tests left behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

SINK = "x"
"""Ends the name of a bridge to which nothing is attached: what is sent there is lost."""


def ip(*words: str) -> str:
    """Run ip(8) and return what it prints.

    Raises:
        OSError: it failed; the message is what it said.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not(prefix: str) -> str:
    """Return why this machine cannot have namespaces; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{prefix}probe{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no namespaces here: {error}"
    return ""


def sweep(prefix: str) -> None:
    """Take away namespaces and bridges named PREFIX and a pid, whose process has ended."""
    for name in [line.split()[0] for line in ip("netns", "list").splitlines() if line]:
        if _is_left(name.partition("-")[0], prefix):
            ip("netns", "delete", name)
    for link in json.loads(ip("-json", "link", "show", "type", "bridge")):
        if _is_left(link.get("ifname", "").removesuffix(SINK), prefix):
            ip("link", "delete", link["ifname"])


def _is_left(tag: str, prefix: str) -> bool:
    pid = tag.removeprefix(prefix)
    return tag != pid and pid.isdigit() and not Path(f"/proc/{pid}").exists()
