"""`mooncake up` runs this machine's part of a cluster over several machines."""

from __future__ import annotations

import dataclasses
import sys

from mooncake.cli.command import Command
from mooncake.launch.config import options
from mooncake.launch.config.options import setting, text, truth

EXAMPLES = """\
mooncake up k2.yaml                     the same command on every machine of the file
mooncake up k2.yaml --machine node-7    if the file has neither this host name nor this address
mooncake up k2.yaml --labels rack=r7    if the file names its machines by labels
mooncake up k2.yaml --dry-run           only check, and print the commands
"""
NOTES = """\
Credentials and certificates lie beside the file: `mooncake cluster init` makes a folder with
them for each machine. The command starts a process again when it ends. Ctrl-C or SIGTERM takes
this machine out of the cluster; a second one ends its processes at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpSettings:
    # fmt: off
    file: str = setting("", text, "cluster", "FILE", "file that describes the cluster",
        positional=True, required=True)
    machine: str | None = setting(None, text, "cluster", "NAME",
        "name of this machine in the file (default: that of its labels, host name, or address)")
    labels: tuple[str, ...] = setting((), options.labels, "cluster", "KEY=VALUE,...",
        "labels of this machine; it is the one in the file all of whose labels are among them",
        env="MOONCAKE_LABELS")
    dry_run: bool = setting(False, truth, "cluster", "",
        "check that everything fits, print the commands, start nothing")
    ray_node: bool = setting(False, truth, "cluster", "",
        "run only this machine's node of Ray; `mooncake up` itself starts such a process")
    # fmt: on


def run(wanted: UpSettings) -> int:
    if wanted.ray_node:
        from mooncake.launch.cluster.ray_node import run_node

        return run_node(wanted.file, wanted.machine)
    from mooncake.launch.cluster.up import up

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return up(wanted.file, wanted.machine, say, labels=wanted.labels, dry_run=wanted.dry_run)


COMMANDS = (
    Command(
        words="up", examples=EXAMPLES, notes=NOTES, settings=UpSettings, run=run,
    ),
)  # fmt: skip
