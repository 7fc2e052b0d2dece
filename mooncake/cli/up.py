"""`mooncake up` runs this machine's part of a cluster over several machines."""

from __future__ import annotations

import dataclasses
import sys

from mooncake.cli.command import Command
from mooncake.launch.config.options import setting, text, truth

EXAMPLES = """\
mooncake up k2.yaml                     the same command on every machine of the file
mooncake up k2.yaml --machine node-7    where neither host name nor address says which one this is
mooncake up k2.yaml --dry-run           only check, and print the commands
"""
NOTES = """\
Credentials and certificates lie beside the file: `mooncake cluster init` makes a folder with
them for each machine. Processes that end are started again. Ctrl-C or SIGTERM takes this machine
out of the cluster; a second one ends its processes at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpSettings:
    # fmt: off
    file: str = setting("", text, "cluster", "FILE", "describes the cluster", positional=True,
        required=True)
    machine: str | None = setting(None, text, "cluster", "NAME",
        "which machine of the file this is (default: the one with this host name, or address)")
    dry_run: bool = setting(False, truth, "cluster", "",
        "check that everything fits, print the commands, start nothing", switch=True)
    ray_node: bool = setting(False, truth, "cluster", "",
        "be this machine's node of Ray alone, which `mooncake up` starts as a process of its own",
        switch=True)
    # fmt: on


def run(wanted: UpSettings) -> int:
    if wanted.ray_node:
        from mooncake.launch.cluster.ray_node import run_node

        return run_node(wanted.file, wanted.machine)
    from mooncake.launch.cluster.up import up

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return up(wanted.file, wanted.machine, say, dry_run=wanted.dry_run)


COMMANDS = (
    Command(
        words="up", summary="run this machine's part of a cluster", examples=EXAMPLES,
        notes=NOTES, settings=UpSettings, run=run,
    ),
)  # fmt: skip
