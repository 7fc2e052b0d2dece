"""`mooncake enrol`: asks a signer for this process' credential and certificate."""

from __future__ import annotations

import dataclasses

from mooncake.cli.command import Command
from mooncake.launch.config.options import count, setting, text, truth

GROUP = "enrolment"
EXAMPLES = """\
mooncake enrol --signer http://10.0.0.2:8300 --place decode --token-file token --out own
mooncake serve DIR --role decode --join 10.0.0.1:6379 --cluster-secret-file own/credential
mooncake enrol --signer http://10.0.0.2:8300 --place decode --token-file token --out own --renew
"""
NOTES = """\
OUT gets `credential`, and where the signer has an authority `cert.pem`, `key.pem` and `ca.pem`.
Keys are drawn here and stay here. With --renew the credential keeps its keys: processes that were
given it by --cluster-secret-file read the new one within seconds. Renew long before it expires."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Enrol:
    """Settings of `mooncake enrol`."""

    # fmt: off
    signer: str = setting("", text, GROUP, "URL", "of `mooncake signer`", required=True)
    place: str = setting("", text, GROUP, "ROLE",
        "head, gateway, prefill, decode or kvstore", required=True)
    token_file: str = setting("", text, GROUP, "FILE", "the token of this role", required=True)
    out: str = setting("", text, GROUP, "DIR", "where the files are written", required=True)
    address: str | None = setting(None, text, GROUP, "HOST",
        "by which others reach this process: refuse what is of another one")
    wait: int = setting(0, count(0), GROUP, "S", "seconds that a signer is waited for")
    renew: bool = setting(False, truth, GROUP, "", "only prolong the credential in DIR",
        switch=True)
    # fmt: on


def run(wanted: Enrol) -> int:
    """Write the files.

    Raises:
        ConfigError: a setting or file is wrong.
        MooncakeError: no signer answers, or it refuses.
    """
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
