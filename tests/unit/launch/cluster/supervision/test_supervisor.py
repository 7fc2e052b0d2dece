"""What the supervisor does about workers that die, refuse to start, come and leave."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import ConfigError, MooncakeError, Role
from mooncake.launch.cluster.supervision import supervisor as supervisor_module
from mooncake.launch.cluster.supervision.attendant import State
from mooncake.launch.cluster.supervision.followed_load import Changes, LoadFollower
from mooncake.launch.cluster.supervision.supervisor import End, Entry, How, Keeper, Supervisor
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.scheduler.scaling.policy import RoleAdvice
from tests.support.serve.plain_settings import worker_settings

REFUSAL = "health-port: cannot listen on 127.0.0.1:9000"
REFUSED = End(How.STOPPED, REFUSAL)
DIED = End(How.DIED, "it was killed")


class FakeKeeper:
    """Looks after no process; it notes what it is asked."""

    def __init__(self, name: str, fake: FakeKeepers) -> None:
        self._name = name
        self._fake = fake
        self.ended: End | None = None
        self.known: State | None = None

    def run(self) -> None:
        if self._fake.away:
            raise MooncakeError("it does not answer")
        self._fake.started.append(self._name)
        self.ended = None

    def end(self) -> End | None:
        return self.ended

    def state(self) -> State | None:
        return self.known

    def stop(self, drain_s: float, waits: bool) -> None:
        if self._fake.away:
            raise MooncakeError("it does not answer")
        self._fake.stopped.append((self._name, drain_s, waits))

    def close(self) -> None:
        self._fake.closed.append(self._name)


class FakeKeepers:
    """Makes them, and counts."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped: list[tuple[str, float, bool]] = []
        self.closed: list[str] = []
        self.may_wait: list[bool] = []
        self.made: dict[str, FakeKeeper] = {}
        self.away = False
        """They cannot be asked."""

    def __call__(self, settings: WorkerSettings, waits: bool) -> Keeper:
        self.may_wait.append(waits)
        made = self.made[settings.worker_id] = FakeKeeper(settings.worker_id, self)
        return made


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Entry:
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    return Entry(worker_settings(), FakeKeeper("decode-0", FakeKeepers()))


def elsewhere(*, ready: bool) -> State:
    return State(1, "of another machine", "ready" if ready else "loading", 0, 0, ready=ready)


def test_a_refusal_at_the_start_ends_the_start(entry: Entry) -> None:
    with pytest.raises(MooncakeError, match=f"decode-0: {REFUSAL}"):
        Supervisor(lambda _: None)._on_end(entry, REFUSED)


def test_a_start_ends_with_the_pids_or_with_the_worker_that_dies_again_and_again() -> None:
    class Dies(FakeKeeper):
        def run(self) -> None:
            super().run()
            self.ended = DIED

    fake = FakeKeepers()
    supervisor = Supervisor(lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor_module, "START_POLL_S", 0.0)
        patch.setattr(supervisor_module, "LONGEST_WAIT_S", 0.0)
        with pytest.raises(MooncakeError, match="decode-0 died 3 times while it was starting"):
            supervisor.start([worker_settings()], lambda *_: None, lambda *_: Dies("d", fake))
    assert fake.started.count("d") >= supervisor_module.MAX_EARLY_DEATHS

    def ready(settings: WorkerSettings, waits: bool) -> Keeper:
        keeper = fake(settings, waits)
        fake.made[settings.worker_id].known = State(os.getpid(), "another", "", 0, 0, ready=True)
        return keeper

    shown: list[tuple[str, str]] = []
    started = Supervisor(lambda _: None).start(
        [worker_settings()], lambda name, what, *_: shown.append((name, what)), ready
    )
    assert started == {"decode-0": os.getpid()}
    assert shown == [("decode-0", "ready")]
    assert fake.may_wait == [False]


def test_a_refusal_to_start_again_costs_one_worker_and_is_tried_ever_more_seldom(
    entry: Entry,
) -> None:
    lost: list[str] = []
    supervisor = Supervisor(lost.append)
    supervisor._have_started = True
    pauses = []
    for _ in range(5):
        entry.state = elsewhere(ready=False)
        entry.retry_at_s = None
        supervisor._on_end(entry, REFUSED)
        assert entry.retry_at_s is not None
        pauses.append(round(entry.retry_at_s - 100.0, 1))
    assert lost == ["decode-0"], "told once, until it is there again"
    assert pauses == [0.4, 1.6, 6.4, 25.6, 30.0]
    entry.early_deaths, entry.retry_at_s = 10**6, None
    supervisor._on_end(entry, REFUSED)
    assert entry.retry_at_s == 130.0, "also after days"


