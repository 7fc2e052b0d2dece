"""`mooncake signer` gives processes credentials and certificates, so that they need no secret;
`mooncake enrol` is how a process asks for them.
"""

from __future__ import annotations

import signal
import sys
import threading

from mooncake.cli.command import Command
from mooncake.launch.enrolment import CREDENTIAL, Enrolment, Signer, SignerSettings, enrol

EXAMPLES = """\
mooncake signer --cluster-secret-file secret --tokens tokens --authority ca --host 10.0.0.2
"""
NOTES = """\
The folder of --tokens has files named head, gateway, prefill, decode and kvstore; each holds one
token (`openssl rand -hex 32`). A process that has the token of a role gets a credential of that
role and of no other. Neither tokens nor private keys travel: requests are signed with the token.
Give each machine only the tokens of its roles. The cluster secret and the authority's key stay on
the signer's machine. Files are read again for each request: changes count at once."""
ENROL_EXAMPLES = """\
mooncake enrol --signer http://10.0.0.2:8300 --place decode --token-file token --out own
mooncake serve DIR --role decode --join 10.0.0.1:6400 --cluster-secret-file own/credential
mooncake enrol --signer http://10.0.0.2:8300 --place decode --token-file token --out own --renew
"""
ENROL_NOTES = """\
The folder of --out gets `credential`, and `cert.pem`, `key.pem` and `ca.pem` if the signer has an
authority. Private keys are made here and never leave this machine. --renew keeps them: processes
that were started with the file in --cluster-secret-file read the new credential within seconds.
Renew it well before it expires."""


def run(wanted: SignerSettings) -> int:
    """Answer until SIGTERM or Ctrl-C."""
    from mooncake.telemetry.audit import configure_audit
    from mooncake.telemetry.log import configure_logging

    configure_logging("signer", sys.stderr)
    configure_audit("signer", wanted.audit_log)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = Signer(wanted)
    print(f"the signer listens at {server.url}", flush=True)
    stop.wait()
    server.close()
    return 0


def run_enrol(wanted: Enrolment) -> int:
    """Write the files."""
    credential = enrol(wanted)
    print(f"{wanted.out}/{CREDENTIAL}: {credential.certificate.name}")
    return 0


COMMANDS = (
    Command(
        words="signer", examples=EXAMPLES, notes=NOTES, settings=SignerSettings, run=run,
    ),
    Command(
        words="enrol", settings=Enrolment, run=run_enrol,
        examples=ENROL_EXAMPLES, notes=ENROL_NOTES,
    ),
)  # fmt: skip
