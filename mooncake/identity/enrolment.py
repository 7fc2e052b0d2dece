"""How a process gets a credential and a certificate of its own from a signer that knows the secret.

Both sides know a token of the process' role, which never travels: each message carries a tag made
with it. The process draws its own keys and sends the public ones; what comes back is no secret,
except the key to the sockets of gateways, which only the process' own key can open. A message that
is repeated gives nothing to one who has not the private keys, and an answer counts for
its own question alone. Pure: HTTP and files are the caller's.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mooncake.base.errors import ConfigError, Forbidden, ProtocolError
from mooncake.base.ids import IdSource, SystemIds
from mooncake.identity.credential import KEY_BYTES, Issued, KeyAgreement, Keys, PublicKeys

MIN_TOKEN_CHARACTERS = 32
TAG_BYTES = 32


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What a process asks for."""

    nonce: bytes
    keys: PublicKeys
    """Of its credential."""
    host_key: bytes
    """Of its certificate for TLS, as X.509 encodes it (DER)."""


class HostCertificate(msgspec.Struct, frozen=True, array_like=True):
    """A certificate for TLS, and the authority's, in PEM."""

    certificate: str
    authority: str


class Enrolled(msgspec.Struct, frozen=True, array_like=True):
    """What a process gets."""

    issued: Issued
    host: HostCertificate | None
    """None: the signer has no authority."""
    address: str
    """Of the process as the signer sees it; its certificate is of this address."""
    listening: bytes = b""
    """For gateways: the key to sockets whose address people type, as `sealed_to` the process."""


Message = TypeVar("Message", Question, Enrolled)


def sealed_to(keys: PublicKeys, secret: bytes, ids: IdSource | None = None) -> bytes:
    """Return a secret that only the owner of `keys` can read. Forbidden: they are no keys."""
    once = KeyAgreement(ids or SystemIds())
    try:
        shared = once.agree(keys.channel)
    except ProtocolError as error:
        raise Forbidden(error.message) from error
    return once.public + AESGCM(_sealing_key(shared, once.public)).encrypt(_NONCE, secret, None)


def opened(sealed: bytes, keys: Keys) -> bytes:
    """Return what was sealed to the public half of `keys`. Forbidden: it was not, or is altered."""
    public, data = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
    own = X25519PrivateKey.from_private_bytes(keys.channel_seed)
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
        return AESGCM(_sealing_key(shared, public)).decrypt(_NONCE, data, None)
    except (InvalidTag, ValueError) as error:
        raise Forbidden(
            "the key was encrypted for another process, or changed on its way"
        ) from error


_NONCE = bytes(12)
"""Each key seals once."""


def _sealing_key(shared: bytes, public: bytes) -> bytes:
    return hmac.digest(shared, b"mooncake enrolment seal 1" + public, "sha256")


def checked_token(token: str, name: str) -> bytes:
    """Return a token for tags. ConfigError: it is so short that it could be guessed."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{name}: a token has {MIN_TOKEN_CHARACTERS} characters at least, this has "
            f"{len(token)}: `openssl rand -hex 32` makes one"
        )
    return token.encode()


def encode(message: Question | Enrolled, token: bytes, asked: bytes = b"") -> bytes:
    """Return a message behind its tag. `asked`: what an answer is the answer to."""
    data = msgspec.msgpack.encode(message)
    return _tag(token, type(message), asked, data) + data


def decode(body: bytes, kind: type[Message], token: bytes, asked: bytes = b"") -> Message:
    """Return the message in `body`. Forbidden: its tag was not made with this token."""
    tag, data = body[:TAG_BYTES], body[TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(token, kind, asked, data)):
        raise Forbidden(
            "the message was not made with the token of this role, or changed on its way"
        )
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Forbidden(f"the message is of another release: {error}") from error


def _tag(token: bytes, kind: type, asked: bytes, data: bytes) -> bytes:
    about = hashlib.sha256(asked).digest()
    return hmac.digest(
        token, b"mooncake enrolment 1 " + kind.__name__.encode() + about + data, "sha256"
    )