def test_what_its_keeper_still_says_of_a_dead_process_brings_no_worker_back(entry: Entry) -> None:
    lost: list[str] = []
    supervisor = Supervisor(lost.append)
    supervisor._have_started = True
    entry.state = elsewhere(ready=False)
    keeper: Any = entry.keeper
    keeper.known = entry.state
    supervisor._on_end(entry, DIED)
    entry.retry_at_s = None
    supervisor._ask_state(entry)
    assert (entry.lost, entry.state) == (True, None)
    supervisor._on_end(entry, DIED)
    assert lost == ["decode-0"]
    entry.retry_at_s, keeper.known = None, State(2, "of another machine", "", 0, 0, ready=True)
    supervisor._ask_state(entry)
    assert entry.serves


def test_a_keeper_that_cannot_be_asked_costs_no_other_worker_and_is_asked_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake, clock = FakeKeepers(), [100.0]
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.0)
    supervisor = Supervisor(lambda _: None)
    names = ["decode-0", "decode-1"]
    supervisor.resume([worker_settings(worker_id=name) for name in names], fake)
    first, second = supervisor.entries
    fake.made["decode-0"].ended = DIED
    supervisor._step()
    assert fake.started == names
    fake.away, fake.made["decode-1"].known = True, elsewhere(ready=True)
    waits = []
    for _ in range(4):
        assert first.retry_at_s is not None
        clock[0] = first.retry_at_s
        supervisor._step()
        waits.append(round(first.retry_at_s - clock[0], 1))
    assert waits == [1.6, 6.4, 25.6, 30.0]
    assert second.serves, "it is watched meanwhile"
    assert "decode-0 cannot start again now, and is tried in 1.6 s" in caplog.text
    fake.away = False
    clock[0] = first.retry_at_s
    supervisor._step()
    assert (first.retry_at_s, fake.started) == (None, [*names, "decode-0"])


def test_a_keeper_that_cannot_be_asked_ends_a_start() -> None:
    class Away(FakeKeeper):
        """It dies, and does not answer afterwards."""

        def run(self) -> None:
            super().run()
            self.ended, fake.away = DIED, True

    fake = FakeKeepers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor_module, "START_POLL_S", 0.0)
        patch.setattr(supervisor_module, "LONGEST_WAIT_S", 0.0)
        with pytest.raises(MooncakeError, match="it does not answer"):
            Supervisor(lambda _: None).start(
                [worker_settings()], lambda *_: None, lambda *_: Away("d", fake)
            )


@pytest.mark.parametrize("orphan_s", [0.0, 60.0])
@pytest.mark.parametrize("how", [How.KEEPER_DIED, How.KEEPER_AWAY])
def test_a_worker_whose_keeper_alone_has_died_is_not_lost(
    entry: Entry, orphan_s: float, how: How
) -> None:
    """The keeper that starts again adopts it; one that does not wait for that ends."""
    lost: list[str] = []
    supervisor = Supervisor(lost.append, orphan_s=orphan_s)
    supervisor._have_started = True
    entry.state = elsewhere(ready=True)
    supervisor._on_end(entry, End(how))
    assert lost == ([] if orphan_s else ["decode-0"])
    assert entry.retry_at_s is not None
    entry.retry_at_s = None
    entry.state = elsewhere(ready=True)
    supervisor._on_end(entry, DIED)
    assert lost == ["decode-0"], "its keeper has seen it end"


def test_workers_are_left_to_the_next_supervisor_when_a_daemon_of_their_keepers_ends() -> None:
    """Nothing is asked of keepers from then on."""
    fake, (ours, theirs) = FakeKeepers(), os.pipe()
    supervisor = Supervisor(lambda _: None, daemons=[ours])
    supervisor.resume([worker_settings()], fake)
    assert fake.may_wait == [True]
    os.close(theirs)
    supervisor.watch()
    assert supervisor.keepers_are_gone
    supervisor.forget()
    assert (fake.stopped, fake.closed, supervisor.entries) == ([], [], [])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)


class Followed:
    """A supervisor of up to three decode workers, and the advice that it follows."""

    def __init__(self, fake: FakeKeepers) -> None:
        self.lost: list[str] = []
        self.supervisor = Supervisor(self.lost.append)
        self.supervisor.resume([], fake)
        self._wanted = 0
        settings = [worker_settings(worker_id=f"decode-{number}") for number in range(3)]
        self._follower = LoadFollower(settings, self._advice, 77.0)

    @property
    def entries(self) -> dict[str, Entry]:
        return {entry.settings.worker_id: entry for entry in self.supervisor.entries}

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
            self.entries[name].state = elsewhere(ready=True)


def test_workers_come_and_go_with_what_is_wanted() -> None:
    fake = FakeKeepers()
    followed = Followed(fake)
    assert followed.look(1) == ["decode-0"]
    assert followed.look(3) == ["decode-0", "decode-1", "decode-2"]
    followed.become_ready("decode-0", "decode-1")
    assert followed.look(1) == ["decode-0"]
    assert fake.closed == ["decode-2"], "it had not begun to serve"
    assert fake.stopped == [("decode-2", 0.0, False), ("decode-1", 77.0, True)]
    assert followed.look(1) == ["decode-0"]
    assert len(fake.stopped) == 2, "it is told once"
    assert followed.look(2) == ["decode-0", "decode-2"], "decode-1 is still there"


