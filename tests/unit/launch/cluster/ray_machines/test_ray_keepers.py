"""How Ray places what looks after workers, and what is set aside for these: Ray itself is not
needed.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RaySystemError,
)

from mooncake.base import MooncakeError, Role
from mooncake.base.models.parallel import Shape
from mooncake.launch.cluster.ray_machines import ray_cluster
from mooncake.launch.cluster.ray_machines.ray_cluster import Held, RayKeeper, RayKeepers
from mooncake.launch.cluster.supervision.supervisor import End, How, Supervisor
from mooncake.model.options import ModelOptions
from tests.support.serve.placed_workers import Shown
from tests.support.serve.plain_settings import worker_settings

KEEPERS = RayKeepers("a run")


def fails(error: Exception) -> Any:
    """Return a function that raises `error`."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.mark.parametrize("name", ["__init__", "run", "state", "stop"])
def test_the_worker_of_the_tests_is_called_as_the_real_one(name: str) -> None:
    double, real = (
        inspect.signature(getattr(cls, name)) for cls in (Shown, ray_cluster.WorkerActor)
    )
    known = [each for each in real.parameters if each != "placed"]
    assert list(double.parameters) == known


def test_an_actor_that_ray_gives_up_is_made_again_where_its_worker_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another node would load the weights again. Ray draws any node for an actor that needs no
    resources, unless its affinity is hard; then it gives up an actor whose node it does not know
    yet.
    """
    fake = FakeRay(monkeypatch)
    node = "5e" * 28
    keeper = RayKeepers("up", placed=True, nodes={"decode-0": node})(worker_settings(), True)
    keeper.run()
    monkeypatch.setattr(ray_cluster.ray, "wait", lambda calls, **_: (calls, []))
    for number, error in enumerate([ActorUnschedulableError("it does not exist"), RayActorError()]):
        monkeypatch.setattr(ray_cluster.ray, "get", fails(error))
        ended = keeper.end()
        assert ended is not None
        assert ended.how is How.KEEPER_DIED, "its process may run on"
        keeper.run()
        assert (len(fake.started), fake.killed) == (2, ["decode-0"]), number
    assert [(told.node_id, told.soft) for told in fake.options] == [(node, False)] * 2


@pytest.mark.parametrize("num_gpus", [0.0, 8.0])
def test_a_worker_that_a_killed_serve_has_left_is_kept_on_its_node_while_that_lives(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float
) -> None:
    """Another node would start a second one. When the node is lost, any may start it."""
    fake = FakeRay(monkeypatch)
    node, other = (
        {"NodeID": letter * 56, "NodeManagerAddress": address, "Alive": True,
         "Resources": {"GPU": 8.0, f"node:{address}": 1.0}}
        for letter, address in (("5", "10.0.0.7"), ("6", "10.0.0.8"))
    )  # fmt: skip
    there = [node, other]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: there)
    keepers = RayKeepers("a run", nodes={"decode-0": node["NodeID"]})
    keeper = keepers(worker_settings(num_gpus=num_gpus), True)
    for _ in range(2):
        keeper.run()
    assert fake.started == ["decode-0"]
    [told] = fake.options
    if num_gpus:
        assert fake.groups == ["[{'GPU': 8.0, 'node:10.0.0.7': 0.001}] STRICT_PACK"]
    else:
        assert (told.node_id, told.soft) == (node["NodeID"], False)
    there.remove(node)
    for _ in range(2):
        keeper.run()
    assert (fake.started, fake.killed) == (["decode-0"] * 2, ["decode-0"])
    assert fake.groups == (["[{'GPU': 8.0}] STRICT_PACK"] if num_gpus else [])
    assert fake.options[-1] == ("it" if num_gpus else "SPREAD")


class FakeRay:
    """Counts actors; each says what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.stopped: list[tuple[str, float, bool]] = []
        self.killed: list[str] = []
        self.groups: list[str] = []
        self.options: list[Any] = []
        """Where each actor is to start."""
        context = SimpleNamespace(get_node_id=lambda: "5e" * 28)
        for name, stub in (
            ("remote", self._remote),
            ("kill", lambda actor, no_restart: self.killed.append(actor.name)),
            ("get_runtime_context", lambda: context),
            ("wait", lambda calls, **_: ([], calls)),
        ):
            monkeypatch.setattr(ray_cluster.ray, name, stub)
        wait = fails(AssertionError("nobody waits for the GPUs"))

        def make(bundles: list[dict[str, float]], strategy: str) -> Any:
            self.groups.append(f"{bundles} {strategy}")
            return SimpleNamespace(name=self.groups[-1], wait=wait)

        monkeypatch.setattr(ray_cluster, "PlacementGroupSchedulingStrategy", lambda *_, **__: "it")
        monkeypatch.setattr(ray_cluster._groups, "placement_group", make)
        monkeypatch.setattr(
            ray_cluster._groups, "remove_placement_group",
            lambda group: self.groups.remove(group.name),
        )  # fmt: skip
        monkeypatch.setattr(ray_cluster.ray, "nodes", list)

    def _remote(self, worker_class: type) -> Any:
        del worker_class

        def make(worker_id: str, **_: Any) -> Any:
            self.started.append(worker_id)
            return SimpleNamespace(
                name=worker_id,
                run=SimpleNamespace(remote=lambda *words: f"run of {worker_id}"),
                stop=SimpleNamespace(
                    remote=lambda drain_s, waits: self.stopped.append((worker_id, drain_s, waits))
                ),
            )

        def options(scheduling_strategy: Any, **_: Any) -> Any:
            self.options.append(scheduling_strategy)
            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)


