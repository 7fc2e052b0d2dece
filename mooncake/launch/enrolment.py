"""Both ends of enrolment. The signer of a cluster gives each process a credential for its role and
a certificate for its address; only it knows the cluster secret and the authority's key. A process
draws keys, asks the signer, and keeps the answer in files.

The signer owns an HTTP server. It reads its files at each question, so that a new secret or token
is used at once. The process' side is stateless; only this user can read its files, and each is
replaced in one step.
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from mooncake.base import ConfigError, Forbidden, MooncakeError, Unavailable, Unreachable
from mooncake.base.rights import CredentialRole
from mooncake.base.urls import server_url
from mooncake.identity.certificates import HostKey, Pem, sign_host_key
from mooncake.identity.credential import Credential, Keys, certify, keys_in, listening_seed
from mooncake.identity.enrolment import (
    Enrolled,
    HostCertificate,
    Question,
    checked_token,
    decode,
    encode,
    opened,
    sealed_to,
)
from mooncake.launch.config.options import count, number, positive, setting, text, truth
from mooncake.launch.host.health import probe_routes
from mooncake.launch.host.http_server import Answer, HttpServer, Request, Route, error
from mooncake.launch.host.secrets.credentials import read_secret, write_files
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


CREDENTIAL = "credential"
TIMEOUT_S = 10.0
AGAIN_S = 1.0
MAX_ANSWER_BYTES = 1 << 20
SIGNER, ENROLMENT = "signer", "enrolment"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SignerSettings:
    """The flags of `mooncake signer`."""

    # fmt: off
    cluster_secret_file: str = setting("", text, SIGNER, "FILE",
        "file with the cluster secret", required=True)
    tokens: str = setting("", text, SIGNER, "DIR",
        "folder with a file for each role, which holds its token", required=True)
    authority: str | None = setting(None, text, SIGNER, "DIR",
        "folder that `mooncake certificates authority` made; processes then also get a TLS "
        "certificate")
    name_prefix: str = setting("", text, SIGNER, "TEXT",
        "TLS certificates also name the host TEXT followed by the role")
    hours: float = setting(24.0, positive, SIGNER, "N", "hours that a credential is valid")
    certificate_days: float | None = setting(None, number, SIGNER, "N",
        "days that a TLS certificate is valid (default: as long as the authority's own)")
    host: str = setting("127.0.0.1", text, SIGNER, "HOST", "address to listen on")
    port: int = setting(8300, count(0), SIGNER, "PORT", "port to listen on; 0: any free port")
    audit_log: str | None = setting(None, text, SIGNER, "PATH",
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


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """The flags of `mooncake enrol`."""

    # fmt: off
    signer: str = setting("", text, ENROLMENT, "URL",
        "where `mooncake signer` listens, http://HOST:PORT", required=True)
    place: str = setting("", text, ENROLMENT, "ROLE",
        "role of this process: head, gateway, prefill, decode or kvstore", required=True)
    token_file: str = setting("", text, ENROLMENT, "FILE",
        "file with the token of this role", required=True)
    out: str = setting("", text, ENROLMENT, "DIR", "folder for the files", required=True)
    address: str | None = setting(None, text, ENROLMENT, "HOST",
        "address at which others reach this process; fail if the signer sees another one")
    wait: int = setting(0, count(0), ENROLMENT, "S",
        "seconds to wait for a signer that does not answer")
    renew: bool = setting(False, truth, ENROLMENT, "",
        "only prolong the credential that is in --out")
    # fmt: on


def enrol(wanted: Enrolment) -> Credential:
    """Ask the signer, write the files and return the credential. This asks again for `wait`
    seconds while no signer answers.

    Raises:
        Unavailable: no signer answers.
        MooncakeError: it refuses, or sees this process at another address.
    """
    end_s = time.monotonic() + wanted.wait
    told = False
    while True:
        try:
            return _enrol_once(wanted)
        except Unavailable as problem:
            if time.monotonic() > end_s:
                raise
            if not told:
                _log.warning("%s; trying again for up to %d s", problem.message, wanted.wait)
            told = True
            time.sleep(AGAIN_S)


def _enrol_once(wanted: Enrolment) -> Credential:
    if wanted.place not in PLACES:
        raise ConfigError(f"place: {wanted.place!r} is not one of {', '.join(PLACES)}")
    token = checked_token(read_secret(Path(wanted.token_file), "token-file"), "token-file")
    out = Path(wanted.out)
    keys, host_key = Keys.drawn(), HostKey()
    if wanted.renew:
        keys = keys_in(read_secret(out / CREDENTIAL, "out"))
    question = encode(Question(secrets.token_bytes(16), keys.public, host_key.public), token)
    answer = decode(_asked(wanted.signer, wanted.place, question), Enrolled, token, question)
    if wanted.address is not None and answer.address != wanted.address:
        raise MooncakeError(
            f"the signer sees this process at {answer.address}, but others reach it at "
            f"{wanted.address}: the certificate would name the wrong address. Connect to the "
            "signer without address translation (NAT, a proxy)"
        )
    issued = answer.issued
    listening = opened(answer.listening, keys) if answer.listening else b""
    credential = Credential(
        keys.seed, issued.signed, issued.cluster, None, issued.others, listening
    )
    files = {CREDENTIAL: credential.text + "\n"}
    if answer.host is not None and not wanted.renew:
        files |= {
            "cert.pem": answer.host.certificate, "key.pem": host_key.pem,
            "ca.pem": answer.host.authority,
        }  # fmt: skip
    write_files(out, files)
    return credential


def _asked(url: str, place: str, question: bytes) -> bytes:
    signer = server_url("signer", url, schemes=("http",))
    connection = http.client.HTTPConnection(signer.host, signer.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", PATH + place, question)
        response = connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"no signer answers at {url}: {error}") from error
    finally:
        connection.close()
    if response.status in (429, 503):
        raise Unavailable(f"the signer at {url} cannot sign now: {_shown(body)}")
    if response.status in (401, 403):
        raise Forbidden(f"the signer at {url} refuses: {_shown(body)}")
    if response.status != 200:
        raise MooncakeError(f"the signer at {url} refuses: {_shown(body)}")
    return body


def _shown(body: bytes) -> str:
    return " ".join(body[:500].decode(errors="replace").split())
