"""What the supervisor does about a worker that refuses to start: Ray itself is not needed."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from mooncake.base import ConfigError, MooncakeError, Role
from mooncake.base.parallel import Shape
from mooncake.launch.cluster import ray_cluster
from mooncake.launch.cluster.followed_load import Changes, LoadFollower
from mooncake.launch.cluster.ray_cluster import State, Supervisor
from mooncake.launch.worker.process import WorkerSettings
from mooncake.model.options import ModelOptions
from mooncake.scheduler.scaling.policy import RoleAdvice
from tests.support.serve.placed_workers import Shown
from tests.support.serve.plain_settings import worker_settings

REFUSAL = "health-port: cannot listen on 127.0.0.1:9000"


def fails(error: Exception) -> Any:
    """Return a function that raises `error`."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> ray_cluster._Entry:
    """A worker whose Ray call has ended with a refusal."""
    monkeypatch.setattr(ray_cluster.ray, "get", lambda call: REFUSAL)
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: 100.0))
    unused: Any = None
    return ray_cluster._Entry(worker_settings(), unused, unused)


@pytest.mark.parametrize("name", ["run", "state", "stop"])
def test_the_worker_of_the_tests_is_called_as_the_real_one(name: str) -> None:
    double, real = (
        inspect.signature(getattr(cls, name)) for cls in (Shown, ray_cluster.WorkerActor)
    )
    assert list(double.parameters) == list(real.parameters)


def test_a_placed_worker_is_started_where_it_runs_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray may take another node while some do not know a new one yet. Then the actor ends, and Ray
    tries again: a second worker would load the weights again.
    """
    made: list[tuple[Any, dict[str, Any]]] = []
    actor = SimpleNamespace(run=SimpleNamespace(remote=lambda *words: "running"))

    def options(scheduling_strategy: Any, **_: Any) -> Any:
        return SimpleNamespace(
            remote=lambda worker_id, **where: made.append((scheduling_strategy, where)) or actor
        )

    monkeypatch.setattr(ray_cluster.ray, "remote", lambda _: SimpleNamespace(options=options))
    node, other = "5e" * 28, "6f" * 28
    Supervisor(lambda _: None).place([worker_settings()], {"decode-0": node})
    [(strategy, where)] = made
    assert (strategy.node_id, strategy.soft) == (node, True)
    assert where == {"placed": True, "node": node}

    class Ended(Exception):
        pass

    monkeypatch.setattr(ray_cluster.os, "_exit", fails(Ended()))
    context = SimpleNamespace(get_node_id=lambda: other)
    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: context)
    with pytest.raises(Ended):
        ray_cluster.WorkerActor("decode-0", **where).run(b"", "", "", 0.0)


def test_a_refusal_at_the_start_ends_the_start(entry: ray_cluster._Entry) -> None:
    supervisor = Supervisor(lambda _: None)
    with pytest.raises(MooncakeError, match=f"decode-0: {REFUSAL}"):
        supervisor._on_end(entry)


def test_a_refusal_to_start_again_costs_one_worker_and_is_tried_ever_more_seldom(
    entry: ray_cluster._Entry,
) -> None:
    lost: list[str] = []
    supervisor = Supervisor(lost.append)
    supervisor._have_started = True
    pauses = []
    for _ in range(5):
        entry.state = State(1, "boot", "loading weights", 0, 0, ready=False)
        entry.retry_at_s = None
        supervisor._on_end(entry)
        assert entry.retry_at_s is not None
        pauses.append(round(entry.retry_at_s - 100.0, 1))
    assert lost == ["decode-0"], "told once, until it is there again"
    assert pauses == [0.4, 1.6, 6.4, 25.6, 30.0]
    entry.early_deaths, entry.retry_at_s = 10**6, None
    supervisor._on_end(entry)
    assert entry.retry_at_s == 130.0, "also after days"


@pytest.mark.parametrize("orphan_s", [0.0, 60.0])
def test_a_worker_whose_actor_alone_has_died_is_not_lost(
    entry: ray_cluster._Entry, monkeypatch: pytest.MonkeyPatch, orphan_s: float
) -> None:
    """The actor that Ray starts again adopts it; one that does not wait for that ends."""
    lost: list[str] = []
    supervisor = Supervisor(lost.append, run="a run", orphan_s=orphan_s)
    supervisor._have_started = True
    entry.state = State(1, "of another machine", "ready", 0, 0, ready=True)
    monkeypatch.setattr(ray_cluster.ray, "get", fails(ray_cluster.RayActorError()))
    supervisor._on_end(entry)
    assert lost == ([] if orphan_s else ["decode-0"])
    assert entry.retry_at_s is not None
    entry.retry_at_s = None
    entry.state = State(1, "of another machine", "ready", 0, 0, ready=True)
    monkeypatch.setattr(ray_cluster.ray, "get", fails(ray_cluster.RayError()))
    supervisor._on_end(entry)
    assert lost == ["decode-0"], "its actor has seen it end"


def test_a_ray_that_takes_too_long_to_start_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray raises a plain `Exception` then. Where workers serve on, it is tried again."""
    slow = Exception("The current node timed out during startup.\nIt may be overloaded.")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "keep_ray_token_private", lambda: None)
    monkeypatch.setattr(ray_cluster.ray, "init", fails(slow))
    with pytest.raises(ConfigError, match=r"^no Ray cluster on this machine: .* during startup\.$"):
        ray_cluster.connect(None)


