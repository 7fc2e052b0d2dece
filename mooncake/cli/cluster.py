"""`mooncake cluster init` makes what the machines of a cluster need besides the cluster's file;
`mooncake up` runs one machine's part of it.
"""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.base.rights import CredentialRole
from mooncake.cli.command import Command
from mooncake.launch.config import options
from mooncake.launch.config.cluster_file import (
    AUTHORITY,
    CERTIFICATE,
    CREDENTIALS,
    KEY,
    RAY_TOKEN,
    SAFE,
    SECRET,
    read_cluster_file,
)
from mooncake.launch.config.options import above_zero, bracketed, setting, text, truth
from mooncake.launch.host.secrets.credentials import read_secret, write_private, writing

if TYPE_CHECKING:
    from mooncake.identity.credential import Keys

AUTHORITY_KEY = "ca-key.pem"
DAY_S = 86_400.0
EXAMPLES = """\
mooncake cluster init k2.yaml
mooncake cluster init k2.yaml --out /safe/k2 --days 730
"""
NOTES = """\
When you change the file or the secret, run the command again: it keeps the credentials and
certificates that are still valid, and makes the others. A machine gets credentials of the roles
that it runs. Whoever has the folder `authority`, with the secret, can act as any machine of the
cluster: do not copy that folder to the machines."""
UP_EXAMPLES = """\
mooncake up k2.yaml                     the same command on every machine of the file
mooncake up k2.yaml --machine node-7    if the file has neither this host name nor this address
mooncake up k2.yaml --labels rack=r7    if the file names its machines by labels
mooncake up k2.yaml --dry-run           only check, and print the commands
"""
UP_NOTES = """\
Credentials and certificates lie beside the file: `mooncake cluster init` makes a folder with
them for each machine. The command starts a process again when it ends. Ctrl-C or SIGTERM takes
this machine out of the cluster; a second one ends its processes at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Init:
    # fmt: off
    file: str = setting("", text, "cluster", "FILE", "file that describes the cluster",
        positional=True, required=True)
    out: str | None = setting(None, text, "files", "DIR",
        "folder in which each machine gets a folder (default: FILE without its ending)")
    days: float = setting(3650.0, above_zero, "certificates", "N",
        "number of days for which the authority, its certificates and the credentials are valid")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpSettings:
    # fmt: off
    file: str = setting("", text, "cluster", "FILE", "file that describes the cluster",
        positional=True, required=True)
    machine: str | None = setting(None, text, "cluster", "NAME",
        "name of this machine in the file (default: that of its labels, host name, or address)")
    labels: tuple[str, ...] = setting((), options.labels, "cluster", "KEY=VALUE,...",
        "labels of this machine; its entry in the file is the one whose labels are all among these",
        env="MOONCAKE_LABELS")
    dry_run: bool = setting(False, truth, "cluster", "",
        "check that everything fits, print the commands, start nothing")
    ray_node: bool = setting(False, truth, "cluster", "",
        "run only this machine's node of Ray; `mooncake up` itself starts such a process")
    # fmt: on


def init(wanted: Init) -> int:
    """Make the secret, the authority, and a folder for each machine, with credentials of the roles
    that run there; print where they go.
    """
    from mooncake.identity.certificates import (
        Pem,
        make_authority,
        make_host_certificate,
        names_in,
    )
    from mooncake.identity.credential import issue

    cluster = read_cluster_file(wanted.file)
    place = Path(wanted.out) if wanted.out else cluster.path.with_suffix("")
    with writing(place):
        safe = place / SAFE
        safe.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (safe / SECRET).exists():
            write_private(safe / SECRET, secrets.token_hex(32))
        secret = read_secret(safe / SECRET)
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
            for file, kind in machine.credentials.items():
                counts, keys = _held(folder / file, secret)
                if not counts:
                    credential = issue(
                        secret, f"{kind.value} of {machine.name}", [kind],
                        expires_s=time.time() + wanted.days * DAY_S,
                        listens=kind is CredentialRole.GATEWAY, keys=keys,
                    )  # fmt: skip
                    write_private(folder / file, credential.text)
            if RAY_TOKEN in machine.bundle:
                if not (safe / RAY_TOKEN).exists():
                    write_private(safe / RAY_TOKEN, secrets.token_hex(32))
                write_private(folder / RAY_TOKEN, read_secret(safe / RAY_TOKEN))
            for stale in {SECRET, RAY_TOKEN, *CREDENTIALS} - {*machine.bundle}:
                (folder / stale).unlink(missing_ok=True)
            write_private(folder / AUTHORITY, authority.certificate)
            shutil.copyfile(cluster.path, folder / cluster.path.name)
    print(f"copy each folder to its machine, and keep {safe} off them:")
    there = cluster.path.stem
    for machine in cluster.machines:
        make = f"ssh {machine.address} mkdir -pm 700 {there}"
        to = shlex.quote(f"{bracketed(machine.address)}:{there}")
        print(f"    {make} && scp {place / machine.name}/* {to}")
    print(f"then on each machine: cd {there} && mooncake up {cluster.path.name}")
    return 0


def _held(file: Path, secret: str) -> tuple[bool, Keys | None]:
    """Return whether the credential in a file is the one for this secret and has not expired; and
    its keys if the secret has a line that signed it. With these keys a running process takes the
    new credential.
    """
    from mooncake.identity.credential import cluster_keys, own_credential, secrets_in

    if not file.exists():
        return False, None
    credential = own_credential(read_secret(file), *CredentialRole)
    is_over = 0 < credential.certificate.expires_s <= time.time()
    wanted = [cluster_keys(line) for line in secrets_in(secret)]
    counts = [*credential.clusters] == wanted and not is_over
    return counts, credential.keys if credential.cluster in wanted else None


def run_up(wanted: UpSettings) -> int:
    if wanted.ray_node:
        from mooncake.launch.cluster.ray_machines.ray_node import run_node

        return run_node(wanted.file, wanted.machine)
    from mooncake.launch.cluster.up import up

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return up(wanted.file, wanted.machine, say, labels=wanted.labels, dry_run=wanted.dry_run)


COMMANDS = (
    Command(
        words="cluster init",
        summary="make the credentials and certificates of a cluster's machines",
        examples=EXAMPLES, notes=NOTES, settings=Init, run=init,
    ),
    Command(words="up", settings=UpSettings, run=run_up, examples=UP_EXAMPLES, notes=UP_NOTES),
)  # fmt: skip
