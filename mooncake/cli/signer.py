"""`mooncake signer` gives processes credentials and certificates, so that they need no secret."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading

from mooncake.cli.command import Command
from mooncake.launch.config.options import count, number, positive, setting, text

GROUP = "signer"
EXAMPLES = """\
mooncake signer --cluster-secret-file secret --tokens tokens --authority ca --host 10.0.0.2
"""
NOTES = """\
The folder of --tokens has files named head, gateway, prefill, decode and kvstore; each holds one
token (`openssl rand -hex 32`). A process that has the token of a role gets a credential of that
role and of no other. Neither tokens nor private keys travel: requests are signed with the token.
Give each machine only the tokens of its roles. The cluster secret and the authority's key stay on
the signer's machine. Files are read again for each request: changes count at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signer:
    # fmt: off
    cluster_secret_file: str = setting("", text, GROUP, "FILE",
        "file with the cluster secret", required=True)
    tokens: str = setting("", text, GROUP, "DIR",
        "folder with a file for each role, which holds its token", required=True)
    authority: str | None = setting(None, text, GROUP, "DIR",
        "folder that `mooncake certificates authority` made; processes then also get a TLS "
        "certificate")
    name_prefix: str = setting("", text, GROUP, "TEXT",
        "TLS certificates also name the host TEXT followed by the role")
    hours: float = setting(24.0, positive, GROUP, "N", "hours that a credential is valid")
    certificate_days: float | None = setting(None, number, GROUP, "N",
        "days that a TLS certificate is valid (default: as long as the authority's own)")
    host: str = setting("127.0.0.1", text, GROUP, "HOST", "address to listen on")
    port: int = setting(8300, count(0), GROUP, "PORT", "port to listen on; 0: any free port")
    audit_log: str | None = setting(None, text, GROUP, "PATH",
        "file that records who got a credential and who was refused, one JSON object a line; -: "
        "standard error")
    # fmt: on


def run(wanted: Signer) -> int:
    """Answer until SIGTERM or Ctrl-C."""
    from mooncake.launch.host.signer import Signer as Server
    from mooncake.launch.host.signer import SignerSettings
    from mooncake.telemetry.audit import configure_audit
    from mooncake.telemetry.log import configure_logging

    configure_logging("signer", sys.stderr)
    configure_audit("signer", wanted.audit_log)
    stop = threading.Event()
    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, lambda *_: stop.set())
    server = Server(
        SignerSettings(
            host=wanted.host, port=wanted.port, secret_file=wanted.cluster_secret_file,
            tokens=wanted.tokens, authority=wanted.authority, name_prefix=wanted.name_prefix,
            lifetime_s=wanted.hours * 3600.0, certificate_days=wanted.certificate_days,
        )
    )  # fmt: skip
    print(f"the signer listens at {server.url}", flush=True)
    stop.wait()
    server.close()
    return 0


COMMANDS = (
    Command(
        words="signer", summary="give processes credentials and certificates of their role",
        examples=EXAMPLES, notes=NOTES, settings=Signer, run=run,
    ),
)  # fmt: skip