class FakeRay:
    """Counts actors; each says what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.stopped: list[tuple[str, float, bool]] = []
        self.killed: list[str] = []
        self.groups: list[str] = []
        context = SimpleNamespace(get_node_id=lambda: "5e" * 28)
        for name, stub in (
            ("remote", self._remote),
            ("kill", lambda actor, no_restart: self.killed.append(actor.name)),
            ("get_runtime_context", lambda: context),
            ("wait", lambda calls, **_: (calls, [])),
        ):
            monkeypatch.setattr(ray_cluster.ray, name, stub)
        group = SimpleNamespace(wait=fails(AssertionError("nobody waits for the GPUs")))
        monkeypatch.setattr(ray_cluster, "PlacementGroupSchedulingStrategy", lambda *_, **__: "it")
        monkeypatch.setattr(
            ray_cluster._groups, "placement_group",
            lambda bundles, strategy: self.groups.append(f"{bundles} {strategy}") or group,
        )  # fmt: skip
        monkeypatch.setattr(
            ray_cluster._groups, "remove_placement_group", lambda group: self.groups.pop()
        )
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

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))


class Followed:
    """A supervisor of up to three decode workers, and the advice that it follows."""

    def __init__(self, *, cpus_aside: bool = False, num_gpus: float = 0.0) -> None:
        self.lost: list[str] = []
        self.supervisor = Supervisor(self.lost.append, cpus_aside=cpus_aside)
        self.supervisor._here_only = False
        self._wanted = 0
        settings = [
            worker_settings(worker_id=f"decode-{number}", num_gpus=num_gpus) for number in range(3)
        ]
        self._follower = LoadFollower(settings, self._advice, 77.0)

    @property
    def entries(self) -> dict[str, ray_cluster._Entry]:
        return {entry.settings.worker_id: entry for entry in self.supervisor._entries}

    def _advice(self) -> list[RoleAdvice]:
        names = frozenset(n for n, e in self.entries.items() if e.serves and not e.leaves)
        return [RoleAdvice(Role.DECODE, len(names), self._wanted, "", names)]

    def look(self, wanted: int) -> list[str]:
        """Follow advice that wants so many; return those that are held then."""
        self._wanted = wanted
        self.supervisor._follow(self._follower)
        return [name for name, entry in self.entries.items() if not entry.leaves]

    def become_ready(self, *names: str) -> None:
        for name in names:
            self.entries[name].state = State(1, "elsewhere", "ready", 0, 0, ready=True)


def test_workers_come_and_go_with_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, followed = FakeRay(monkeypatch), Followed()
    assert followed.look(1) == ["decode-0"]
    assert followed.look(3) == ["decode-0", "decode-1", "decode-2"]
    followed.become_ready("decode-0", "decode-1")
    assert followed.look(1) == ["decode-0"]
    assert fake.killed == ["decode-2"], "it had not begun to serve"
    assert fake.stopped == [("decode-2", 0.0, False), ("decode-1", 77.0, True)]
    assert followed.look(1) == ["decode-0"]
    assert len(fake.stopped) == 2, "it is told once"
    assert followed.look(2) == ["decode-0", "decode-2"], "decode-1 is still there"
    assert [each.worker_id for each in followed.supervisor.forget()] == ["decode-0", "decode-2"]


def test_a_worker_that_has_left_does_not_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, followed = FakeRay(monkeypatch), Followed()
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    followed.look(1)
    left = followed.entries["decode-1"]
    followed.supervisor._on_end(left)
    assert followed.lost == ["decode-1"]
    assert list(followed.entries) == ["decode-0"]
    assert fake.killed == ["decode-1"]
    assert followed.look(2) == ["decode-0", "decode-1"], "its name is free"
    assert fake.started == ["decode-0", "decode-1", "decode-1"]


def test_what_ray_cannot_start_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The workers that run are watched meanwhile, the log says it once, and what was set aside for
    a try is given back.
    """
    fake, followed = FakeRay(monkeypatch), Followed(num_gpus=8.0)
    assert followed.look(1) == ["decode-0"]
    [group] = fake.groups
    with monkeypatch.context() as away:
        away.setattr(ray_cluster.ray, "remote", fails(RaySystemError("the GCS does not answer")))
        assert followed.look(2) == followed.look(2) == ["decode-0"]
        assert fake.groups == [group]
    [said] = [each for each in caplog.messages if "trying again" in each]
    assert "the GCS does not answer" in said
    assert followed.look(2) == ["decode-0", "decode-1"]
    assert fake.started == ["decode-0", "decode-1"]


