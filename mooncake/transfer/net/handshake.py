"""Mutual proof that both ends know the cluster secret, before any byte of KV moves.

Pure: messages in, messages out. There are four: hello, challenge, proof, welcome; either side may
answer with a refusal instead. Proofs are HMACs over both nonces and all messages before, so they
cannot be replayed, and a man in the middle is found out. The client proves itself first, so that
without the secret it cannot have the owner sign anything. The keys that seal all later bytes come
from the secret and the same messages.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.base.ids import IdSource
from mooncake.transfer.net.codec import decode
from mooncake.transfer.net.protection import Protection
from mooncake.transfer.net.seals import Seals, session_keys

HANDSHAKE_VERSION = 3
MAX_HANDSHAKE_BYTES = 16384
MAX_FENCED = 256
MAX_REASON_CHARS = 1024
"""What is shown of a peer's reason."""
NONCE_BYTES = 32


class HandshakeRefused(TransferError):
    """One side refuses the other; the message has the reason."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message, of the client."""

    version: int
    engine_id: str
    wanted_engine_id: str
    connection_id: str
    nonce: bytes
    fenced: list[str]
    """Earlier connections of this engine whose writes must not reach memory any more."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Second message: what the owner wants signed."""

    nonce: bytes
    protection: Protection
    """Of all later bytes, in both directions. Both proofs cover it."""


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """Third message: the client knows the secret."""

    mac: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Last message: the owner knows the secret, and lets the client in."""

    mac: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """In place of any answer: why not."""

    reason: str


_CLIENT, _OWNER = b"visitor", b"owner"
"""Names of the sides in what is signed; other releases must agree."""

_Message = Hello | Challenge | Proof | Welcome | Refusal
_DECODER: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)
_ENCODER = msgspec.msgpack.Encoder()


def _decode(data: bytes | memoryview) -> _Message:
    try:
        return decode(_DECODER, data, "handshake")
    except ProtocolError as error:
        raise HandshakeRefused(f"the peer does not speak this protocol: {error}") from error


def _mac(secret: str, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"mooncake transfer 1 " + side + transcript, hashlib.sha256)


def _transcript(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "little") + message for message in messages)


@dataclass(frozen=True)
class Channel:
    """What a finished handshake gives a side: the seals of both directions."""

    sent: Seals
    received: Seals


def _channel(secret: str, transcript: bytes, protection: Protection, *, is_client: bool) -> Channel:
    to_owner, to_client = (Seals(protection, key) for key in session_keys(secret, transcript))
    return Channel(to_owner, to_client) if is_client else Channel(to_client, to_owner)


@dataclass(frozen=True)
class PeerIdentity:
    """The client that a finished handshake has proven."""

    engine_id: str
    connection_id: str
    fenced: tuple[str, ...]


class ConnectingSide:
    """The client's side: send `first_message`, then feed `step` until `done`."""

    def __init__(self, secret: str, hello: Hello, least: Protection = Protection.NONE) -> None:
        """`least`: an owner that protects bytes from less is refused."""
        self.hello = hello
        self._secret = secret
        self._least = least
        self._first_message = _ENCODER.encode(hello)
        self._transcript: bytes | None = None
        self._protection = least
        self.channel: Channel | None = None
        """There when the handshake is done."""

    @property
    def done(self) -> bool:
        """Whether the owner has proven itself and let us in."""
        return self.channel is not None

    @property
    def first_message(self) -> bytes:
        return self._first_message

    def step(self, data: bytes | memoryview) -> bytes | None:
        """Take the peer's message and return the answer, if any. Raises HandshakeRefused."""
        message = _decode(data)
        if isinstance(message, Refusal):
            raise HandshakeRefused(f"the peer refused: {message.reason:.{MAX_REASON_CHARS}}")
        if isinstance(message, Challenge) and self._transcript is None:
            self._protection = message.protection
            if self._protection.is_weaker(self._least):
                raise HandshakeRefused(
                    f"the peer's --transfer-protection is {self._protection.value}, ours is "
                    f"{self._least.value}: start all processes of the cluster with the same"
                )
            self._transcript = _transcript(self._first_message, bytes(data))
            return _ENCODER.encode(Proof(_mac(self._secret, _CLIENT, self._transcript)))
        if isinstance(message, Welcome) and self._transcript is not None:
            expected = _mac(self._secret, _OWNER, self._transcript)
            if not hmac.compare_digest(message.mac, expected):
                raise HandshakeRefused("the peer does not know the cluster secret")
            self.channel = _channel(
                self._secret, self._transcript, self._protection, is_client=True
            )
            return None
        raise HandshakeRefused(f"unexpected {type(message).__name__.lower()} in the handshake")


