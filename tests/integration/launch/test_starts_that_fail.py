"""A start that fails leaves no socket and no process: nobody would close them later."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import CheckpointError, ConfigError, InternalError, Shape, SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.direct import DirectEngine
from mooncake.launch.worker.ranks import expert_peers, far_ranks, rank_host
from mooncake.launch.worker.ranks.far_ranks import FarStages, RankWanted
from mooncake.launch.worker.ranks.rank_host import RankHost
from mooncake.launch.worker.weights.open_model import open_model
from mooncake.model.options import ExpertGroup, ModelOptions
from mooncake.transfer.net.blocking import shake_hands
from tests.support.waiting import LONG_S

CREDENTIAL = own_credential("hush", CredentialRole.WORKER)


class Closed:
    """Something that is closed once."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The ends of all socket pairs that are made."""
    made: list[socket.socket] = []
    pair = socket.socketpair

    def recorded(*words: Any) -> tuple[socket.socket, socket.socket]:
        made.extend(pair(*words))
        return made[-2], made[-1]

    monkeypatch.setattr(socket, "socketpair", recorded)
    return made


def refuse(*_: object, **__: object) -> None:
    raise OSError("cut")


def test_the_link_to_a_stage_that_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(Closed):
        send = refuse

    link = Cut()
    monkeypatch.setattr(far_ranks.SealedLink, "connect", lambda *_: link)
    with pytest.raises(ConfigError, match=r"starts no rank \(cut\)"):
        FarStages((("here", 1),), "127.0.0.1", CREDENTIAL).start(0)
    assert link.num_closed == 1


def test_the_link_to_a_follower_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, pairs: list[socket.socket]
) -> None:
    class Asks:
        def receive(self) -> bytes:
            return msgspec.msgpack.encode(RankWanted(time.monotonic()))

    monkeypatch.setattr(rank_host, "start_follower", refuse)
    host = RankHost("127.0.0.1", 0, CREDENTIAL)
    with pytest.raises(OSError, match="cut"):
        host._follow(Asks(), "a test")  # type: ignore[arg-type]
    host.close()
    assert [each.fileno() for each in pairs] == [-1, -1]


def test_the_links_of_workers_that_share_experts_and_do_not_get_them(
    monkeypatch: pytest.MonkeyPatch, pairs: list[socket.socket]
) -> None:
    name = f"decode-0 of a test {SystemIds().hex(8)}"
    group = ExpertGroup(name=name, number=0, size=2, workers=("decode-0", "decode-1"))
    monkeypatch.setattr(socket, "send_fds", refuse)
    failed: list[Exception] = []

    def first() -> None:
        try:
            expert_peers.meet(group, CREDENTIAL, ModelOptions(shape=Shape(dp=2, ep=2)))
        except InternalError as error:
            failed.append(error)

    before = set(os.listdir("/proc/self/fd"))
    meeting = threading.Thread(target=first)
    meeting.start()
    with socket.socket(socket.AF_UNIX) as sock:
        while sock.connect_ex(expert_peers._address(name)):
            assert meeting.is_alive()
        side = expert_peers._credentials(group, CREDENTIAL, 1).connect(f"{name}/0")
        shake_hands(sock, side, time.monotonic() + LONG_S)
        meeting.join(LONG_S)
    assert "do not meet: cut" in str(failed[0])
    assert [each.fileno() for each in pairs] == [-1, -1]
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("shape", [Shape(), Shape(tp=2)])
def test_links_to_workers_with_a_model_that_cannot_be_opened(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, peers = Closed(), Closed()
    monkeypatch.setattr("mooncake.launch.worker.ranks.rank_processes.start_ranks", lambda *_: lead)
    with pytest.raises(CheckpointError):
        open_model(str(tmp_path), "float32", ModelOptions(shape=shape), peers)  # type: ignore[arg-type]
    assert (peers.num_closed, lead.num_closed) == (1, int(shape.num_ranks > 1))


def test_the_model_of_an_engine_whose_runner_does_not_end() -> None:
    class Stuck:
        close = refuse

    engine, source = DirectEngine.__new__(DirectEngine), Closed()
    engine._runner, engine._source = Stuck(), source  # type: ignore[assignment]
    with pytest.raises(OSError, match="cut"):
        engine.close()
    assert source.num_closed == 1
