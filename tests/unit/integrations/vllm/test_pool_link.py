"""The way to a pool that may be away: it is tried anew, not all the time, and one seed does."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import MooncakeError, TransferError, Unavailable
from mooncake.integrations import pool_link
from mooncake.integrations.pool_link import FIRST_PAUSE_S, LONGEST_PAUSE_S, PoolLink
from mooncake.integrations.settings import PoolSettings
from mooncake.integrations.vllm.chunks import RankKv
from mooncake.integrations.vllm.lookups import PoolLookups, logger
from mooncake.launch.pool_client.session import PoolSessionConfig
from tests.support.kvstore.node_world import LAYOUT
from tests.support.waiting import LONG_S


class World:
    """Pool nodes by their URL, sessions, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
        self.up = {"http://a:1", "http://b:1"}
        self.now = 100.0
        self.asked: list[str] = []
        self.opened: list[Any] = []
        monkeypatch.setattr(pool_link, "locate", self._locate)
        monkeypatch.setattr(pool_link, "PoolSession", self._open)
        monkeypatch.setattr(pool_link, "time", SimpleNamespace(monotonic=lambda: self.now))
        secret.touch(0o600)
        secret.write_text("a secret")
        self.settings = PoolSettings(
            pool_urls=["http://a:1", "http://b:1"], cluster_secret_file=str(secret)
        )

    def _locate(self, url: str, secret: str, timeout_s: float) -> PoolSessionConfig:
        assert secret == "a secret"
        assert timeout_s < 10
        self.asked.append(url)
        if url not in self.up:
            raise Unavailable(f"no server answers at {url}")
        return PoolSessionConfig(gateway_address=url, cluster_secret=secret, layout=LAYOUT)

    def _open(self, config: PoolSessionConfig) -> Any:
        self.opened.append(Session(config))
        return self.opened[-1]


class Session:
    block_bytes = 10

    def __init__(self, config: PoolSessionConfig) -> None:
        self.config = config
        self.is_closed = False
        self.error: Exception | None = None
        self.missing = 1
        """Blocks at the end of each run that are not there."""
        self.asked = threading.Semaphore(0)
        """Released with each look-up."""
        self.permits: threading.Semaphore | None = None
        """Each look-up takes one; None: as many as there are look-ups."""

    def match(self, keys: list[bytes]) -> int:
        permits = self.permits
        self.asked.release()
        if permits is not None:
            permits.acquire()
        if self.error is not None:
            raise self.error
        return max(0, len(keys) - self.missing)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path / "secret")


def fail(_session: Session) -> None:
    raise TransferError("broken")


def address(session: Session) -> str:
    return session.config.gateway_address


def test_one_session_serves_all_calls(world: World) -> None:
    link = PoolLink(world.settings, 3.0, logger)
    assert [link.call(address) for _ in range(3)] == ["http://a:1"] * 3
    [session] = world.opened
    assert session.config.timeout_s == 3.0
    link.close()
    assert session.is_closed


def test_the_next_seed_is_asked_when_one_is_down(world: World) -> None:
    world.up = {"http://b:1"}
    assert PoolLink(world.settings, 1.0, logger).call(address) == "http://b:1"


def test_after_a_failure_the_pool_is_left_alone_for_a_while(world: World) -> None:
    link = PoolLink(world.settings, 1.0, logger)
    with pytest.raises(TransferError, match="broken"):
        link.call(fail)
    assert world.opened[0].is_closed
    with pytest.raises(Unavailable, match="a moment ago"):
        link.call(address)
    world.now += FIRST_PAUSE_S
    assert link.call(address) == "http://a:1"
    assert len(world.opened) == 2


def test_a_pool_that_stays_away_is_tried_ever_more_rarely(world: World) -> None:
    world.up = set()
    link = PoolLink(world.settings, 1.0, logger)
    pauses, last = [], world.now
    while len(pauses) < 9:
        before = len(world.asked)
        with pytest.raises(MooncakeError):
            link.call(address)
        if len(world.asked) > before:
            pauses.append(world.now - last)
            last = world.now
        world.now += 0.5
    assert pauses[1:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    world.up = {"http://a:1"}
    world.now += LONGEST_PAUSE_S
    assert link.call(address) == "http://a:1"


def open_lookups(world: World) -> PoolLookups:
    link = PoolLink(world.settings, 1.0, logger)
    return PoolLookups(link, [RankKv(b"r" * 16, 15)])


@pytest.mark.parametrize("error", [TransferError("broken"), ValueError("a bug")], ids=repr)
def test_a_look_up_that_fails_finds_nothing(world: World, error: Exception) -> None:
    lookups = open_lookups(world)
    try:
        chain = [bytes([n]) * 16 for n in range(4)]
        assert lookups.ask(chain).result(LONG_S) == 3, "of 8 parts 7 are there"
        assert lookups.packing is not None
        assert lookups.packing.num_parts(RankKv(b"", 15)) == 2
        world.opened[0].error = error
        assert lookups.ask(chain).result(LONG_S) == 0
    finally:
        lookups.close()
    assert world.opened[0].is_closed


CHAIN = [bytes([n]) * 16 for n in range(4)]


def test_a_promise_is_waited_for_and_others_are_answered_meanwhile(world: World) -> None:
    lookups = open_lookups(world)
    try:
        assert lookups.ask(CHAIN).result(LONG_S) == 3
        [session] = world.opened
        session.missing = 4
        answer = lookups.ask(CHAIN, promised=4, within_s=60)
        for _ in range(3):
            assert session.asked.acquire(timeout=LONG_S)
        assert lookups.ask(CHAIN).result(LONG_S) == 2
        assert not answer.done()
        session.missing = 0
        assert answer.result(LONG_S) == 4
    finally:
        lookups.close()


def test_a_promise_that_is_not_kept_in_time_is_what_is_there(world: World) -> None:
    lookups = open_lookups(world)
    try:
        assert lookups.ask(CHAIN, promised=4, within_s=0.1).result(LONG_S) == 3
        assert lookups.ask(CHAIN, promised=3, within_s=60).result(LONG_S) == 3
    finally:
        lookups.close()


def test_a_promise_is_not_waited_for_while_the_pool_fails(world: World) -> None:
    lookups = open_lookups(world)
    try:
        assert lookups.ask(CHAIN).result(LONG_S) == 3
        world.opened[0].error = TransferError("broken")
        assert lookups.ask(CHAIN, promised=4, within_s=60).result(LONG_S) == 0
    finally:
        lookups.close()


def test_a_new_look_up_waits_for_one_other_whatever_is_promised(world: World) -> None:
    """Whoever asks with promises that nobody keeps holds up only its own requests."""
    lookups, permits = open_lookups(world), threading.Semaphore(0)
    try:
        assert lookups.ask(CHAIN).result(LONG_S) == 3
        [session] = world.opened
        waiting = [lookups.ask(CHAIN, promised=4, within_s=60) for _ in range(20)]
        assert lookups.ask(CHAIN).result(LONG_S) == 3, "and those before it have been tried"
        session.permits = permits
        while session.asked.acquire(blocking=False):
            pass
        assert session.asked.acquire(timeout=LONG_S), "one is tried again"
        new = lookups.ask(CHAIN)
        permits.release(2)
        assert new.result(LONG_S) == 3
        assert not any(answer.done() for answer in waiting)
    finally:
        world.opened[0].permits = None
        permits.release()
        lookups.close()
