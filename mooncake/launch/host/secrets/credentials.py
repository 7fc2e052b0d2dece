"""Secrets of this machine's processes: private files, signed facts and signed HTTP requests.

The cluster secret never travels: a signature with a credential proves it. A signature names its
purpose, so that it proves nothing elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mooncake.base import ConfigError, MooncakeError
from mooncake.identity.credential import Certificate, Credential, Trust, check_certificate

SCHEME = "Mooncake"
"""The scheme of `WWW-Authenticate: Mooncake CHALLENGE` and of `Authorization: Mooncake CHALLENGE
NONCE CERTIFICATE SIGNATURE`.
"""
SIGNED_S = 60.0
"""A challenge may be answered for this long, by the server's clock. Each signature is valid
once.
"""
MAX_NONCES = 1024
"""Signed requests that are remembered for one credential. Within `SIGNED_S`, further requests of
this credential are refused; others are not affected.
"""

_log = logging.getLogger(__name__)


def sign_request(credential: Credential, method: str, path: str, challenge: str) -> str:
    """Return the `Authorization` header of one HTTP request, which answers the server's
    `challenge`.
    """
    nonce = secrets.token_hex(16)
    signature = credential.sign(_request(method, path, challenge, nonce))
    shown = " ".join(_word(each) for each in (credential.signed, signature))
    return f"{SCHEME} {challenge} {nonce} {shown}"


def _request(*words: str) -> bytes:
    return b"mooncake admin request\0" + " ".join(words).encode()


def _word(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


class RequestVerifier:
    """Checks signatures of requests. Each signature is valid once. Threads may share it."""

    def __init__(
        self,
        trust: Trust,
        now: Callable[[], float],
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`now` returns the seconds of a monotonic clock; credentials expire by `unix_time`."""
        self._trust = trust
        self._boot = secrets.token_bytes(32)
        self._now = now
        self._unix_time = unix_time
        self._lock = threading.Lock()
        self._used: dict[bytes, dict[str, float]] = {}
        """Key of a signer -> nonce -> when it may be forgotten."""

    def challenge(self) -> str:
        """Return what a signature must answer: the time, and a proof that it comes from this
        verifier. Nobody can collect signatures for later, because no other process knows future
        challenges.
        """
        return self._challenge_at(str(int(self._now())))

    def _challenge_at(self, at_s: str) -> str:
        return f"{at_s}-{hmac.new(self._boot, at_s.encode(), hashlib.sha256).hexdigest()}"

    def signer(self, authorization: str, method: str, path: str) -> Certificate | None:
        """Return who signed the request as an answer to a recent challenge. Return None if no
        process of this cluster did, or the signature was used before.
        """
        scheme, _, rest = authorization.partition(" ")
        words = rest.split(" ")
        if scheme.lower() != SCHEME.lower() or len(words) != 4:
            return None
        challenge, nonce, shown, signature = words
        try:
            signer = check_certificate(base64.urlsafe_b64decode(shown), self._trust)
            signer.check_time(self._unix_time())
            signer.check_signature(
                base64.urlsafe_b64decode(signature), _request(method, path, challenge, nonce)
            )
        except (binascii.Error, ValueError, MooncakeError):
            return None
        at_s = challenge.partition("-")[0]
        if not hmac.compare_digest(challenge.encode(), self._challenge_at(at_s).encode()):
            return None
        now_s, end_s = self._now(), int(at_s) + SIGNED_S
        with self._lock:
            self._forget(now_s)
            used = self._used.setdefault(signer.signing_key, {})
            if end_s < now_s or nonce in used or len(used) >= MAX_NONCES:
                return None
            used[nonce] = end_s
            return signer

    def _forget(self, now_s: float) -> None:
        """Forget the nonces whose challenges have expired: no credential is known for longer."""
        for key, used in list(self._used.items()):
            left = {nonce: end_s for nonce, end_s in used.items() if end_s >= now_s}
            self._used[key] = left
            if not left:
                del self._used[key]


def private_dir() -> Path:
    """Return the folder of this user's running processes, mode 0700. It is made if it is missing.

    It is short, because Ray's sockets lie below it and a Unix socket's path has 107 bytes at most.

    Raises:
        ConfigError: it belongs to another user.
    """
    place = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / f"mooncake-{os.geteuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be made: {error.strerror}; name another place: RAY_TMPDIR=DIR"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{place} is not this user's folder; name another place: RAY_TMPDIR=DIR")
    place.chmod(0o700)
    return place


def write_private(path: Path, content: str) -> None:
    """Write a file anew that only this user may read."""
    path.unlink(missing_ok=True)
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(opened, "w") as file:
        file.write(content)


@contextlib.contextmanager
def writing(place: object) -> Iterator[None]:
    """Name `--out` in the error if `place`, which it names, cannot be written inside the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"out: cannot write {place}: {error.strerror}") from error


def write_files(place: Path, files: Mapping[str, str]) -> None:
    """Write private files into the folder that `--out` names. Each is replaced in one step.

    Raises:
        ConfigError: a file cannot be written.
    """
    with writing(place):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in files.items():
            draft = place / f".{name}.{os.getpid()}"
            write_private(draft, content)
            draft.replace(place / name)


def _make_whole(path: Path, content: str) -> None:
    """Make a private file in one step, unless another process has just done so."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    write_private(new, content)
    with contextlib.suppress(FileExistsError):
        os.link(new, path)
    new.unlink()


def secret_file(address: str) -> Path:
    """Return the path at which the first process of the cluster at `address` keeps its secret for
    other processes of this user on this machine.
    """
    return private_dir() / f"{address.replace('/', '_')}.secret"


def kept_secret(address: str) -> str:
    """Return the secret in `secret_file`.

    Raises:
        ConfigError: there is none.
    """
    file = secret_file(address)
    if not file.exists():
        raise ConfigError(
            f"cluster-secret: the cluster at {address} admits only processes that know its secret; "
            "give it by --cluster-secret-file or MOONCAKE_CLUSTER_SECRET (the user who started the "
            "cluster needs none on its machine)"
        )
    return read_secret(file)


def check_mode(path: Path, named: str) -> None:
    """Check who else may read or change a file of secrets that the flag `named` gives. A file that
    others may read is logged.

    Raises:
        ConfigError: every user of this machine may change the file.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"{named}: every user of this machine may change {path} (mode {mode:04o}); run: "
            f"chmod 600 {path}"
        )
    if mode & (stat.S_IROTH | stat.S_IWGRP):
        _warn_once(
            f"{named}: other users of this machine may read or change {path} (mode {mode:04o}); "
            f"run: chmod 600 {path}"
        )


@functools.lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)  # files are read again and again


def read_secret(path: Path, named: str = "cluster-secret-file") -> str:
    """Return the secret in a file that the flag `named` gives, without space around it.

    Raises:
        ConfigError: it cannot be read, is empty, or may be changed by anybody.
    """
    try:
        check_mode(path, named)
        found = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named}: cannot read {path}: {error}") from error
    if not found:
        raise ConfigError(f"{named}: {path} is empty")
    return found


def keep_ray_token_private() -> None:
    """Make Ray's token file if there is no token yet, and keep other users from reading it.

    Ray itself makes it as readable as any other file.

    Raises:
        ConfigError: the file cannot be made, or belongs to another user.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return  # the operator's own
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            path.chmod(0o600)
        else:
            _make_whole(path, secrets.token_hex(32))
    except OSError as error:
        raise ConfigError(
            f"Ray's token: {path}: {error.strerror}; name a file of it in RAY_AUTH_TOKEN_PATH"
        ) from error
