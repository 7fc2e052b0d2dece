"""`mooncake enrol` asks a signer for this process' credential and certificate."""

from __future__ import annotations

import dataclasses

from mooncake.cli.command import Command
from mooncake.launch.config.options import count, setting, text, truth

GROUP = "enrolment"
EXAMPLES = """\
mooncake enrol --signer http://10.0.0.2:8300 --place decode --token-file token --out own
mooncake serve DIR --role decode --join 10.0.0.1:6400 --cluster-secret-file own/credential
mooncake enrol --signer http://10.0.0.2:8300 --place decode --token-file token --out own --renew
"""
NOTES = """\
The folder of --out gets `credential`, and `cert.pem`, `key.pem` and `ca.pem` if the signer has an
authority. Private keys are made here and never leave this machine. --renew keeps them: processes
that were started with the file in --cluster-secret-file read the new credential within seconds.
Renew it well before it expires."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Enrol:
    # fmt: off
    signer: str = setting("", text, GROUP, "URL",
        "where `mooncake signer` listens, http://HOST:PORT", required=True)
    place: str = setting("", text, GROUP, "ROLE",
        "role of this process: head, gateway, prefill, decode or kvstore", required=True)
    token_file: str = setting("", text, GROUP, "FILE",
        "file with the token of this role", required=True)
    out: str = setting("", text, GROUP, "DIR", "folder for the files", required=True)
    address: str | None = setting(None, text, GROUP, "HOST",
        "address at which others reach this process; fail if the signer sees another one")
    wait: int = setting(0, count(0), GROUP, "S",
        "seconds to wait for a signer that does not answer")
    renew: bool = setting(False, truth, GROUP, "",
        "only prolong the credential that is in --out", switch=True)
    # fmt: on


def run(wanted: Enrol) -> int:
    """Write the files."""
    from mooncake.launch.host.enrol import CREDENTIAL, Enrolment, enrol

    credential = enrol(
        Enrolment(
            signer=wanted.signer, place=wanted.place, token_file=wanted.token_file,
            out=wanted.out, address=wanted.address, renew=wanted.renew,
        ),
        wanted.wait,
    )  # fmt: skip
    print(f"{wanted.out}/{CREDENTIAL}: {credential.certificate.name}")
    return 0


COMMANDS = (
    Command(
        words="enrol", summary="get this process' credential and certificate from a signer",
        examples=EXAMPLES, notes=NOTES, settings=Enrol, run=run,
    ),
)  # fmt: skip
