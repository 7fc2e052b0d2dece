"""`mooncake cluster init`: what the machines of a cluster must have besides its file."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from pathlib import Path

from mooncake.base import ConfigError
from mooncake.cli.command import Command
from mooncake.launch.config.cluster_file import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    SAFE,
    SECRET,
    read_cluster_file,
)
from mooncake.launch.config.options import number, setting, text
from mooncake.launch.host.credentials import write_private

AUTHORITY_KEY = "ca-key.pem"
EXAMPLES = """\
mooncake cluster init k2.yaml
mooncake cluster init k2.yaml --out /safe/k2 --days 730
"""
NOTES = """\
When you add a machine to the file, run it again: it keeps what is there and makes what is missing.
Who has the folder `authority` can act as any machine of the cluster: do not copy it to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Init:
    """Settings of `mooncake cluster init`."""

    # fmt: off
    file: str = setting("", text, "cluster", "FILE", "describes the cluster", positional=True,
        required=True)
    out: str | None = setting(None, text, "files", "DIR",
        "where the folders of the machines are made (default: FILE without its ending)")
    days: float = setting(3650.0, number, "certificates", "N",
        "days for which the authority and its certificates are valid")
    # fmt: on


def init(wanted: Init) -> int:
    """Make the secret, the authority, and a folder for each machine; print where they go.

    Raises:
        ConfigError: the file describes no cluster, or a folder cannot be written.
    """
    from mooncake.identity.certificates import (
        Pem,
        make_authority,
        make_host_certificate,
        names_in,
    )

    cluster = read_cluster_file(wanted.file)
    if not wanted.days > 0:
        raise ConfigError(f"days: must be more than 0, not {wanted.days:g}")
    place = Path(wanted.out) if wanted.out else cluster.path.with_suffix("")
    try:
        safe = place / SAFE
        safe.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (safe / SECRET).exists():
            write_private(safe / SECRET, secrets.token_hex(32))
        if not (safe / AUTHORITY_KEY).exists():
            made = make_authority(cluster.path.stem, wanted.days)
            write_private(safe / AUTHORITY, made.certificate)
            write_private(safe / AUTHORITY_KEY, made.key)
        authority = Pem((safe / AUTHORITY).read_text(), (safe / AUTHORITY_KEY).read_text())
        for machine in cluster.machines:
            folder = place / machine.name
            folder.mkdir(mode=0o700, exist_ok=True)
            names = [machine.address, machine.name]
            if not (folder / KEY).exists() or (
                machine.address not in names_in((folder / CERTIFICATE).read_text())
            ):
                own = make_host_certificate(authority, names, None)
                write_private(folder / CERTIFICATE, own.certificate)
                write_private(folder / KEY, own.key)
            write_private(folder / SECRET, (safe / SECRET).read_text())
            write_private(folder / AUTHORITY, authority.certificate)
            shutil.copyfile(cluster.path, folder / cluster.path.name)
    except OSError as error:
        raise ConfigError(f"out: cannot write {place}: {error.strerror}") from error
    print(f"copy each folder to its machine, and keep {safe} off them:")
    for machine in cluster.machines:
        print(f"    scp -r {place / machine.name} {machine.address}:{cluster.path.stem}")
    print(f"then on each machine: cd {cluster.path.stem} && mooncake up {cluster.path.name}")
    return 0


COMMANDS = (
    Command(
        words="cluster init", summary="make the secret and certificates of a cluster's machines",
        examples=EXAMPLES, notes=NOTES, settings=Init, run=init,
    ),
)  # fmt: skip
