"""Which machine's Ray counts, where a cluster's file has Ray place workers. No Ray runs here."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import MooncakeError, Role
from mooncake.launch.cluster.ray_machines import placed_worker, ray_cluster, ray_node
from mooncake.launch.cluster.ray_machines.ray_cluster import spread
from mooncake.launch.cluster.ray_machines.ray_node import (
    ASK_S,
    LOOK_S,
    LOST_S,
    TURN_S,
    gives_way,
    whom_to_join,
    works_at,
)

NUM_MACHINES = 4
SIGNALS = {"SIGINT": 2, "SIGTERM": 15}


def test_a_head_that_is_there_is_joined() -> None:
    assert whom_to_join(0, [False, False, True], 0.0) == 2, "also by the first of the file"
    assert whom_to_join(2, [False, True, False], 1000.0) == 1
    assert whom_to_join(2, [True, True, False], 0.0) == 0, "of two the one that stays"


def test_without_a_head_the_first_machine_that_lives_becomes_it() -> None:
    none = [False] * 3
    assert whom_to_join(0, none, 0.0) == 0
    assert whom_to_join(1, none, TURN_S - 1) is None, "the first one has its turn"
    assert whom_to_join(1, none, TURN_S) == 1
    assert whom_to_join(2, none, TURN_S) is None


def test_what_an_earlier_life_has_left_listening_is_not_joined() -> None:
    assert whom_to_join(0, [True, False], 0.0) == 0


def test_of_two_heads_the_later_one_gives_way() -> None:
    assert gives_way(1, [True, True])
    assert not gives_way(0, [True, True])
    assert not gives_way(1, [False, True])


def test_workers_stay_where_they_run_and_the_others_are_shared_out() -> None:
    assert spread(["p", "d", "e"], {}, ["x", "y"]) == {"p": "x", "d": "y", "e": "x"}
    assert spread(["p", "d", "e"], {"e": "x", "gone": "y"}, ["x", "y"]) == {
        "p": "y", "d": "x", "e": "x",
    }  # fmt: skip
    assert spread(["p"], {"p": "z"}, ["x"]) == {"p": "z"}


def test_a_worker_on_a_machine_that_is_no_node_yet_is_waited_for() -> None:
    """A gateway knows it, so it serves on there, and a second one would load its weights again."""
    members = [(Role.DECODE, "a"), (Role.KVSTORE, "b")]
    assert works_at(members, ("decode",), {"a"})
    assert not works_at(members, ("decode",), {"b"}), "pool nodes belong to their machines"
    assert not works_at(members, ("prefill",), {"a"})


@pytest.mark.parametrize(
    ("later", "goes_on"),
    [
        ([("5e", "10.0.0.7"), ("6f", "10.0.0.8")], True),
        ([("5e", "10.0.0.7")], False),
        ([("5e", "10.0.0.7"), ("6f", "10.0.0.8"), ("7a", "10.0.0.8")], True),
        ([("5e", "10.0.0.7"), ("7a", "10.0.0.8")], False),
    ],
    ids=["all stay", "a machine is lost", "a new node is there too", "a new node is in its place"],
)
def test_a_machine_whose_ray_was_started_again_is_looked_at_anew(
    monkeypatch: pytest.MonkeyPatch, later: list[tuple[str, str]], goes_on: bool
) -> None:
    """Its workers are to run at a node that is gone, where no actor would find them. Ray notices
    that only when the new node has been there for a while.
    """
    told = [[("5e", "10.0.0.7"), ("6f", "10.0.0.8")], later]
    monkeypatch.setattr(
        ray_cluster.ray, "nodes",
        lambda: [
            {"NodeID": node, "NodeManagerAddress": address, "Alive": True}
            for node, address in told.pop(0)
        ],
    )  # fmt: skip
    clock = iter([0.0, LOOK_S + 1, LOOK_S + 1])
    monkeypatch.setattr(ray_node, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(ray_cluster, "holders", lambda *_: {})
    monkeypatch.setattr(placed_worker, "names_of", lambda _: [])
    went_on: list[bool] = []
    supervisor: Any = SimpleNamespace(
        resume=lambda *_: None, are_ready=lambda: False,
        watch=lambda go_on: went_on.append(go_on()),
    )  # fmt: skip
    node: Any = SimpleNamespace(_cluster=None)
    nothing: Any = None
    ray_node._Node._place(node, supervisor, nothing, lambda: True)
    assert went_on == [goes_on]


def test_a_head_that_cannot_place_workers_tries_again_with_the_same_ray(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine under load may say too late which workers run there. If Ray ended for that, it
    would have to start again on all machines, under the same load.
    """
    done: list[str] = []

    @contextlib.contextmanager
    def descendants() -> Iterator[Any]:
        yield SimpleNamespace(end=lambda _: done.append("end"))

    monkeypatch.setattr(ray_node, "signal", SimpleNamespace(signal=lambda *_: None, **SIGNALS))
    monkeypatch.setattr(ray_node, "Descendants", descendants)
    for name in ("connect", "disconnect"):
        monkeypatch.setattr(ray_cluster, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(ray_cluster, "daemons", list)
    facts = iter(["facts", "facts", None])

    def place(*_: object) -> None:
        done.append("place")
        if done.count("place") == 1:
            raise MooncakeError("a machine does not say which workers run there")

    node: Any = SimpleNamespace(
        _place=place, _await_others=lambda *_: next(facts), _on_signal=None,
        _config=lambda: SimpleNamespace(orphan_timeout=600),
    )  # fmt: skip
    nothing: Any = None
    ray_node._Node._be_head(node, "10.0.0.7:6379", nothing)
    assert done == ["connect", "place", "place", "disconnect", "end"]
    assert "a machine does not say which workers run there" in caplog.text


def test_a_head_asks_again_after_a_while_who_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions without a pause would keep Ray's GCS and all gateways busy."""
    asked: list[str] = []
    here = iter([{}, {}, {"node": "10.0.0.2"}])
    told = SimpleNamespace(members=[], facts="facts")
    seeds = SimpleNamespace(ask=lambda: asked.append("ask") or [told], close=lambda: None)
    monkeypatch.setattr(ray_node, "Seeds", lambda *_: seeds)
    monkeypatch.setattr(ray_node, "machine_credential", lambda *_: None)
    monkeypatch.setattr(ray_node, "read_facts", lambda facts: facts)
    monkeypatch.setattr(ray_cluster, "nodes", lambda: next(here))
    pauses = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda s: asked.append(f"{s} s"))
    monkeypatch.setattr(ray_node, "time", pauses)
    machine = SimpleNamespace(name="b", address="10.0.0.2")
    cluster = SimpleNamespace(machines=[machine], placed=())
    node: Any = SimpleNamespace(_machine=machine, _cluster=cluster, _hosts=["10.0.0.2"])
    config: Any = SimpleNamespace(bind_host="10.0.0.1", bind_ports=None, seeds=[])
    found = ray_node._Node._await_others(node, config, lambda: True)
    assert found == "facts"
    assert asked == ["ask", f"{ASK_S} s", "ask", f"{ASK_S} s", "ask"]