def test_nobody_waits_for_the_gpus_of_workers_that_ray_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a machine is lost, the others may have too few for its workers: those wait for a
    machine, and all others are looked after.
    """
    fake = FakeRay(monkeypatch)
    workers = [worker_settings(worker_id=f"decode-{number}", num_gpus=8.0) for number in range(2)]
    Supervisor(lambda _: None).resume(workers, RayKeepers("up", placed=True))
    assert fake.started == ["decode-0", "decode-1"]
    assert len(fake.groups) == 2


@pytest.mark.parametrize(
    ("num_gpus", "cpus_aside", "needs"),
    [
        (8.0, False, {"GPU": 8.0}),
        (8.0, True, {"GPU": 8.0}),
        (0.0, True, {"CPU": 1.0}),
        (0.0, False, None),
    ],
)
def test_what_a_worker_needs_is_set_aside_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: float,
    cpus_aside: bool,
    needs: dict[str, float] | None,
) -> None:
    """Nobody waits for it: the autoscaler of Ray may have to add a node."""
    fake = FakeRay(monkeypatch)
    keepers = dataclasses.replace(KEEPERS, cpus_aside=cpus_aside)
    group = [f"[{needs}] STRICT_PACK"] if needs else []
    kept = [keepers(worker_settings(num_gpus=num_gpus), True) for _ in range(2)]
    assert fake.groups == group * 2
    with monkeypatch.context() as away:
        away.setattr(ray_cluster.ray, "remote", fails(RaySystemError("the GCS does not answer")))
        with pytest.raises(MooncakeError, match="the GCS does not answer"):
            keepers(worker_settings(num_gpus=num_gpus), True)
    assert fake.groups == group * 2, "what was set aside for a failed try is given back"
    for number, each in enumerate(kept, 1):
        each.stop(7.0, True)
        each.close()
        assert fake.groups == group * (2 - number)
    assert fake.stopped == [("decode-0", 7.0, True)] * 2
    assert fake.killed == ["decode-0"] * 2


@dataclasses.dataclass(eq=False)
class Reserved:
    """What a fake Ray has reserved; no GPUs: it has not that many free."""

    gpus: list[str]

    def wait(self, seconds: float) -> bool:
        del seconds
        return bool(self.gpus)


class NodeOfRay:
    """A node whose Ray gives the first GPUs that are free, and the second one to a stranger."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = ["0", "2", "3", "4", "5"]
        monkeypatch.setattr(ray_cluster._groups, "placement_group", self._reserve)
        monkeypatch.setattr(ray_cluster._groups, "remove_placement_group", self._give_back)
        there = {"NodeID": "5e", "Alive": True, "Resources": {"GPU": 6.0, "node:10.0.0.7": 1.0}}
        for name, stub in (
            ("nodes", lambda: [there]),
            ("remote", lambda _: SimpleNamespace(options=self._options)),
            ("get", lambda groups, **_: [",".join(each.gpus) for each in groups]),
        ):
            monkeypatch.setattr(ray_cluster.ray, name, stub)
        monkeypatch.setattr(
            ray_cluster, "PlacementGroupSchedulingStrategy", lambda group, **_: group
        )

    def _reserve(self, bundles: list[dict[str, float]], strategy: str) -> Reserved:
        assert strategy == "STRICT_PACK"
        [bundle] = bundles
        number = int(bundle["GPU"])
        given = self.free[:number] if len(self.free) >= number else []
        self.free = self.free[len(given) :]
        return Reserved(given)

    def _give_back(self, group: Reserved) -> None:
        self.free = sorted(self.free + group.gpus)
        group.gpus = []

    def _options(self, scheduling_strategy: Reserved, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda: scheduling_strategy)


