"""Both ends prove their credentials to each other before any byte of KV moves.

Pure: messages in, messages out. There are four: hello, challenge, proof, welcome; either side may
answer with a refusal instead. A proof signs all earlier messages, including both certificates and
nonces. So it cannot be replayed, and a man in the middle is detected. The client proves itself
first; so a client without a credential cannot make the owner sign anything. The keys that seal all
later bytes come from a key agreement between keys that both sides draw for this connection only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake.base.errors import Forbidden, ProtocolError, TransferError
from mooncake.base.ids import IdSource
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Certificate, Credential, KeyAgreement, check_certificate
from mooncake.transfer.net.codec import decode
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.seals import Seals, session_keys
from mooncake.transfer.net.standing import Standing

HANDSHAKE_VERSION = 4
MAX_HANDSHAKE_BYTES = 16384
MAX_FENCED = 256
MAX_REASON_CHARS = 1024
"""Characters of a peer's reason that are shown."""
NONCE_BYTES = 32


class HandshakeRefused(TransferError):
    """One side refuses the other; the message has the reason."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message, sent by the client."""

    version: int
    engine_id: str
    wanted_engine_id: str
    connection_id: str
    nonce: bytes
    fenced: list[str]
    """Earlier connections of this engine whose writes must not reach memory any more."""
    certificate: bytes
    exchange: bytes
    """The client's key of this connection's key agreement."""
    least: Protection = Protection.NONE
    """The least protection that the client wants."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The second message: it says what the owner wants signed."""

    nonce: bytes
    certificate: bytes
    exchange: bytes
    """The owner's key of this connection's key agreement."""
    protection: Protection
    """The protection of all later bytes, in both directions. Both proofs cover it."""


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The third message: it proves that the client has the keys that its certificate names."""

    signature: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The last message: it proves that the owner has its certificate's keys, and lets the client
    in.
    """

    signature: bytes


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Sent instead of any answer: it says why the sender refuses."""

    reason: str


_CLIENT, _OWNER = b"visitor", b"owner"
"""Names of the sides in what is signed; other releases must agree."""

_Message = Hello | Challenge | Proof | Welcome | Refusal
_DECODER: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)
_ENCODER = msgspec.msgpack.Encoder()


def _decode(data: bytes | memoryview) -> _Message:
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise HandshakeRefused(f"the peer does not speak this protocol: it sent {len(data)} bytes")
    try:
        return decode(_DECODER, data, "handshake")
    except ProtocolError as error:
        raise HandshakeRefused(f"the peer does not speak this protocol: {error}") from error


WORKERS = frozenset((CredentialRole.WORKER,))
WORKERS_AND_CLIENTS = WORKERS | {CredentialRole.POOL_CLIENT}


def _peer(
    signed: bytes, credential: Credential, roles: frozenset[CredentialRole], unix_s: float
) -> Certificate:
    """Return the other side's certificate. Raises HandshakeRefused when it has none of the
    roles.
    """
    try:
        certificate = check_certificate(signed, credential)
        certificate.check_time(unix_s)
    except ProtocolError as error:
        raise HandshakeRefused("wrong cluster secret") from error
    except Forbidden as error:
        raise HandshakeRefused(error.message) from error
    if not roles.intersection(certificate.roles):
        wanted = " or ".join(sorted(role.value for role in roles))
        raise HandshakeRefused(
            f"the credential {certificate.name!r} may not move blocks this way; one of role "
            f"{wanted} may"
        )
    return certificate


def _signed(side: bytes, transcript: bytes) -> bytes:
    return b"mooncake transfer 3 " + side + transcript


def _transcript(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "little") + message for message in messages)


@dataclass(frozen=True)
class Channel:
    """What a side gets from a finished handshake: the seals of both directions."""

    sent: Seals
    received: Seals


def _channel(
    agreed: bytes, transcript: bytes, protection: Protection, *, is_client: bool
) -> Channel:
    to_owner, to_client = (Seals(protection, key) for key in session_keys(agreed, transcript))
    return Channel(to_owner, to_client) if is_client else Channel(to_client, to_owner)


@dataclass(frozen=True)
class PeerIdentity:
    """The client that a finished handshake has proven."""

    engine_id: str
    connection_id: str
    fenced: tuple[str, ...]
    certificate: Certificate
    """The certificate at the time the session was opened; `Standing` knows the newest of the same
    keys.
    """

    @property
    def borrower(self) -> str | None:
        """The name under which memory is lent to it, or None for a worker, which reaches all
        registered memory.
        """
        if CredentialRole.WORKER in self.certificate.roles:
            return None
        return self.certificate.channel_key.hex()


def _agree(agreement: KeyAgreement, public: bytes) -> bytes:
    try:
        return agreement.agree(public)
    except ProtocolError as error:
        raise HandshakeRefused(error.message) from error


def _check(peer: Certificate, signature: bytes, side: bytes, transcript: bytes) -> None:
    try:
        peer.check_signature(signature, _signed(side, transcript))
    except Forbidden as error:
        raise HandshakeRefused(
            "the peer does not hold the keys that its certificate names"
        ) from error


class ConnectingSide:
    """The client's side: send `first_message`, then feed `step` until `done`."""

    def __init__(self, credentials: Credentials, agreement: KeyAgreement, hello: Hello) -> None:
        self.hello = hello
        self._credentials = credentials
        self._agreement = agreement
        self._owner: Certificate | None = None
        self._owner_signed = b""
        self._agreed = b""
        self._first_message = _ENCODER.encode(hello)
        self._transcript: bytes | None = None
        self._protection = credentials.least
        self.channel: Channel | None = None
        """Set when the handshake is done."""

    @property
    def done(self) -> bool:
        """True if the owner has proven itself and let us in."""
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
            least = self._credentials.least
            self._protection = message.protection
            if self._protection.is_weaker(least):
                raise HandshakeRefused(
                    f"the peer's `transfer-protection` is {self._protection.value}, ours is "
                    f"{least.value}: start all processes of the cluster with the same"
                )
            credential = self._credentials.credential
            self._owner = _peer(
                message.certificate, credential, WORKERS, self._credentials.unix_time()
            )
            self._owner_signed = message.certificate
            self._agreed = _agree(self._agreement, message.exchange)
            self._transcript = _transcript(self._first_message, bytes(data))
            return _ENCODER.encode(Proof(credential.sign(_signed(_CLIENT, self._transcript))))
        if isinstance(message, Welcome) and self._owner is not None and self._transcript:
            _check(self._owner, message.signature, _OWNER, self._transcript)
            self._credentials.standing.learn(
                self._owner_signed, self._owner, self.hello.wanted_engine_id
            )
            self.channel = _channel(
                self._agreed, self._transcript, self._protection, is_client=True
            )
            return None
        raise HandshakeRefused(
            f"the peer sent an unexpected {type(message).__name__.lower()} in the handshake"
        )


