"""A process' side of enrolment: it draws keys, asks the signer, and keeps the answer in files.

Stateless; only this user can read the files, and each is replaced in one step.
"""

from __future__ import annotations

import http.client
import logging
import os
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake.base import ConfigError, Forbidden, MooncakeError, Unavailable, Unreachable
from mooncake.identity.certificates import HostKey
from mooncake.identity.credential import Credential, Keys, keys_in
from mooncake.identity.enrolment import Enrolled, Question, checked_token, decode, encode, opened
from mooncake.launch.config.options import count, setting, text, truth
from mooncake.launch.host.credentials import read_secret, write_private
from mooncake.launch.host.signer import PATH, PLACES

CREDENTIAL = "credential"
GROUP = "enrolment"
TIMEOUT_S = 10.0
AGAIN_S = 1.0
MAX_ANSWER_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """The flags of `mooncake enrol`."""

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


def enrol(wanted: Enrolment) -> Credential:
    """Ask the signer, write the files and return the credential. While nobody answers it asks
    again, for `wait` seconds.

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
    _write(out, files)
    return credential


def _asked(url: str, place: str, question: bytes) -> bytes:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            f"signer: {url!r} is not a URL of a signer; write it like http://HOST:PORT"
        )
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
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


def _write(place: Path, files: Mapping[str, str]) -> None:
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            draft = place / f".{name}.{os.getpid()}"
            write_private(draft, content)
            draft.replace(place / name)
    except OSError as error:
        raise ConfigError(f"out: cannot write {place}: {error.strerror}") from error
