"""`mooncake certificates` makes a small authority, and host certificates that it signs, for TLS."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.base import ConfigError
from mooncake.cli.command import Command
from mooncake.launch.config.options import above_zero, setting, text, texts, truth
from mooncake.launch.host.secrets.credentials import write_files

if TYPE_CHECKING:
    from mooncake.identity.certificates import Pem

CA_CERTIFICATE = "ca.pem"
CA_KEY = "ca-key.pem"
CERTIFICATE = "cert.pem"
KEY = "key.pem"

AUTHORITY_EXAMPLES = """\
mooncake certificates authority --out ca
mooncake certificates authority --out ca --days 730 --json
"""
HOST_EXAMPLES = """\
mooncake certificates host --authority ca --name 10.0.0.7 --name node-7 --out node-7
mooncake serve DIR --host 10.0.0.7 --ssl-certfile node-7/cert.pem --ssl-keyfile node-7/key.pem
"""
NOTES = f"""\
An authority is {CA_CERTIFICATE} and {CA_KEY}; a host {CERTIFICATE}, {KEY} and the {CA_CERTIFICATE}
that signed it. Only this user may read them. Who has {CA_KEY} can be any host: keep it off them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Authority:
    # fmt: off
    out: str = setting("", text, "files", "DIR",
        "directory to write the authority to", required=True)
    name: str = setting("mooncake", text, "certificate", "NAME", "name of the authority")
    days: float = setting(3650.0, above_zero, "certificate", "N",
        "days that the authority is valid from now")
    json: bool = setting(False, truth, "output", "", "print what was made as JSON")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    # fmt: off
    authority: str = setting("", text, "files", "DIR", "directory of the authority", required=True)
    out: str = setting("", text, "files", "DIR",
        "directory to write the certificate to; an older one there is replaced", required=True)
    name: tuple[str, ...] = setting((), texts, "certificate", "NAME",
        "address or name by which others reach the host; may be repeated; 127.0.0.1 and localhost "
        "are added", repeat=True, required=True)
    days: float | None = setting(None, above_zero, "certificate", "N",
        "days that the certificate is valid from now (default: as long as the authority's)")
    json: bool = setting(False, truth, "output", "", "print what was made as JSON")
    # fmt: on


def authority(wanted: Authority) -> int:
    """Write an authority. It never overwrites another one."""
    from mooncake.identity.certificates import make_authority

    place = Path(wanted.out)
    if (place / CA_KEY).exists():
        raise ConfigError(
            f"out: {place / CA_KEY} exists already; certificates that it signed would be invalid "
            "with a new one; name another directory"
        )
    made = make_authority(wanted.name, wanted.days)
    write_files(place, {CA_CERTIFICATE: made.certificate, CA_KEY: made.key})
    _tell(made, [place / CA_CERTIFICATE, place / CA_KEY], wanted.json)
    return 0


def host(wanted: Host) -> int:
    """Write a host's certificate and key, and the certificate of the authority."""
    from mooncake.identity.certificates import Pem, make_host_certificate

    source, place = Path(wanted.authority), Path(wanted.out)
    try:
        signer = Pem((source / CA_CERTIFICATE).read_text(), (source / CA_KEY).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"authority: {source} has no {CA_CERTIFICATE} and {CA_KEY} ({error}); "
            "`mooncake certificates authority` makes them"
        ) from error
    made = make_host_certificate(signer, wanted.name, wanted.days)
    files = {CERTIFICATE: made.certificate, KEY: made.key, CA_CERTIFICATE: signer.certificate}
    write_files(place, files)
    _tell(made, [place / name for name in files], wanted.json)
    return 0


def _tell(made: Pem, files: list[Path], as_json: bool) -> None:
    from mooncake.identity.certificates import expiry, fingerprint

    facts = {
        "files": [str(file) for file in files],
        "expires": expiry(made).isoformat(),
        "sha256": fingerprint(made),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(f"{', '.join(facts['files'])}: until {expiry(made):%Y-%m-%d}, SHA-256 {facts['sha256']}")


COMMANDS = (
    Command(
        words="certificates authority", summary="make an authority that signs hosts' certificates",
        examples=AUTHORITY_EXAMPLES, notes=NOTES, settings=Authority, run=authority,
    ),
    Command(
        words="certificates host", summary="make the certificate of a host, for TLS at both ends",
        examples=HOST_EXAMPLES, notes=NOTES, settings=Host, run=host,
    ),
)  # fmt: skip
