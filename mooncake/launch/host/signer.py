"""The signer of a cluster. Only it knows the cluster secret and the authority's key. It gives each
process a credential for its role and a certificate for its address.

Owns an HTTP server. It reads its files at each question, so that a new secret or token is used at
once.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from mooncake.base import ConfigError, MooncakeError
from mooncake.base.errors import Forbidden
from mooncake.base.rights import CredentialRole
from mooncake.identity import certify, listening_seed
from mooncake.identity.certificates import Pem, sign_host_key
from mooncake.identity.enrolment import (
    Enrolled,
    HostCertificate,
    Question,
    checked_token,
    decode,
    encode,
    sealed_to,
)
from mooncake.launch.config.options import count, number, positive, setting, text
from mooncake.launch.host.credentials import read_secret
from mooncake.launch.host.health import probe_routes
from mooncake.launch.host.http_server import Answer, HttpServer, Request, Route, error
from mooncake.telemetry.audit import audit
from mooncake.telemetry.health import Vitals

PATH = "/v1/enrol/"
"""The path at which a process asks, followed by its place."""
BYTES = "application/octet-stream"
PLACES: Mapping[str, CredentialRole] = {
    "gateway": CredentialRole.GATEWAY,
    "prefill": CredentialRole.WORKER,
    "decode": CredentialRole.WORKER,
    "kvstore": CredentialRole.WORKER,
    "head": CredentialRole.WORKER,
}
"""What each kind of process may do. The head is Ray's and needs only a certificate."""


GROUP = "signer"


@dataclass(frozen=True, kw_only=True)
class SignerSettings:
    """The flags of `mooncake signer`."""

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


class Signer:
    """Answers processes until `close`."""

    def __init__(self, settings: SignerSettings) -> None:
        """Start to listen.

        Raises:
            ConfigError: a secret, token or authority is missing, or the address cannot be bound.
        """
        self._settings = settings
        read_secret(Path(settings.cluster_secret_file))
        places = [place for place in PLACES if (Path(settings.tokens) / place).exists()]
        if not places:
            named = ", ".join(PLACES)
            raise ConfigError(
                f"tokens: {settings.tokens} has no file with the name of a role; put a token into "
                f"one of {named}"
            )
        for place in places:
            self._token(place)
        self._authority()
        routes = {
            PATH + place: Route("POST", partial(self._answer, place)) for place in places
        } | probe_routes(lambda: [Vitals(joined=True)])
        self._server = HttpServer(settings.host, settings.port, routes, "port")
        self.url = self._server.url

    def close(self) -> None:
        self._server.close()

    def _answer(self, place: str, request: Request) -> Answer:
        try:
            token = self._token(place)
            question = decode(request.body, Question, token)
            enrolled = self._enrolled(place, question, _plain(request.client))
        except MooncakeError as problem:
            is_his = isinstance(problem, Forbidden)
            audit("enrolment_refused", place=place, whence=request.client, reason=problem.message)
            status = HTTPStatus.FORBIDDEN if is_his else HTTPStatus.SERVICE_UNAVAILABLE
            return error(status, problem.message)
        audit("enrolled", kind=place, place=place, whence=request.client)
        return Answer(HTTPStatus.OK, BYTES, encode(enrolled, token, request.body))

    def _enrolled(self, place: str, question: Question, address: str) -> Enrolled:
        settings = self._settings
        secret, role = read_secret(Path(settings.cluster_secret_file)), PLACES[place]
        issued = certify(
            secret, f"{place} {address}", [role], question.keys,
            expires_s=time.time() + settings.hours * 3600.0,
        )  # fmt: skip
        joined = role is CredentialRole.GATEWAY
        listening = sealed_to(question.keys, listening_seed(secret)) if joined else b""
        host = None
        if (authority := self._authority()) is not None:
            names = [address, *([settings.name_prefix + place] * bool(settings.name_prefix))]
            signed = sign_host_key(authority, names, settings.certificate_days, question.host_key)
            host = HostCertificate(signed, authority.certificate)
        return Enrolled(issued, host, address, listening)

    def _token(self, place: str) -> bytes:
        file = Path(self._settings.tokens) / place
        return checked_token(read_secret(file, "tokens"), str(file))

    def _authority(self) -> Pem | None:
        if self._settings.authority is None:
            return None
        place = Path(self._settings.authority)
        try:
            return Pem(*((place / name).read_text() for name in ("ca.pem", "ca-key.pem")))
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"authority: {place} cannot be read: {problem}") from problem


def _plain(address: str) -> str:
    """Return an IPv4 address as such, also if it came by an IPv6 socket."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
