"""The interface that has an address, and that NCCL is told of it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from mooncake.base.models.parallel import Shape
from mooncake.launch.host.interfaces import NCCL_INTERFACE, bind_nccl, interface_of
from mooncake.launch.worker.ranks import rank_processes
from mooncake.launch.worker.weights.open_model import open_model
from mooncake.model.options import ModelOptions


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "")  # so that it is as before in the end
    del os.environ[NCCL_INTERFACE]


def test_loopback_has_its_addresses() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"


def test_an_address_of_no_interface_has_none() -> None:
    assert interface_of("198.51.100.77") is None
    bind_nccl("198.51.100.77")
    assert NCCL_INTERFACE not in os.environ, "NCCL chooses"


def test_nccl_is_told_of_one_interface_unless_the_user_names_others() -> None:
    bind_nccl("127.0.0.1")
    assert os.environ[NCCL_INTERFACE] == "=lo", "no other one whose name begins so"
    os.environ[NCCL_INTERFACE] = "bond"
    bind_nccl("127.0.0.1")
    assert os.environ[NCCL_INTERFACE] == "bond"


@pytest.mark.parametrize(
    ("device", "far", "told"),
    [("cuda", None, "=lo"), ("cuda", "10.0.0.7", "=bond7"), ("cpu", None, None)],
)
def test_ranks_on_gpus_meet_where_the_worker_listens_for_them(
    device: str, far: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one machine over loopback."""

    def starts(*_: object) -> NoReturn:
        raise InterruptedError(os.environ.get(NCCL_INTERFACE))

    names = {"127.0.0.1": "lo", "10.0.0.7": "bond7"}
    monkeypatch.setattr("mooncake.launch.host.interfaces.interface_of", names.get)
    monkeypatch.setattr(rank_processes, "start_ranks", starts)
    there: Any = None if far is None else SimpleNamespace(own_host=far)
    options = ModelOptions(device=device, shape=Shape(tp=2))
    with pytest.raises(InterruptedError) as begun:
        open_model("somewhere", "float32", options, far=there)
    assert begun.value.args == (told,)
