"""The messages of an RDMA control session. Pure.

After the handshake the owner of the memory lists its NICs. The client then asks for the keys of
regions and has queue pairs opened and closed; payload never comes this way. Before it writes by a
grant it asks for the grant too, so that the owner knows whose queue pairs may write by it.
"""

from __future__ import annotations

import msgspec

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.codec import Codec

MAX_NICS = 64


class NicAddress(msgspec.Struct, frozen=True):
    """The address at which one NIC is reached."""

    name: str
    gid: bytes
    """16 bytes."""
    lid: int
    """InfiniBand only; 0 on Ethernet."""
    mtu: int
    """The verbs' own code: 1 = 256 bytes ... 5 = 4096."""
    ethernet: bool


class PairAddress(msgspec.Struct, frozen=True):
    """The address of one end of a reliable connection."""

    nic: NicAddress
    number: int
    psn: int
    """First packet number this end sends."""


class Inventory(msgspec.Struct, frozen=True, tag="nics"):
    """The owner's first message: its NICs."""

    nics: list[NicAddress]


class AskRegion(msgspec.Struct, frozen=True, tag="region"):
    """The client asks for the keys of a region."""

    region_id: int


class RegionKeys(msgspec.Struct, frozen=True, tag="keys"):
    """The owner's answer: one key for each NIC by name, valid until the region is withdrawn."""

    region_id: int
    address: int
    num_bytes: int
    rkeys: dict[str, int]
    guarded: bool = False
    """True if it is written to by grants only."""


class RegionUnknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The owner's answer: it has no such region."""

    region_id: int
    reason: str


class AskGrant(msgspec.Struct, frozen=True, tag="grant"):
    """The client asks whether it may write by a grant."""

    grant: int


class GrantGood(msgspec.Struct, frozen=True, tag="good"):
    """The owner's answer: the client may write by the grant, on all queue pairs of this session,
    until the session ends.
    """

    grant: int


class GrantRefused(msgspec.Struct, frozen=True, tag="revoked"):
    """The owner's answer: the client may not write by the grant."""

    grant: int
    reason: str


class OpenPair(msgspec.Struct, frozen=True, tag="pair"):
    """The client asks for a new queue pair on the owner's NIC `nic`, connected to `client`.

    Clients of releases that do not ask for grants use another tag, so the owner opens no pair for
    them.
    """

    pair_id: int
    nic: str
    client: PairAddress = msgspec.field(name="visitor")


class PairOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The owner's answer: the address of its end of the new queue pair."""

    pair_id: int
    owner: PairAddress


class PairRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The owner's answer: it opened no queue pair."""

    pair_id: int
    reason: str


class ClosePair(msgspec.Struct, frozen=True, tag="close"):
    """The client asks the owner to destroy its end of a queue pair."""

    pair_id: int


class PairClosed(msgspec.Struct, frozen=True, tag="closed"):
    """The owner's answer: no transfer of this queue pair will touch its memory any more."""

    pair_id: int


Ask = AskRegion | AskGrant | OpenPair | ClosePair
Answer = (
    Inventory
    | RegionKeys
    | RegionUnknown
    | GrantGood
    | GrantRefused
    | PairOpened
    | PairRefused
    | PairClosed
)


def _check(message: Ask | Answer) -> None:
    nics: list[NicAddress] = []
    if isinstance(message, Inventory):
        nics = message.nics
    elif isinstance(message, OpenPair):
        nics = [message.client.nic]
    elif isinstance(message, PairOpened):
        nics = [message.owner.nic]
    if len(nics) > MAX_NICS:
        raise ProtocolError(f"an engine named {len(nics)} NICs, which is none or too many")
    for nic in nics:
        if len(nic.gid) != 16 or not 1 <= nic.mtu <= 5 or not 0 <= nic.lid < 2**16:
            raise ProtocolError(f"malformed address of NIC {nic.name[:32]!r}")


CODEC: Codec[Ask, Answer] = Codec(Ask, Answer, "RDMA", _check)
