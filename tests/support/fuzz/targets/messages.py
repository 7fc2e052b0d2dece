"""Targets: control messages between processes, the handshake, the messages of control sessions."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from mooncake.base.block_events.engine_events import read_engine_events
from mooncake.base.errors import ConfigError, Forbidden, MooncakeError, ProtocolError
from mooncake.base.ids import SeededIds
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.rights import CredentialRole, refusal
from mooncake.identity.credential import PREFIX, Credential, issue, own_credential
from mooncake.launch.host.secrets.credentials import RequestVerifier
from mooncake.rpc.codec import NO_CERTIFICATE, decode, encode, head_of
from mooncake.rpc.zmq_channel import _Gate
from mooncake.scheduler.engines.prefixes import PublishedBlocks
from mooncake.transfer.net.control_link import ControlLink
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.handshake import (
    AcceptingSide,
    ConnectingSide,
    Credentials,
    HandshakeRefused,
)
from mooncake.transfer.net.seals import Seals
from mooncake.transfer.rdma.wire import CODEC as RDMA
from mooncake.transfer.shm.wire import CODEC as SHM
from mooncake.transfer.staging.wire import CODEC as STAGING
from tests.support.fuzz.sockets import LoopStub, pair
from tests.support.fuzz.target import Shape, Target, framed, frames_of, pieces_of, refusal_word

SECRET = "a secret of the cluster"
MAX_STEPS = 16
WHENCE = "127.0.0.1"
"""Where a holder's connection comes from."""
_LOG = logging.getLogger(__name__)


class Rpc(Target):
    """Control messages, as ZeroMQ delivers them."""

    name = "rpc"
    modules = ("mooncake.rpc.codec",)
    shape = Shape.MSGPACK
    skip = len(NO_CERTIFICATE)
    allowed = (ProtocolError,)
    max_bytes = 1_000_000

    def run(self, data: bytes) -> str:
        message: AnyMessage = decode(data)
        again = decode(encode(message))
        assert encode(again) == encode(message), "a message changes when it travels on"
        return type(message).__name__


class EngineEvents(Target):
    """Block events of another engine, and what is remembered of them."""

    name = "engine-events"
    modules = ("mooncake.base.block_events.engine_events", "mooncake.scheduler.engines.prefixes")
    shape = Shape.MSGPACK
    allowed = (ProtocolError,)
    tokens = (b"BlockStored", b"BlockRemoved", b"AllBlocksCleared", b"extra_keys")
    seeds = (
        msgspec.msgpack.encode([1.0, [{
            "type": "BlockStored", "block_hashes": [b"h" * 32, 7], "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4], "block_size": 2, "medium": "GPU",
            "extra_keys": [["salt"], [["image", 0]]], "group_idx": 0,
        }, {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}], 0]),
        msgspec.msgpack.encode([1.0, [
            ["BlockStored", [7], None, [1, 2], 2, None], ["BlockStored", [8], 7, [3, 4], 2],
            ["BlockRemoved", [7]], ["AllBlocksCleared"],
        ]]),
    )  # fmt: skip

    def run(self, data: bytes) -> str:
        known = PublishedBlocks()
        events = read_engine_events(data)
        known.apply("process", events)
        known.check_integrity()
        return " ".join(sorted({type(each).__name__ for each in events})) + f" {len(known) > 0}"


def credentials(engine_id: str, seed: int, protection: Protection = Protection.NONE) -> Credentials:
    """Return what an engine proves itself with; keys and nonces repeat."""
    credential = issue(SECRET, engine_id, [CredentialRole.WORKER], ids=SeededIds(seed))
    return Credentials(
        engine_id=engine_id,
        credential=credential,
        ids=SeededIds(seed),
        protection=protection,
    )


@dataclass(frozen=True)
class Shaken:
    """What a client of `credentials("client", 1)` and an owner of `credentials("owner", 2)` say to
    each other, and how they seal what follows.
    """

    said: list[bytes]
    answered: list[bytes]
    to_owner: Seals
    to_client: Seals


def genuine_handshake(protection: Protection = Protection.NONE) -> Shaken:
    """Have both shake hands, as they always do."""
    client = credentials("client", 1).connect("owner")
    owner = credentials("owner", 2, protection).accept()
    said, answered = [client.first_message], [owner.step(client.first_message)]
    while (more := client.step(answered[-1])) is not None:
        said.append(more)
        answered.append(owner.step(more))
    assert client.channel is not None
    assert owner.channel is not None
    return Shaken(said, answered, client.channel.sent, owner.channel.sent)


ROLES = tuple(CredentialRole)