def test_workers_that_run_get_their_own_gpus_unless_a_stranger_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = NodeOfRay(monkeypatch)
    held = {"decode-0": Held("5e", "4,5"), "decode-1": Held("5e", "0,1"), "decode-2": Held("", "")}
    workers = [worker_settings(worker_id=name, num_gpus=2.0) for name in (*held, "decode-3")]
    groups: Any = ray_cluster.groups_of_held(workers, held)
    assert {name: group.gpus for name, group in groups.items()} == {"decode-0": ["4", "5"]}
    assert node.free == ["0", "2", "3"], "the others may have these"
    keepers = dataclasses.replace(KEEPERS, groups=dict(groups))
    fake = FakeRay(monkeypatch)
    keepers(workers[0], True)
    assert (fake.groups, keepers.groups) == ([], {}), "what was set aside for it is used"


def test_workers_for_which_nothing_is_set_aside_are_shared_out_evenly() -> None:
    """Ray would draw a node for each, and could start all on one."""
    on_cpus = [worker_settings(worker_id=f"decode-{number}") for number in range(3)]
    workers = [*on_cpus, worker_settings(worker_id="prefill-0", num_gpus=8.0)]
    spread = KEEPERS.spread_over(workers, {"decode-1": Held("x", "")}, ["x", "y"])
    assert spread.nodes == {"decode-0": "y", "decode-1": "x", "decode-2": "x"}
    aside = dataclasses.replace(KEEPERS, cpus_aside=True).spread_over(workers, {}, ["x", "y"])
    assert aside.nodes == {}, "it finds room for each"


def test_a_pool_node_needs_no_cpu_of_ray() -> None:
    keepers = dataclasses.replace(KEEPERS, cpus_aside=True)
    assert keepers._needs(worker_settings(role=Role.KVSTORE)) == {}
    two = worker_settings(options=ModelOptions(shape=Shape(tp=2), num_threads=3))
    assert keepers._needs(two) == {"CPU": 6.0}


@pytest.mark.parametrize(
    ("raised", "how"),
    [
        (ActorUnavailableError("it starts", b"\0" * 16), How.KEEPER_AWAY),
        (RayActorError(), How.KEEPER_DIED),
        (RayError("the worker has ended"), How.DIED),
    ],
)
def test_an_end_says_who_has_died(
    monkeypatch: pytest.MonkeyPatch, raised: RayError, how: How
) -> None:
    """Only where the actor has seen the worker end, that has died for certain."""
    keeper = RayKeeper(SimpleNamespace(), None, lambda _: "run")
    keeper.run()
    monkeypatch.setattr(ray_cluster.ray, "wait", lambda calls, timeout: ([], calls))
    assert keeper.end() is None
    monkeypatch.setattr(ray_cluster.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(ray_cluster.ray, "get", lambda call: "no room")
    assert keeper.end() == End(How.STOPPED, "no room")
    monkeypatch.setattr(ray_cluster.ray, "get", fails(raised))
    ended = keeper.end()
    assert ended is not None
    assert ended.how is how


def test_a_ray_that_does_not_answer_says_nothing_of_a_worker_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor goes on with other workers, and asks again."""
    away = fails(RaySystemError("the GCS does not answer"))
    keeper = RayKeeper(SimpleNamespace(state=SimpleNamespace(remote=away)), None, away)
    with pytest.raises(MooncakeError, match="the GCS does not answer"):
        keeper.run()
    for name in ("wait", "kill"):
        monkeypatch.setattr(ray_cluster.ray, name, away)
    assert (keeper.end(), keeper.state()) == (None, None)
    keeper.close()
    assert "the GCS does not answer" in caplog.text