def test_a_worker_that_has_left_does_not_start_again() -> None:
    fake = FakeKeepers()
    followed = Followed(fake)
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    followed.look(1)
    left = followed.entries["decode-1"]
    followed.supervisor._on_end(left, End(How.STOPPED))
    assert followed.lost == ["decode-1"]
    assert list(followed.entries) == ["decode-0"]
    assert fake.closed == ["decode-1"]
    assert followed.look(2) == ["decode-0", "decode-1"], "its name is free"
    assert fake.started == ["decode-0", "decode-1", "decode-1"]


def test_what_cannot_start_now_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The workers that run are watched meanwhile, the log says it once, and what was given to a try
    is given back.
    """
    fake = FakeKeepers()
    followed = Followed(fake)
    assert followed.look(1) == ["decode-0"]
    fake.away = True
    assert followed.look(2) == followed.look(2) == ["decode-0"]
    assert fake.closed == ["decode-1"] * 2
    fake.away = False
    [said] = [each for each in caplog.messages if "trying again" in each]
    assert "it does not answer" in said
    assert followed.look(2) == ["decode-0", "decode-1"]
    assert fake.started == ["decode-0", "decode-1"]


def test_what_cannot_start_holds_back_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others start and leave meanwhile."""
    fake = FakeKeepers()
    followed = Followed(fake)
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    three = [worker_settings(worker_id=name) for name in ("bad", "decode-2", "worse")]
    launch = followed.supervisor._launch

    def fails_for_some(settings: WorkerSettings) -> Entry:
        if settings.worker_id in ("bad", "worse"):
            raise ConfigError(f"no room for {settings.worker_id}")
        return launch(settings)

    monkeypatch.setattr(followed.supervisor, "_launch", fails_for_some)
    changes = SimpleNamespace(drain_s=77.0, changes=lambda *_: Changes(three, ["decode-1"]))
    follower: Any = changes
    followed.supervisor._follow(follower)
    assert list(followed.entries) == ["decode-0", "decode-1", "decode-2"]
    assert fake.stopped == [("decode-1", 77.0, True)]
    [said] = [each for each in caplog.messages if "trying again" in each]
    assert said.endswith(": no room for bad; no room for worse")


def test_a_worker_that_cannot_be_told_to_leave_stays() -> None:
    """It is told when its keeper answers again; meanwhile its time to leave has not begun."""
    fake = FakeKeepers()
    followed = Followed(fake)
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    fake.away = True
    assert followed.look(1) == ["decode-0", "decode-1"]
    fake.away = False
    assert followed.look(1) == ["decode-0"]
    assert fake.stopped == [("decode-1", 77.0, True)]


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeKeepers, Followed, list[float]]:
    """Two workers, of which decode-1 was told to leave at second 100 and has not ended, and the
    clock.
    """
    fake, clock = FakeKeepers(), [100.0]
    followed = Followed(fake)
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.0)
    followed.look(2)
    followed.become_ready("decode-0", "decode-1")
    followed.look(1)
    return fake, followed, clock


def test_a_worker_that_does_not_leave_in_time_is_ended(
    leaving: tuple[FakeKeepers, Followed, list[float]],
) -> None:
    fake, followed, clock = leaving
    clock[0] += 77.0 + supervisor_module.STOP_S
    followed.supervisor._step()
    assert list(followed.entries) == ["decode-0", "decode-1"]
    clock[0] += 1.0
    followed.supervisor._step()
    assert (list(followed.entries), followed.lost) == (["decode-0"], ["decode-1"])
    assert fake.closed == ["decode-1"]


def test_a_keeper_that_starts_again_is_told_that_its_worker_is_to_leave(
    leaving: tuple[FakeKeepers, Followed, list[float]],
) -> None:
    """The one before may have ended before it was told, and the worker would serve for ever."""
    fake, followed, clock = leaving
    followed.entries["decode-1"].retry_at_s = clock[0]
    clock[0] += 7.0
    followed.supervisor._step()
    assert fake.stopped == [("decode-1", 77.0, True), ("decode-1", 70.0, True)]


def test_a_stop_waits_for_workers_that_serve_and_ends_the_others() -> None:
    class Leaves(FakeKeeper):
        """It leaves when it is told to, after it has been asked twice whether it has ended."""

        asked = 0

        def end(self) -> End | None:
            self.asked += 1
            return End(How.STOPPED) if self.asked > 2 else None

    fake = FakeKeepers()
    keepers = {name: Leaves(name, fake) for name in ("decode-0", "decode-1")}
    supervisor = Supervisor(lambda _: None, 33.0, waits=True)
    workers = [worker_settings(worker_id=name) for name in keepers]
    supervisor.resume(workers, lambda settings, _: keepers[settings.worker_id])
    supervisor.entries[0].state = elsewhere(ready=True)
    supervisor.stop()
    assert fake.stopped == [
        ("decode-0", 33.0, True), ("decode-0", 0.0, False), ("decode-1", 0.0, False),
    ]  # fmt: skip
    assert keepers["decode-0"].asked == 3
    assert fake.closed == ["decode-0", "decode-1"]
