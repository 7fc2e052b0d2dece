"""Targets: control messages between processes, the handshake, the messages of control sessions."""

from __future__ import annotations

import logging

from mooncake.base.any_message import AnyMessage
from mooncake.base.errors import MooncakeError, ProtocolError
from mooncake.base.ids import SeededIds
from mooncake.base.rights import CredentialRole
from mooncake.identity import issue
from mooncake.rpc.codec import NO_CERTIFICATE, decode, encode
from mooncake.transfer.net.control_link import ControlLink
from mooncake.transfer.net.handshake import (
    AcceptingSide,
    ConnectingSide,
    Credentials,
    HandshakeRefused,
)
from mooncake.transfer.net.protection import Protection
from mooncake.transfer.rdma.wire import CODEC as RDMA
from mooncake.transfer.shm.wire import CODEC as SHM
from mooncake.transfer.staging.wire import CODEC as STAGING
from tests.support.fuzz.sockets import LoopStub, pair
from tests.support.fuzz.target import Shape, Target, framed, frames_of, pieces_of, refusal_word

SECRET = "a secret of the cluster"
MAX_STEPS = 16
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


def credentials(engine_id: str, seed: int) -> Credentials:
    """Return what an engine proves itself with; keys and nonces repeat."""
    credential = issue(SECRET, engine_id, [CredentialRole.WORKER], ids=SeededIds(seed))
    return Credentials(
        engine_id=engine_id,
        credential=credential,
        ids=SeededIds(seed),
        protection=Protection.NONE,
    )


def genuine_handshake() -> tuple[list[bytes], list[bytes]]:
    """Return what a client of `credentials("client", 1)` and an owner of `credentials("owner", 2)`
    say to each other.
    """
    client = credentials("client", 1).connect("owner")
    owner = credentials("owner", 2).accept()
    said, answered = [client.first_message], [owner.step(client.first_message)]
    while (more := client.step(answered[-1])) is not None:
        said.append(more)
        answered.append(owner.step(more))
    assert client.done
    assert owner.identity is not None
    return said, answered


class Handshake(Target):
    """Both sides of the handshake. The first byte says which one is fed with the frames."""

    name = "handshake"
    modules = ("mooncake.transfer.net.handshake", "mooncake.transfer.net.codec")
    shape = Shape.FRAMES
    allowed = (HandshakeRefused,)

    def __init__(self) -> None:
        self._said, self._answered = genuine_handshake()

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
            assert frames[0] == self._said[0], "an identity that was not proven"
        return f"owner {len(answers)} {refusal_word(HandshakeRefused(side.refusal or 'none'))}"

    def _client(self, side: ConnectingSide, frames: list[bytes]) -> str:
        num_steps = 0
        for frame in frames:
            side.step(frame)
            num_steps += 1
            if side.done:
                assert frames[0] == self._answered[0], "an owner that was not proven"
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
