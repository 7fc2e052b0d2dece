"""How a command runs workers that share their experts: they start and end together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import MooncakeError
from mooncake.launch.cluster import lone_worker
from mooncake.launch.cluster.supervision import supervisor
from mooncake.launch.cluster.supervision.attendant import State
from mooncake.launch.cluster.supervision.supervisor import End, How, Keeper
from mooncake.launch.config.config import resolve
from mooncake.launch.worker.settings import WorkerSettings
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.plain_settings import worker_settings

NAMES = ("decode-0", "decode-1")
SERVES = State(7, "another machine", "", 0, 0, ready=True)


class Group:
    """Two workers without processes, and the command that runs them."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._config = resolve({"model": str(model), "shutdown_timeout": 600.0}, None, {})
        self._on_signal: Callable[[int, object], object] = lambda *_: None
        self.told: list[tuple[str, float, bool]] = []
        self.said: list[tuple[str, int, str]] = []
        self.ends: dict[str, End] = {}
        self.states: dict[str, State] = dict.fromkeys(NAMES, SERVES)
        self.on_look: dict[str, Callable[[], object]] = {}
        """What happens while a worker is asked how it is."""
        self.on_stop: Callable[[], object] = lambda: None
        monkeypatch.setattr(lone_worker, "LocalKeepers", lambda *_: self._keeper)
        monkeypatch.setattr(signal, "signal", self._handle)
        for name in ("POLL_S", "START_POLL_S"):
            monkeypatch.setattr(supervisor, name, 0.0)

    def _handle(self, number: int, handler: Any) -> None:
        del number
        self._on_signal = handler

    def _keeper(self, settings: WorkerSettings, waits: bool) -> Keeper:
        del waits
        return FakeKeeper(self, settings.worker_id)

    def interrupt(self) -> None:
        self._on_signal(signal.SIGTERM, None)

    def run(self) -> None:
        group = [worker_settings(worker_id=name) for name in NAMES]
        lone_worker.run_group(
            self._config, group, lambda *_: None, lambda *words: self.said.append(words)
        )


class FakeKeeper:
    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name

    def run(self) -> None: ...

    def end(self) -> End | None:
        self._group.on_look.get(f"end of {self._name}", lambda: None)()
        return self._group.ends.get(self._name)

    def state(self) -> State | None:
        self._group.on_look.get(self._name, lambda: None)()
        return self._group.states.get(self._name)

    def stop(self, drain_s: float, waits: bool) -> None:
        self._group.told.append((self._name, drain_s, waits))
        if waits:
            self._group.on_stop()

    def close(self) -> None: ...


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(write_config_only(tmp_path / "small"), monkeypatch)


def test_all_leave_on_a_signal_and_end_now_on_the_second(group: Group) -> None:
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        if len(group.said) == len(NAMES):
            group.interrupt()

    group.on_look["end of decode-1"] = look
    group.on_stop = lambda: group.interrupt() if len(group.told) == len(NAMES) else None
    group.run()
    assert group.said == [(name, 7, "has started") for name in NAMES]
    assert group.told[:2] == [(name, 600.0, True) for name in NAMES]
    assert group.told[2:] == [(name, 0.0, False) for name in NAMES]
    assert num_looks > 0


def test_a_signal_ends_the_start(group: Group) -> None:
    """They have nothing yet, so they end at once."""
    del group.states["decode-1"]
    group.on_look["decode-1"] = group.interrupt
    group.states["decode-0"] = State(7, "another machine", "loading", 0, 0, ready=False)
    group.run()
    assert group.said == []
    assert group.told == [(name, 0.0, False) for name in NAMES]


def test_one_that_cannot_start_is_why_all_end(group: Group) -> None:
    del group.states["decode-1"]
    group.ends["decode-1"] = End(How.STOPPED, "no room")
    with pytest.raises(MooncakeError, match=r"^decode-1: no room$"):
        group.run()
    assert group.said == []
    assert {name for name, _, _ in group.told} == {*NAMES}


def test_all_end_with_one_that_has_served(group: Group) -> None:
    def end() -> None:
        if group.said:
            group.ends["decode-1"] = End(How.DIED, "its process has ended")

    group.on_look["end of decode-0"] = end
    with pytest.raises(MooncakeError, match=r"^decode-1 has ended, and with it those that share"):
        group.run()
    assert ("decode-0", 0.0, False) in group.told, "it does not wait for anything"