class Proofs(Target):
    """What shows who somebody is. The first byte says what the rest is: a message of the holder of
    a role's credential; a message with whatever it begins with; the text of a credential; or the
    header of a signed request.
    """

    name = "proofs"
    modules = ("mooncake.identity.credential", "mooncake.rpc.zmq_channel", "mooncake.base.rights")
    shape = Shape.MSGPACK
    skip = 1
    allowed = (ProtocolError, Forbidden, ConfigError)
    tokens = (PREFIX.encode(), b"Mooncake ", b"=", b"\xc0")

    def __init__(self) -> None:
        self._held = [
            issue(SECRET, role.value, [role], tenant="acme", ids=SeededIds(index))
            for index, role in enumerate(ROLES)
        ]
        self._gate = _Gate(self._held[0], lambda: 0.0)
        self._verifier = RequestVerifier(self._held[0].cluster, lambda: 0.0, lambda: 0.0)

    def run(self, data: bytes) -> str:
        kind, rest = data[0] if data else 0, data[1:]
        if kind < len(ROLES):
            return self._message(self._held[kind], head_of(self._held[kind].signed) + rest)
        if kind == len(ROLES):
            return self._message(self._held[0], rest)
        if kind == len(ROLES) + 1:
            given = own_credential(PREFIX + rest.decode("latin-1"), *ROLES)
            return f"credential {given.certificate.name[:20]}"
        signer = self._verifier.signer(rest.decode("latin-1"), "GET", "/v1/pool/stats")
        assert signer is None or signer in [each.certificate for each in self._held]
        return f"signed {signer is not None}"

    def _message(self, held: Credential, data: bytes) -> str:
        holder = self._gate.holder(data, held.certificate.channel_key.hex())
        assert holder.certificate == held.certificate, "a certificate that was not signed"
        message: AnyMessage = decode(data, len(holder.head))
        why = refusal(holder.sender, message, WHENCE) or holder.over(message, len(data), 0.0)
        return f"{type(message).__name__} {why is None}"


class Handshake(Target):
    """Both sides of the handshake. The first byte says which one is fed with the frames."""

    name = "handshake"
    modules = ("mooncake.transfer.net.handshake", "mooncake.transfer.net.codec")
    shape = Shape.FRAMES
    allowed = (HandshakeRefused,)

    def __init__(self) -> None:
        self._genuine = genuine_handshake()

    def run(self, data: bytes) -> str:
        frames = frames_of(data[1:])[:MAX_STEPS]
        if data[:1] == b"\1":
            return self._client(credentials("client", 1).connect("owner"), frames)
        return self._owner(credentials("owner", 2).accept(), frames)

    def _owner(self, side: AcceptingSide, frames: list[bytes]) -> str:
        answers = []
        for frame in frames:
            answers.append(side.step(frame))
            assert len(answers[-1]) < 4096, "a long answer to a stranger"
            if side.refusal is not None:
                break
        if side.identity is not None:
            assert frames[0] == self._genuine.said[0], "an identity that was not proven"
        return f"owner {len(answers)} {refusal_word(HandshakeRefused(side.refusal or 'none'))}"

    def _client(self, side: ConnectingSide, frames: list[bytes]) -> str:
        num_steps = 0
        for frame in frames:
            side.step(frame)
            num_steps += 1
            if side.done:
                assert frames[0] == self._genuine.answered[0], "an owner that was not proven"
                break
        return f"client {num_steps} {side.done}"


class Control(Target):
    """Frames of control sessions. The first byte says of which protocol, whose, and cut how."""

    name = "control"
    modules = (
        "mooncake.transfer.net.control_link", "mooncake.transfer.net.codec",
        "mooncake.transfer.rdma.wire", "mooncake.transfer.staging.wire",
    )  # fmt: skip
    shape = Shape.FRAMES
    max_bytes = 131_072

    def run(self, data: bytes) -> str:
        how = data[0] if data else 0
        codec = (RDMA, STAGING, SHM)[how % 3]
        words: list[str] = []

        def on_frame(body: bytes) -> None:
            message = codec.decode_answer(body) if how % 2 else codec.decode_ask(body)
            assert codec.encode(message), "a message that cannot be written"
            words.append(type(message).__name__)

        loop, (ours, theirs) = LoopStub(), pair()
        ends: list[str] = []
        link = ControlLink(loop, ours, on_frame, ends.append)
        try:
            for piece in pieces_of(data[1:], how // 6):
                if link.closed:
                    break
                theirs.sendall(piece)
                loop.run(ours)
            assert len(ends) <= 1
            assert not ends or link.closed, "a stream that ended and lives"
            words += [refusal_word(MooncakeError(end)) for end in ends]
        finally:
            link.close()
            theirs.close()
        assert not loop.handlers
        return f"{how % 6} {words[-1] if words else 'nothing'}"


def control_seed(kind: int, bodies: list[bytes]) -> bytes:
    """Return an input of `Control`: messages of protocol and side `kind`, whole."""
    return bytes((kind,)) + framed(bodies)
