"""Whatever a peer sends is a message or is refused: nothing else reaches the loop that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake.base.errors import MooncakeError
from mooncake.base.ids import SeededIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.transfer.net.handshake import Credentials, HandshakeRefused, Refusal
from mooncake.transfer.rdma import wire as rdma_wire
from mooncake.transfer.shm import wire as shm_wire
from mooncake.transfer.staging import wire as windows

DEPTH = 50_000
"""Of arrays in arrays, in a frame of the length control streams take."""


def first_frame(data: bytes) -> Any:
    """Read it as the first message of a connection."""
    side = Credentials(
        engine_id="us", credential=own_credential("s", CredentialRole.WORKER), ids=SeededIds(1)
    ).accept()
    side.step(data)
    if side.refusal is not None:
        raise HandshakeRefused(side.refusal)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "windows asked": windows.CODEC.decode_ask,
    "windows answered": windows.CODEC.decode_answer,
    "rdma asked": rdma_wire.CODEC.decode_ask,
    "rdma answered": rdma_wire.CODEC.decode_answer,
    "shm asked": shm_wire.CODEC.decode_ask,
    "shm answered": shm_wire.CODEC.decode_answer,
    "handshake": first_frame,
}
deep = b"\x91" * DEPTH + b"\xc0"
FRAMES = {
    "nothing": b"",
    "a cut string": b"\xd9\x20abc",
    "no text": b"\xa2\xff\xfe",
    "a number": b"\x07",
    "an unknown tag": msgspec.msgpack.encode({"type": "dance"}),
    "deep": deep,
    "deep where fields are": b"\x82" + b"\xa1x" + deep + b"\xa4type\xa4open",
    "deep where items are": b"\xdc\x00\x09\xa4drop\x01" + deep,
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_what_is_no_message_is_refused(decode: Callable[[bytes], Any], frame: bytes) -> None:
    with pytest.raises(MooncakeError):
        decode(frame)


@pytest.mark.parametrize("name", DECODERS)
def test_a_refusal_repeats_little_of_what_was_sent(name: str) -> None:
    tagged = msgspec.msgpack.encode({"type": "x" * 9000})
    with pytest.raises(MooncakeError) as refused:
        DECODERS[name](tagged)
    assert len(refused.value.message) < 500


def test_a_refusal_of_the_peer_is_shown_in_short() -> None:
    credential = own_credential("s", CredentialRole.WORKER)
    client = Credentials(engine_id="us", credential=credential, ids=SeededIds(1)).connect("them")
    with pytest.raises(HandshakeRefused, match="the peer refused: no no") as refused:
        client.step(msgspec.msgpack.encode(Refusal("no " * 5000)))
    assert len(refused.value.message) < 1100