class AcceptingSide:
    """The owner's side: feed `step` until `identity` is there.

    When `refusal` is set after a step, send what it returned and hang up.
    """

    def __init__(
        self, credentials: Credentials, roles: frozenset[CredentialRole] = WORKERS
    ) -> None:
        """Let clients in whose credentials have one of `roles`."""
        self._credentials = credentials
        self._roles = roles
        self._agreed = b""
        self._protection = credentials.protection
        self._client: Certificate | None = None
        self.channel: Channel | None = None
        """Set together with `identity`."""
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
                return self._refuse("the hello is malformed")
            credentials = self._credentials
            self._client = _peer(
                message.certificate, credentials.credential, self._roles, credentials.unix_time()
            )
            agreement = KeyAgreement(credentials.ids)
            self._agreed = _agree(agreement, message.exchange)
            self._hello = message
            if self._protection.is_weaker(message.least):
                self._protection = message.least
            nonce = bytes.fromhex(credentials.ids.hex(NONCE_BYTES))
            challenge = _ENCODER.encode(Challenge(
                nonce, credentials.credential.signed, agreement.public, self._protection
            ))  # fmt: skip
            self._transcript = _transcript(bytes(data), challenge)
            return challenge
        if isinstance(message, Proof) and self._hello is not None and self.identity is None:
            return self._judge(self._hello, message)
        return self._refuse(
            f"the peer sent an unexpected {type(message).__name__.lower()} in the handshake"
        )

    def _judge(self, hello: Hello, proof: Proof) -> bytes:
        assert self._client is not None
        credentials = self._credentials
        _check(self._client, proof.signature, _CLIENT, self._transcript)
        if hello.wanted_engine_id != credentials.engine_id:
            return self._refuse(
                f"engine {hello.wanted_engine_id} is not here, this is {credentials.engine_id} "
                "(the worker was restarted)"
            )
        credentials.standing.learn(hello.certificate, self._client)
        self.identity = PeerIdentity(
            hello.engine_id, hello.connection_id, tuple(hello.fenced), self._client
        )
        self.channel = _channel(self._agreed, self._transcript, self._protection, is_client=False)
        signature = credentials.credential.sign(_signed(_OWNER, self._transcript))
        return _ENCODER.encode(Welcome(signature))

    def _refuse(self, reason: str) -> bytes:
        self.refusal = reason
        return _ENCODER.encode(Refusal(reason))


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The name of this engine, and what proves that it belongs to the cluster."""

    engine_id: str
    credential: Credential
    ids: IdSource
    protection: Protection = Protection.MAC
    """The protection of peers' connections to us, unless they want more."""
    least: Protection = Protection.NONE
    """The least protection of our connections to peers, which may want more."""
    unix_time: Callable[[], float] = field(default=time.time, repr=False)
    """The clock by which certificates expire."""
    standing: Standing = field(init=False, repr=False)
    """True if peers that have proven themselves still may have sessions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "standing", Standing(self.credential, self.unix_time))

    def connect(self, wanted_engine_id: str, fenced: Sequence[str] = ()) -> ConnectingSide:
        """Return the handshake of a new connection to that engine."""
        agreement = KeyAgreement(self.ids)
        hello = Hello(
            version=HANDSHAKE_VERSION,
            engine_id=self.engine_id,
            wanted_engine_id=wanted_engine_id,
            connection_id=self.ids.hex(8),
            nonce=bytes.fromhex(self.ids.hex(NONCE_BYTES)),
            fenced=list(fenced),
            certificate=self.credential.signed,
            exchange=agreement.public,
            least=self.least,
        )
        return ConnectingSide(self, agreement, hello)

    def accept(self, roles: frozenset[CredentialRole] = WORKERS) -> AcceptingSide:
        """Return our side of the handshake of a connection that a peer of one of `roles` opens."""
        return AcceptingSide(self, roles)