class Machines:
    """Machines that start, are lost and cannot reach each other, second by second. Each is the
    head, joins one, or looks for one.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.now_s = 0.0
        self.ups = [True] * NUM_MACHINES
        self.cuts: set[frozenset[int]] = set()
        self.heads: list[int | None] = [None] * NUM_MACHINES
        """Whom each has joined."""
        self._since_s = [0.0] * NUM_MACHINES
        self._seen_s = [0.0] * NUM_MACHINES

    def reaches(self, one: int, other: int) -> bool:
        return self.ups[one] and self.ups[other] and frozenset((one, other)) not in self.cuts

    def lose(self, machine: int) -> None:
        self.ups[machine] = not self.ups[machine]
        self.heads[machine], self._since_s[machine] = None, self.now_s

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            order = list(range(NUM_MACHINES))
            self._rng.shuffle(order)
            for machine in order:
                if self.ups[machine]:
                    self._look(machine)

    def _look(self, own: int) -> None:
        heads = [
            self.heads[each] == each and (each == own or self.reaches(own, each))
            for each in range(NUM_MACHINES)
        ]
        joined = self.heads[own]
        if joined is None:
            self.heads[own] = whom_to_join(own, heads, self.now_s - self._since_s[own])
            self._seen_s[own] = self.now_s
        elif heads[joined] and not (joined == own and gives_way(own, heads)):
            self._seen_s[own] = self.now_s
        elif joined == own or self.now_s > self._seen_s[own] + LOST_S:
            self.heads[own], self._since_s[own] = None, self.now_s


@pytest.mark.parametrize("seed", range(50))
def test_machines_agree_on_one_head_whatever_was_lost(seed: int) -> None:
    rng = random.Random(seed)
    machines = Machines(rng)
    for _ in range(6):
        for _ in range(rng.randrange(3)):
            machines.lose(rng.randrange(NUM_MACHINES))
        machines.cuts = {
            frozenset(rng.sample(range(NUM_MACHINES), 2)) for _ in range(rng.randrange(3))
        }
        machines.pass_s(rng.uniform(0, 100))
    machines.cuts = set()
    machines.pass_s(2 * LOST_S + NUM_MACHINES * TURN_S)
    joined = {head for head, is_up in zip(machines.heads, machines.ups, strict=True) if is_up}
    if any(machines.ups):
        [head] = joined
        assert head is not None
        assert machines.heads[head] == head
