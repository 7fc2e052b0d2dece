"""Workers that threads of this process look after, and the GPUs that they get."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import MooncakeError
from mooncake.launch.cluster.supervision import worker_handle
from mooncake.launch.cluster.supervision.local_keeper import FreeGpus, LocalKeeper
from mooncake.launch.cluster.supervision.supervisor import End, How
from mooncake.launch.cluster.supervision.worker_handle import Begin
from mooncake.launch.host import machine_facts
from tests.support.serve.plain_settings import worker_settings
from tests.support.waiting import LONG_S


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FreeGpus:
    """Four, of those of a machine."""
    monkeypatch.setattr(machine_facts, "num_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,6,7")
    return FreeGpus()


def test_each_worker_gets_gpus_that_no_other_has_or_a_share_of_one(gpus: FreeGpus) -> None:
    pair, half, other = gpus.take("a", 2.0), gpus.take("b", 0.5), gpus.take("c", 0.5)
    assert list(pair) == ["3", "4"]
    assert list(half) == list(other) == ["6"]
    assert list(gpus.take("d", 1.0)) == ["7"]
    gpus.give_back(half)
    assert list(gpus.take("b", 0.5)) == ["6"], "it comes back to where it was"
    gpus.give_back(pair)
    assert list(gpus.take("a", 2.0)) == ["3", "4"]


def test_three_shares_of_a_third_fit_on_one_gpu(gpus: FreeGpus) -> None:
    assert {name for _ in range(3) for name in gpus.take("a", 0.3333)} == {"3"}


def test_gpus_are_numbered_where_the_user_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "num_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(FreeGpus().take("a", 2.0)) == ["0", "1"]


def test_more_gpus_than_are_free_are_refused_with_the_numbers(gpus: FreeGpus) -> None:
    needs = "its ranks need {} free GPUs; this machine has 4, and {} are free in all"
    with pytest.raises(MooncakeError, match=f"^large: {needs.format(8, 4)}$"):
        gpus.take("large", 8.0)
    gpus.take("first", 3.0)
    with pytest.raises(MooncakeError, match=f"^second: {needs.format(3, 1)}$"):
        gpus.take("second", 3.0)
    gpus.take("third", 0.5)
    with pytest.raises(MooncakeError, match=r"and 0\.5 are free in all"):
        gpus.take("fourth", 1.0)


def attended() -> None:
    """Wait until no thread looks after the worker."""
    for thread in threading.enumerate():
        if thread.name == "keeper of decode-0":
            thread.join(LONG_S)


def test_a_process_that_is_not_wanted_any_more_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server ends with a start that is given up: nobody would end a process that starts by
    itself.
    """
    asked: list[bool] = []
    keeper: LocalKeeper

    def start(place: Path, wanted: Callable[[], bool]) -> None:
        asked.append(wanted())
        keeper.close()
        asked.append(wanted())
        raise MooncakeError("it is not to start any more")

    unused: Any = None
    monkeypatch.setattr(worker_handle, "connected", lambda _: None)
    keeper = LocalKeeper(
        worker_settings(), tmp_path / "place", lambda: unused, start, lambda: None
    )  # fmt: skip
    keeper.run()
    attended()
    assert asked == [True, False]
    assert keeper.end() == End(How.STOPPED, "it is not to start any more")


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (MooncakeError("no secret"), End(How.STOPPED, "no secret")),
        (OSError("no memory"), End(How.DIED, "OSError('no memory')")),
    ],
)
def test_a_thread_that_fails_is_the_end_of_its_worker(
    tmp_path: Path, error: Exception, end: End
) -> None:
    """The supervisor then starts it again, or tells why it cannot start."""
    given_back: list[str] = []

    def begin() -> Begin:
        raise error

    keeper = LocalKeeper(
        worker_settings(), tmp_path / "place", begin, lambda _: None,
        lambda: given_back.append("GPUs"),
    )  # fmt: skip
    for _ in range(2):
        keeper.run()
        attended()
        assert keeper.end() == end
    state = keeper.state()
    assert state is not None
    assert (state.pid, state.ready) == (0, False)
    keeper.close()
    assert given_back == ["GPUs"]
