"""Peers are made once, refused while they cannot be reached, and forgotten when they end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mooncake.base.errors import ConfigError
from mooncake.base.ids import SeededIds
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.transfer.net import directory
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.handshake import Credentials


@dataclass(frozen=True, eq=False)
class Peer:
    key: PeerKey

    def __post_init__(self) -> None:
        if not self.key.endpoint:
            raise ConfigError("not an endpoint")

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


def ref(name: str, endpoint: str = "h:1") -> SegmentRef:
    return SegmentRef(name, {"tcp": endpoint}, "host")


@pytest.fixture
def peers() -> PeerDirectory[Peer]:
    credentials = Credentials(
        engine_id="us", credential=own_credential("s", CredentialRole.WORKER), ids=SeededIds(1)
    )
    return PeerDirectory(
        "tcp", credentials, Peer, Peer.end, lambda peer: peer.key.engine_id != "busy"
    )


def test_a_peer_is_made_once(peers: PeerDirectory[Peer]) -> None:
    assert peers.find(ref("a")) is None
    peer = peers.open(ref("a"))
    assert peers.open(ref("a")) is peers.find(ref("a")) is peer
    assert peers.open(ref("a", "h:2")) is not peer
    assert peers.open(ref("b")) is not peer
    assert len(peers.all()) == 3


def test_a_peer_that_refuses_is_refused(peers: PeerDirectory[Peer]) -> None:
    for _ in range(2):
        peers.ended(peers.open(ref("a")).key, "wrong cluster secret")
    with pytest.raises(PeerUnreachable, match="wrong cluster secret"):
        peers.open(ref("a"))
    peers.reached(PeerKey("h:1", "a"))
    peers.ended(peers.open(ref("a")).key, None)
    assert peers.open(ref("a"))


def test_a_malformed_endpoint_and_a_closed_directory_make_no_peer(
    peers: PeerDirectory[Peer],
) -> None:
    with pytest.raises(PeerUnreachable, match="not an endpoint"):
        peers.open(ref("a", ""))
    peer = peers.open(ref("b"))
    assert peers.close() == [peer]
    with pytest.raises(PeerUnreachable, match="closed"):
        peers.open(ref("b"))


def test_peers_with_nothing_to_do_make_room(
    peers: PeerDirectory[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_MANY_PEERS", 3)
    for name in ("busy", "b", "c", "d"):
        peers.open(ref(name))
    assert {peer.key.engine_id for peer in peers.all()} == {"busy", "d"}
