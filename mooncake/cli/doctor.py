"""`mooncake doctor` checks a machine, and says what is wrong and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
from rich.console import Console

from mooncake.cli.cluster import UpSettings
from mooncake.cli.command import Command
from mooncake.launch.config.options import same_as, setting, text, truth
from mooncake.telemetry.terminal import plain_table

EXAMPLES = """\
mooncake doctor                              check this machine
mooncake doctor k2.yaml                      check also this machine's part of a cluster
mooncake doctor k2.yaml --json | jq '.[] | select(.state != "ok")'
mooncake doctor k2.yaml --bundle support.tar.gz
"""
NOTES = "The exit code is 1 if a check fails, and 0 if there are only warnings."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    # fmt: off
    file: str = setting("", text, "cluster", "FILE",
        "file that describes the cluster (see `mooncake up`)", positional=True)
    machine: str | None = same_as(UpSettings, "machine", "cluster")
    labels: tuple[str, ...] = same_as(UpSettings, "labels", "cluster")
    json: bool = setting(False, truth, "output", "", "print what was found as JSON")
    bundle: str | None = setting(None, text, "output", "FILE",
        "write the result, the cluster's settings and facts of the machine to a new tar.gz, "
        "without secrets")
    # fmt: on


def run(wanted: Doctor) -> int:
    """Check the machine and print what was found. Return 1 if something fails."""
    from mooncake.launch.cluster import doctor

    findings = doctor.examine(wanted.file or None, wanted.machine, wanted.labels)
    if wanted.bundle is not None:
        doctor.write_bundle(Path(wanted.bundle), findings, wanted.file or None)
    if wanted.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        table = plain_table("", "", "found", "to do")
        for each in findings:
            table.add_row(each.state, each.name, each.found, each.todo)
        Console(markup=False).print(table)  # what the system says may have brackets
    return int(any(each.state == doctor.FAIL for each in findings))


COMMANDS = (
    Command(
        words="doctor", examples=EXAMPLES, notes=NOTES, settings=Doctor, run=run,
    ),
)  # fmt: skip
