"""Secrets of this machine's processes: private files, and proofs of a secret that never travels.

Keys for one purpose are derived from the cluster secret by HMAC-SHA256 (as HKDF's expand step, RFC
5869), so that what proves it in one place proves nothing in another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from mooncake.base import ConfigError, MooncakeError

SCHEME = "Mooncake"
"""Of `WWW-Authenticate: Mooncake CHALLENGE` and `Authorization: Mooncake CHALLENGE NONCE MAC`."""
SIGNED_S = 60.0
"""A challenge may be answered for so long, by the server's clock; each signature counts once."""
MAX_NONCES = 4096
"""Signed requests remembered; more within `SIGNED_S` are refused."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def derived_key(secret: str, purpose: str) -> bytes:
    """Return the 32-byte key for `purpose`; the secret cannot be computed from it."""
    return hmac.digest(secret.encode(), b"mooncake key 1 " + purpose.encode(), hashlib.sha256)


def seal(data: bytes, secret: str, purpose: str) -> bytes:
    """Return `data` behind a MAC; `unseal` then finds any change. It is not encrypted."""
    return hmac.digest(derived_key(secret, purpose), data, hashlib.sha256) + data


def unseal(sealed: bytes, secret: str, purpose: str) -> bytes:
    """Return what was sealed.

    Raises:
        MooncakeError: it was sealed with another secret, or was altered.
    """
    mac, data = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if not hmac.compare_digest(mac, seal(data, secret, purpose)[:_DIGEST_BYTES]):
        raise MooncakeError("sealed with another secret, or altered")
    return data


def sign_request(secret: str, method: str, path: str, challenge: str) -> str:
    """Return the `Authorization` of one HTTP request that answers the server's `challenge`."""
    nonce = secrets.token_hex(16)
    return f"{SCHEME} {challenge} {nonce} {_request_mac(secret, method, path, challenge, nonce)}"


def _request_mac(secret: str, method: str, path: str, challenge: str, nonce: str) -> str:
    signed = " ".join((method, path, challenge, nonce)).encode()
    return hmac.new(derived_key(secret, "admin request"), signed, hashlib.sha256).hexdigest()


class RequestVerifier:
    """Checks signatures of requests, each of which counts once. Threads may share it."""

    def __init__(self, secret: str, now: Callable[[], float]) -> None:
        """`now` returns seconds of a clock that only goes forward."""
        self._secret = secret
        self._boot = secrets.token_hex(16)
        self._now = now
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}
        """MAC -> when it may be forgotten."""

    def challenge(self) -> str:
        """Return what a signature must answer: the time, and a proof that this verifier named it.

        Signatures cannot be collected for later: no other process knows the challenges to come.
        """
        return self._challenge_at(str(int(self._now())))

    def _challenge_at(self, at_s: str) -> str:
        return f"{at_s}-{derived_key(self._boot, at_s).hex()}"

    def is_valid(self, authorization: str, method: str, path: str) -> bool:
        """Whether the request answers a recent challenge with the secret, for the first time."""
        scheme, _, rest = authorization.partition(" ")
        words = rest.split(" ")
        if scheme.lower() != SCHEME.lower() or len(words) != 3:
            return False
        challenge, nonce, mac = words
        wanted = _request_mac(self._secret, method, path, challenge, nonce)
        if not hmac.compare_digest(mac.encode("latin-1"), wanted.encode()):
            return False
        at_s = challenge.partition("-")[0]
        if not hmac.compare_digest(challenge.encode(), self._challenge_at(at_s).encode()):
            return False
        now_s, end_s = self._now(), int(at_s) + SIGNED_S
        with self._lock:
            self._used = {used: end for used, end in self._used.items() if end >= now_s}
            if end_s < now_s or mac in self._used or len(self._used) >= MAX_NONCES:
                return False
            self._used[mac] = end_s
            return True


def private_dir() -> Path:
    """Return the folder of this user's running processes, mode 0700; it is made where missing.

    It is short, because Ray's sockets lie below it and a Unix socket's path has 107 bytes at most.

    Raises:
        ConfigError: it belongs to another user.
    """
    place = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / f"mooncake-{os.geteuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
    except OSError as error:
        raise ConfigError(f"{place} cannot be made: {error.strerror}") from error
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


def _make_whole(path: Path, content: str) -> None:
    """Make a private file at once, unless another process has just done so."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    write_private(new, content)
    with contextlib.suppress(FileExistsError):
        os.link(new, path)
    new.unlink()


def secret_file(address: str) -> Path:
    """Return where the first process of the cluster at `address` keeps its secret for others of
    this user on this machine.
    """
    return private_dir() / f"{address.replace('/', '_')}.secret"


def read_secret(path: Path, named: str = "cluster-secret-file") -> str:
    """Return the secret in a file that the flag `named` gives, without space around it.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    try:
        found = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named}: cannot read {path}: {error}") from error
    if not found:
        raise ConfigError(f"{named}: {path} is empty")
    return found


def keep_ray_token_private() -> None:
    """Make Ray's token file, where there is no token yet, and take it from other users.

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
