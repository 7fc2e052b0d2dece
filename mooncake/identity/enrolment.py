"""Gets a process its own credential and certificate from a signer that knows the secret.

Both sides know a token for the process' role. The token never travels: each message carries a tag
made with it. The process draws its own keys and sends the public ones. The answer is not secret,
except the key of gateways' sockets, which only the process' own key can open. A repeated message is
of no use without the private keys, and an answer is valid only for its own question. Pure: the
caller does HTTP and files.
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
    """The public keys for its credential."""
    host_key: bytes
    """The public key for its TLS certificate, as X.509 encodes it (DER)."""


class HostCertificate(msgspec.Struct, frozen=True, array_like=True):
    """A certificate for TLS, and the authority's, in PEM."""

    certificate: str
    authority: str


class Enrolled(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a process."""

    issued: Issued
    host: HostCertificate | None
    """The TLS certificate; None: the signer has no authority."""
    address: str
    """The process' address as the signer sees it; its certificate is for this address."""
    listening: bytes = b""
    """A gateway's key of the sockets whose address people type, made by `sealed_to`."""


Message = TypeVar("Message", Question, Enrolled)


def sealed_to(keys: PublicKeys, secret: bytes, ids: IdSource | None = None) -> bytes:
    """Return a secret that only the owner of `keys` can read. Raises Forbidden when they are not
    keys.
    """
    once = KeyAgreement(ids or SystemIds())
    try:
        shared = once.agree(keys.channel)
    except ProtocolError as error:
        raise Forbidden(error.message) from error
    return once.public + AESGCM(_sealing_key(shared, once.public)).encrypt(_NONCE, secret, None)


def opened(sealed: bytes, keys: Keys) -> bytes:
    """Return what was sealed to the public half of `keys`. Raises Forbidden when it was not, or was
    altered.
    """
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
"""A constant, because each key seals only once."""


def _sealing_key(shared: bytes, public: bytes) -> bytes:
    return hmac.digest(shared, b"mooncake enrolment seal 1" + public, "sha256")


def checked_token(token: str, name: str) -> bytes:
    """Return a token for tags. Raises ConfigError when it is so short that it could be guessed."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{name}: the token has {len(token)} characters and needs at least "
            f"{MIN_TOKEN_CHARACTERS}; `openssl rand -hex 32` makes one"
        )
    return token.encode()


def encode(message: Question | Enrolled, token: bytes, asked: bytes = b"") -> bytes:
    """Return a message with its tag before it. `asked`: the question that an answer answers."""
    data = msgspec.msgpack.encode(message)
    return _tag(token, type(message), asked, data) + data


def decode(body: bytes, kind: type[Message], token: bytes, asked: bytes = b"") -> Message:
    """Return the message in `body`. Raises Forbidden when its tag was not made with this token."""
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
