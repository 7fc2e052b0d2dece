"""What two engines say to each other about RDMA, over their control stream. Pure.

After the handshake the owner tells its NICs. The visitor then asks for the keys of regions, has
queue pairs opened and closed; payload never comes this way. A queue pair that was closed touches
the owner's memory no more: that is what `PairClosed` means.
"""

from __future__ import annotations

import msgspec

from mooncake.base.errors import ProtocolError
from mooncake.transfer.decoding import decode

MAX_NICS = 64


class NicAddress(msgspec.Struct, frozen=True):
    """How one NIC is reached."""

    name: str
    gid: bytes
    """16 bytes."""
    lid: int
    """InfiniBand only; 0 on Ethernet."""
    mtu: int
    """The verbs' own code: 1 = 256 bytes ... 5 = 4096."""
    ethernet: bool


class PairAddress(msgspec.Struct, frozen=True):
    """One end of a reliable connection."""

    nic: NicAddress
    number: int
    psn: int
    """First packet number this end sends."""


class Inventory(msgspec.Struct, frozen=True, tag="nics"):
    """Owner, first of all: these are my NICs."""

    nics: list[NicAddress]


class AskRegion(msgspec.Struct, frozen=True, tag="region"):
    """Visitor: with which keys do I reach this region?"""

    region_id: int


class RegionKeys(msgspec.Struct, frozen=True, tag="keys"):
    """Owner: with these, one for each NIC by name, until the region is withdrawn."""

    region_id: int
    address: int
    num_bytes: int
    rkeys: dict[str, int]


class RegionUnknown(msgspec.Struct, frozen=True, tag="unknown"):
    """Owner: there is no such region."""

    region_id: int
    reason: str


class OpenPair(msgspec.Struct, frozen=True, tag="open"):
    """Visitor: connect this queue pair of mine to a new one on that NIC of yours."""

    pair_id: int
    nic: str
    visitor: PairAddress


class PairOpened(msgspec.Struct, frozen=True, tag="opened"):
    pair_id: int
    owner: PairAddress


class PairRefused(msgspec.Struct, frozen=True, tag="refused"):
    pair_id: int
    reason: str


class ClosePair(msgspec.Struct, frozen=True, tag="close"):
    """Visitor: destroy it."""

    pair_id: int


class PairClosed(msgspec.Struct, frozen=True, tag="closed"):
    """Owner: nothing that came by this queue pair will touch memory any more."""

    pair_id: int


Ask = AskRegion | OpenPair | ClosePair
Answer = Inventory | RegionKeys | RegionUnknown | PairOpened | PairRefused | PairClosed
_ASK: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Ask | Answer) -> bytes:
    """Return a message as the body of one frame."""
    return _ENCODER.encode(message)


def decode_ask(data: bytes | memoryview) -> Ask:
    """Return a visitor's message. Raises ProtocolError."""
    ask = decode(_ASK, data, "request about RDMA")
    if isinstance(ask, OpenPair):
        _check(ask.visitor.nic)
    return ask


def decode_answer(data: bytes | memoryview) -> Answer:
    """Return an owner's message. Raises ProtocolError."""
    answer = decode(_ANSWER, data, "answer about RDMA")
    if isinstance(answer, Inventory):
        if len(answer.nics) > MAX_NICS:
            raise ProtocolError(f"an engine with {len(answer.nics)} NICs")
        for nic in answer.nics:
            _check(nic)
    elif isinstance(answer, PairOpened):
        _check(answer.owner.nic)
    return answer


def _check(nic: NicAddress) -> None:
    if len(nic.gid) != 16 or not 1 <= nic.mtu <= 5 or not 0 <= nic.lid < 2**16:
        raise ProtocolError(f"malformed address of NIC {nic.name[:32]!r}")
