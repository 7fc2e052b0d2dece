"""Who are you: mutual proof that both ends know the cluster secret, before any byte of KV moves.

Pure: messages in, messages out; the backend carries them. Four messages: hello, challenge, proof,
welcome; either side may answer with a refusal instead. Proofs are HMACs over both nonces and
everything said before, so nothing can be replayed and nobody can sit in the middle unseen. The
first proof is the connecting side's, so a stranger cannot have the owner sign anything.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.base.ids import IdSource
from mooncake.transfer.decoding import decode

HANDSHAKE_VERSION = 1
MAX_HANDSHAKE_BYTES = 16384
MAX_FENCED = 256
NONCE_BYTES = 32


class HandshakeRefused(TransferError):
    """One side will not talk to the other; the message says why."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message: who connects, and to whom."""

    version: int
    engine_id: str
    wanted_engine_id: str
    connection_id: str
    nonce: bytes
    fenced: list[str]
    """Earlier connections of this engine whose writes must not reach memory any more."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    mac: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    mac: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    reason: str


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
class PeerIdentity:
    """Whom a finished handshake has proven."""

    engine_id: str
    connection_id: str
    fenced: tuple[str, ...]


class ConnectingSide:
    """The handshake of who connects: send `first_message`, then feed `step` until `done`."""

    def __init__(self, secret: str, hello: Hello) -> None:
        self.hello = hello
        self._secret = secret
        self._first_message = _ENCODER.encode(hello)
        self._expected_mac: bytes | None = None
        self.done = False

    @property
    def first_message(self) -> bytes:
        return self._first_message

    def step(self, data: bytes | memoryview) -> bytes | None:
        """Take the peer's message and return the answer, if any. Raises HandshakeRefused."""
        message = _decode(data)
        if isinstance(message, Refusal):
            raise HandshakeRefused(f"the peer refused: {message.reason}")
        if isinstance(message, Challenge) and self._expected_mac is None:
            transcript = _transcript(self._first_message, bytes(data))
            self._expected_mac = _mac(self._secret, b"owner", transcript)
            return _ENCODER.encode(Proof(_mac(self._secret, b"visitor", transcript)))
        if isinstance(message, Welcome) and self._expected_mac is not None:
            if not hmac.compare_digest(message.mac, self._expected_mac):
                raise HandshakeRefused("the peer does not know the cluster secret")
            self.done = True
            return None
        raise HandshakeRefused(f"unexpected {type(message).__name__.lower()} in the handshake")


class AcceptingSide:
    """The handshake of who owns the memory: feed `step` until `identity` is there.

    When `refusal` is set after a step, send what it returned and hang up.
    """

    def __init__(self, secret: str, engine_id: str, ids: IdSource) -> None:
        self._secret = secret
        self._engine_id = engine_id
        self._ids = ids
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
            challenge = _ENCODER.encode(Challenge(nonce))
            self._transcript = _transcript(bytes(data), challenge)
            return challenge
        if isinstance(message, Proof) and self._hello is not None and self.identity is None:
            return self._judge(self._hello, message)
        return self._refuse(f"unexpected {type(message).__name__.lower()} in the handshake")

    def _judge(self, hello: Hello, proof: Proof) -> bytes:
        if not hmac.compare_digest(proof.mac, _mac(self._secret, b"visitor", self._transcript)):
            return self._refuse("wrong cluster secret")
        if hello.wanted_engine_id != self._engine_id:
            return self._refuse(
                f"engine {hello.wanted_engine_id} is not here, this is {self._engine_id} "
                "(the worker was restarted)"
            )
        self.identity = PeerIdentity(hello.engine_id, hello.connection_id, tuple(hello.fenced))
        return _ENCODER.encode(Welcome(_mac(self._secret, b"owner", self._transcript)))

    def _refuse(self, reason: str) -> bytes:
        self.refusal = reason
        return _ENCODER.encode(Refusal(reason))


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Who this engine is, and what proves that it belongs to the cluster."""

    engine_id: str
    secret: str = field(repr=False)
    ids: IdSource

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
        return ConnectingSide(self.secret, hello)

    def accept(self) -> AcceptingSide:
        """Return our side of the handshake of a connection a peer has opened."""
        return AcceptingSide(self.secret, self.engine_id, self.ids)
