"""How a command watches workers that share their experts: they start and end together."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import ConfigError, InternalError, MooncakeError
from mooncake.base.models.parallel import Shape
from mooncake.launch.cluster import lone_group
from mooncake.launch.cluster.lone_group import _SIGNAL, _watch
from mooncake.launch.cluster.supervision.worker_handle import Told
from mooncake.launch.config.config import resolve
from mooncake.launch.host import machine_facts
from mooncake.model.options import ModelOptions
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.plain_settings import worker_settings

READY = Told(pid=7, ready=True)
NAMES = ("decode-0", "decode-1")


class Handle:
    """A worker's process, which is told to leave."""

    def __init__(self) -> None:
        self.told: list[tuple[float, bool]] = []

    def leave(self, limit_s: float, *, waits: bool) -> None:
        self.told.append((limit_s, waits))


class Group:
    def __init__(self, model: Path) -> None:
        self._config = resolve({"model": str(model), "shutdown_timeout": 600.0}, None, {})
        self.handles = {name: Handle() for name in NAMES}
        self.started: list[tuple[str, int]] = []

    def watch(self, *words: tuple[str, Told | BaseException | None]) -> MooncakeError | None:
        """Return why the group ended that has said these words."""
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for word in words:
            heard.put(word)
        group = {name: worker_settings(worker_id=name) for name in NAMES}
        handles: Any = self.handles
        found = _watch(
            self._config, group, heard, handles, lambda *_: None,
            lambda each, pid: self.started.append((each.worker_id, pid)),
        )  # fmt: skip
        assert heard.empty(), "not all was heard"
        return found


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(write_config_only(tmp_path / "small"))


def test_each_worker_sees_the_gpus_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the command sees."""
    pair = ModelOptions(shape=Shape(tp=2, dp=2, ep=4))
    two = [worker_settings(worker_id=name, num_gpus=2.0, options=pair) for name in NAMES]
    monkeypatch.setattr(machine_facts, "num_gpus", lambda: 4)
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in lone_group.gpus_of(two).values()]
    assert seen == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,3,2")
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in lone_group.gpus_of(two).values()]
    assert seen == ["7,5", "3,2"]
    assert lone_group.gpus_of([worker_settings(worker_id=name) for name in NAMES]) == {}
    monkeypatch.setattr(machine_facts, "num_gpus", lambda: 3)
    with pytest.raises(ConfigError, match="they need 4, and this machine has 3"):
        lone_group.gpus_of(two)


SERVES = tuple((name, READY) for name in NAMES)
END = tuple((name, None) for name in NAMES)
STOP = (_SIGNAL, None)


def test_all_leave_on_a_signal_and_end_now_on_the_second(group: Group) -> None:
    """A word that they serve counts once."""
    assert group.watch(*SERVES, *SERVES, STOP, STOP, *END) is None
    assert group.started == [(name, 7) for name in NAMES]
    assert [each.told for each in group.handles.values()] == [[(600.0, True), (0.0, True)]] * 2


def test_a_signal_ends_the_start(group: Group) -> None:
    """They have nothing yet, so they are killed."""
    assert group.watch(SERVES[0], STOP) is None
    assert [each.told for each in group.handles.values()] == [[], []]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (Told(refusal="no room"), "decode-1: no room"),
        (None, "decode-1 has ended, and with it those that share its experts"),
        (InternalError("no process stays"), "decode-1: no process stays"),
        (OSError("no"), r"decode-1: OSError\('no'\)"),
    ],
)
def test_the_first_that_ends_is_why_all_do(
    group: Group, word: Told | BaseException | None, why: str
) -> None:
    last = [("decode-1", None)] if isinstance(word, Told) else []
    found = group.watch(*SERVES, ("decode-1", word), ("decode-0", None), *last)
    assert found is not None
    with pytest.raises(MooncakeError, match=f"^{why}$"):
        raise found


def test_those_that_do_not_end_are_waited_for_no_longer(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lone_group, "END_S", 0.0)
    assert "decode-1 has ended" in str(group.watch(*SERVES, ("decode-1", None)))
