"""`mooncake enrol` asks a signer for this process' credential and certificate."""

from __future__ import annotations

from mooncake.cli.command import Command
from mooncake.launch.host.enrol import CREDENTIAL, Enrolment, enrol

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


def run(wanted: Enrolment) -> int:
    """Write the files."""
    credential = enrol(wanted)
    print(f"{wanted.out}/{CREDENTIAL}: {credential.certificate.name}")
    return 0


COMMANDS = (
    Command(
        words="enrol", summary="get this process' credential and certificate from a signer",
        examples=EXAMPLES, notes=NOTES, settings=Enrolment, run=run,
    ),
)  # fmt: skip
