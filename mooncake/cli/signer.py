"""`mooncake signer`: gives processes credentials and certificates, so that they need no secret."""

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
DIR of --tokens has the files head, gateway, prefill, decode and kvstore, each with a token of its
own (`openssl rand -hex 32`). Who has the token of a role gets that role's credential, and no other.
Tokens and keys do not travel: messages carry tags made with the token. Give each machine its own
token alone, and keep the cluster secret and the authority's key here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signer:
    """Settings of `mooncake signer`."""

    # fmt: off
    cluster_secret_file: str = setting("", text, GROUP, "FILE",
        "the cluster secret, read again at each question", required=True)
    tokens: str = setting("", text, GROUP, "DIR", "with the token of each role", required=True)
    authority: str | None = setting(None, text, GROUP, "DIR",
        "of `mooncake certificates authority`, to sign certificates for TLS, too")
    name_prefix: str = setting("", text, GROUP, "TEXT",
        "certificates are also of the host name TEXT and the role")
    hours: float = setting(24.0, positive, GROUP, "N", "that a credential counts")
    certificate_days: float | None = setting(None, number, GROUP, "N",
        "that a certificate for TLS counts (default: as long as the authority's)")
    host: str = setting("127.0.0.1", text, GROUP, "HOST", "where it listens")
    port: int = setting(8300, count(0), GROUP, "PORT", "0: any free one")
    audit_log: str | None = setting(None, text, GROUP, "PATH",
        "append to this file who got a credential and who was refused, one JSON object a line; -: "
        "write it to standard error")
    # fmt: on


def run(wanted: Signer) -> int:
    """Answer until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: a file is missing or wrong, or the address cannot be used.
    """
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
    print(f"credentials are signed at {server.url}", flush=True)
    stop.wait()
    server.close()
    return 0


COMMANDS = (
    Command(
        words="signer", summary="give processes credentials and certificates of their role",
        examples=EXAMPLES, notes=NOTES, settings=Signer, run=run,
    ),
)  # fmt: skip