def test_what_cannot_start_holds_back_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others start and leave meanwhile."""
    fake, followed = FakeRay(monkeypatch), Followed()
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    three = [worker_settings(worker_id=name) for name in ("bad", "decode-2", "worse")]
    launch = followed.supervisor._launch

    def fails_for_some(settings: WorkerSettings, **words: bool) -> ray_cluster._Entry:
        if settings.worker_id in ("bad", "worse"):
            raise ConfigError(f"no room for {settings.worker_id}")
        return launch(settings, **words)

    monkeypatch.setattr(followed.supervisor, "_launch", fails_for_some)
    changes = SimpleNamespace(drain_s=77.0, changes=lambda *_: Changes(three, ["decode-1"]))
    follower: Any = changes
    followed.supervisor._follow(follower)
    assert list(followed.entries) == ["decode-0", "decode-1", "decode-2"]
    assert fake.stopped == [("decode-1", 77.0, True)]
    [said] = [each for each in caplog.messages if "trying again" in each]
    assert said.endswith(": no room for bad; no room for worse")


def test_a_worker_that_cannot_be_told_to_leave_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when Ray answers again; meanwhile its time to leave has not begun."""
    fake, followed = FakeRay(monkeypatch), Followed()
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    stop = followed.entries["decode-1"].actor.stop
    with monkeypatch.context() as away:
        away.setattr(stop, "remote", fails(RaySystemError("the GCS does not answer")))
        assert followed.look(1) == ["decode-0", "decode-1"]
    assert followed.look(1) == ["decode-0"]
    assert fake.stopped == [("decode-1", 77.0, True)]


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeRay, Followed, list[float]]:
    """A Ray of two workers, of which decode-1 was told to leave at second 100, and the clock. Ray
    reports no end.
    """
    fake, followed, clock = FakeRay(monkeypatch), Followed(), [100.0]
    monkeypatch.setattr(ray_cluster.ray, "wait", lambda calls, **_: ([], calls))
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    followed.look(1)
    return fake, followed, clock


def test_a_worker_that_does_not_leave_in_time_is_ended(
    leaving: tuple[FakeRay, Followed, list[float]],
) -> None:
    fake, followed, clock = leaving
    clock[0] += 77.0 + ray_cluster.STOP_S
    followed.supervisor._step()
    assert list(followed.entries) == ["decode-0", "decode-1"]
    clock[0] += 1.0
    followed.supervisor._step()
    assert (list(followed.entries), followed.lost) == (["decode-0"], ["decode-1"])
    assert fake.killed == ["decode-1"]


def test_an_actor_that_starts_again_is_told_that_its_worker_is_to_leave(
    leaving: tuple[FakeRay, Followed, list[float]],
) -> None:
    """The one before may have ended before it was told, and the worker would serve for ever."""
    fake, followed, clock = leaving
    followed.entries["decode-1"].retry_at_s = clock[0]
    clock[0] += 7.0
    followed.supervisor._step()
    assert fake.stopped == [("decode-1", 77.0, True), ("decode-1", 70.0, True)]


def test_nobody_waits_for_the_gpus_of_workers_that_ray_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a machine is lost, the others may have too few for its workers: those wait for a
    machine, and all others are looked after.
    """
    fake = FakeRay(monkeypatch)
    workers = [worker_settings(worker_id=f"decode-{number}", num_gpus=8.0) for number in range(2)]
    Supervisor(lambda _: None).place(workers, {})
    assert fake.started == ["decode-0", "decode-1"]
    assert len(fake.groups) == 2


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ({"num_gpus": 8.0}, {"GPU": 8.0}),
        ({"num_gpus": 8.0, "cpus_aside": True}, {"GPU": 8.0}),
        ({"cpus_aside": True}, {"CPU": 1.0}),
        ({}, None),
    ],
)
def test_what_a_worker_needs_is_set_aside_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], needs: dict[str, float] | None
) -> None:
    """Nobody waits for it: the autoscaler of Ray may have to add a node."""
    fake, followed = FakeRay(monkeypatch), Followed(**words)
    group = [f"[{needs}] STRICT_PACK"] if needs else []
    followed.look(1)
    followed.look(3)
    assert fake.groups == group * 3
    followed.become_ready("decode-0", "decode-1")
    followed.look(1)
    assert fake.groups == group * 2, "one still finishes its requests"
    followed.supervisor._on_end(followed.entries["decode-1"])
    assert fake.groups == group
    followed.supervisor.stop()
    assert fake.groups == []


def test_a_pool_node_needs_no_cpu_of_ray() -> None:
    supervisor = Supervisor(lambda _: None, cpus_aside=True)
    assert supervisor._needs(worker_settings(role=Role.KVSTORE)) == {}
    two = worker_settings(options=ModelOptions(shape=Shape(tp=2), num_threads=3))
    assert supervisor._needs(two) == {"CPU": 6.0}