class AcceptingSide:
    """The owner's side: feed `step` until `identity` is there.

    When `refusal` is set after a step, send what it returned and hang up.
    """

    def __init__(
        self,
        secret: str,
        engine_id: str,
        ids: IdSource,
        protection: Protection = Protection.MAC,
    ) -> None:
        self._secret = secret
        self._engine_id = engine_id
        self._ids = ids
        self._protection = protection
        self.channel: Channel | None = None
        """There as soon as `identity` is."""
        self._hello: Hello | None = None
        self._transcript = b""
        self.identity: PeerIdentity | None = None
        self.refusal: str | None = None

    def step(self, data: bytes | memoryview) -> bytes:
        """Take the peer's message and return the answer."""
        try:
            return self._step(data)
        except HandshakeRefused as error:
            return self._refuse(error.message)

    def _step(self, data: bytes | memoryview) -> bytes:
        message = _decode(data)
        if isinstance(message, Hello) and self._hello is None:
            if message.version != HANDSHAKE_VERSION:
                return self._refuse(
                    f"transfer protocol version {message.version} is not {HANDSHAKE_VERSION}: "
                    "run the same release on all workers"
                )
            if len(message.nonce) != NONCE_BYTES or len(message.fenced) > MAX_FENCED:
                return self._refuse("malformed hello")
            self._hello = message
            nonce = bytes.fromhex(self._ids.hex(NONCE_BYTES))
            challenge = _ENCODER.encode(Challenge(nonce, self._protection))
            self._transcript = _transcript(bytes(data), challenge)
            return challenge
        if isinstance(message, Proof) and self._hello is not None and self.identity is None:
            return self._judge(self._hello, message)
        return self._refuse(f"unexpected {type(message).__name__.lower()} in the handshake")

    def _judge(self, hello: Hello, proof: Proof) -> bytes:
        if not hmac.compare_digest(proof.mac, _mac(self._secret, _CLIENT, self._transcript)):
            return self._refuse("wrong cluster secret")
        if hello.wanted_engine_id != self._engine_id:
            return self._refuse(
                f"engine {hello.wanted_engine_id} is not here, this is {self._engine_id} "
                "(the worker was restarted)"
            )
        self.identity = PeerIdentity(hello.engine_id, hello.connection_id, tuple(hello.fenced))
        self.channel = _channel(self._secret, self._transcript, self._protection, is_client=False)
        return _ENCODER.encode(Welcome(_mac(self._secret, _OWNER, self._transcript)))

    def _refuse(self, reason: str) -> bytes:
        self.refusal = reason
        return _ENCODER.encode(Refusal(reason))


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The name of this engine, and what proves that it belongs to the cluster."""

    engine_id: str
    secret: str = field(repr=False)
    ids: IdSource
    protection: Protection = Protection.MAC
    """Of peers' connections to us; on ours to them, they decide."""
    least: Protection = Protection.NONE
    """Peers that decide on less are refused."""

    def connect(self, wanted_engine_id: str, fenced: Sequence[str] = ()) -> ConnectingSide:
        """Return the handshake of a new connection to that engine."""
        hello = Hello(
            version=HANDSHAKE_VERSION,
            engine_id=self.engine_id,
            wanted_engine_id=wanted_engine_id,
            connection_id=self.ids.hex(8),
            nonce=bytes.fromhex(self.ids.hex(NONCE_BYTES)),
            fenced=list(fenced),
        )
        return ConnectingSide(self.secret, hello, self.least)

    def accept(self) -> AcceptingSide:
        """Return our side of the handshake of a connection a peer has opened."""
        return AcceptingSide(self.secret, self.engine_id, self.ids, self.protection)
