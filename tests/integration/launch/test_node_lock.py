"""A pool node's name on its machine, and what its log says until it has joined."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from mooncake.base import ConfigError, Forbidden, MooncakeError
from mooncake.launch.host.processes import abstract_name
from mooncake.launch.host.seeds import NotUp
from mooncake.launch.pool_node import node_lock
from mooncake.launch.pool_node.node_lock import JoinWatch, lock_name

POOL = "tcp://127.0.0.1:9000"
NAME = f"kvstore-{uuid.uuid4().hex}"
"""Held by nobody else, whatever else runs here."""
WAIT_S = 240.0


def test_a_name_is_held_by_one_process_of_a_machine_and_pool() -> None:
    with lock_name(NAME, "a", POOL):
        with pytest.raises(ConfigError, match=r"node-id: a of the pool .* --node-id NAME"):
            lock_name(NAME, "a", POOL)
        with pytest.raises(ConfigError, match="runs on this machine already"):
            lock_name(NAME, "a", "tcp://localhost:9000")
        with pytest.raises(ConfigError, match="runs on this machine already"):
            lock_name(NAME, "a", f"{POOL}#{'5e' * 32}")  # as a server prints it
        lock_name(f"{NAME}-b", "b", POOL).close()
        lock_name(NAME, "a", "tcp://127.0.0.1:9001").close()
    lock_name(NAME, "a", POOL).close()


@pytest.mark.parametrize(("listens", "holder"), [(True, r"process \d+ of user 0"), (False, "does")])
def test_a_name_taken_by_another_user_is_told_from_a_node_that_runs(
    monkeypatch: pytest.MonkeyPatch, listens: bool, holder: str
) -> None:
    name = lock_name(f"{NAME}-squatted", "a", POOL)
    address = name.getsockname()
    name.close()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(address)
        if listens:
            squatter.listen()
            user = os.geteuid()
            monkeypatch.setattr(abstract_name, "credentials_of", lambda _: (1, 0))
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(ConfigError, match=rf"node-id: .*{holder}.* end that process"):
            lock_name(f"{NAME}-squatted", "a", POOL)


def test_a_pool_whose_host_has_no_address_is_named_as_it_is_written() -> None:
    with lock_name(NAME, "a", "tcp://no.such.host.invalid:1"), pytest.raises(ConfigError):
        lock_name(NAME, "a", "tcp://no.such.host.invalid:1")


class Driver:
    """Of a node that is known after so many looks, or that has ended by then."""

    def __init__(self, num_looks: float, *, ends: bool = False) -> None:
        self.num_looks = num_looks
        self.ends = ends
        self.joined = False
        self.over = threading.Event()

    def call(self, work: Callable[[Any, float], Any]) -> Future[Any]:
        self.num_looks -= 1
        future: Future[Any] = Future()
        if self.num_looks < 0:
            self.over.set()
        if self.num_looks < 0 and self.ends:
            future.cancel()
            return future
        self.joined = self.num_looks < 0
        future.set_result(work(self, 0.0))
        return future

    def stop(self) -> None:
        self.over.set()


SILENCE = NotUp("no gateway answers")
REFUSAL = Forbidden("cluster-secret: the gateway has another one")
MISFIT = ConfigError("block-size: the cluster does not use this node")


@contextlib.contextmanager
def watching(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, *problems: MooncakeError, limit_looks: int = 20
) -> Iterator[JoinWatch]:
    """Watch a node until it has joined or ended. A pool that does not answer is looked for after 10
    looks at the node, at the limit, and 10 looks after each other time.
    """
    monkeypatch.setattr(node_lock, "LOOK_S", 0.001)
    monkeypatch.setattr(node_lock, "WARN_AFTER_S", 0.010)
    monkeypatch.setattr(node_lock, "REMIND_S", 0.010)
    why = itertools.chain(problems, itertools.repeat(SILENCE))
    watch = JoinWatch(
        driver,  # type: ignore[arg-type]
        "kvstore-a",
        POOL,
        lambda: next(why),
        0.001 * limit_looks,
    )
    assert driver.over.wait(WAIT_S)
    watch.close()
    yield watch


@pytest.mark.parametrize(("num_looks", "num_warnings"), [(2, 0), (12, 1), (24, 2)])
def test_the_log_tells_of_joining_and_of_gateways_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_looks: int,
    num_warnings: int,
) -> None:
    with caplog.at_level(logging.INFO), watching(monkeypatch, Driver(num_looks)) as watch:
        *warnings, last = [record.getMessage() for record in caplog.records]
    assert last == f"kvstore-a has joined the pool at {POOL}"
    assert len(warnings) == num_warnings
    assert all(each.startswith(f"{SILENCE.message}; still asking") for each in warnings)
    assert watch.refusal is None


@pytest.mark.parametrize("refusal", [REFUSAL, MISFIT])
def test_a_node_with_another_secret_or_other_blocks_is_stopped_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: MooncakeError
) -> None:
    """Until then the pool may be started again with the settings of the node."""
    driver = Driver(math.inf)
    with caplog.at_level(logging.INFO), watching(monkeypatch, driver, *[refusal] * 2) as watch:
        [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{refusal.message}; still asking")
    assert watch.refusal is refusal


def test_a_pool_that_is_away_at_the_limit_may_refuse_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(monkeypatch, Driver(math.inf), SILENCE, SILENCE, SILENCE, REFUSAL) as watch:
        assert watch.refusal is REFUSAL


def test_a_node_that_joins_during_the_look_for_its_pool_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems = [SILENCE, REFUSAL]
    with watching(monkeypatch, Driver(20), *problems) as watch:
        assert watch.refusal is None


def test_a_node_that_ends_is_not_looked_at_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), watching(monkeypatch, Driver(1, ends=True)):
        assert caplog.records == []
