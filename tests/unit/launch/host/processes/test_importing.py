"""Imports hold back the garbage collector, and leave it as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mooncake.launch.host.processes.start_phases import importing


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_nothing_is_collected_meanwhile_also_where_contexts_nest() -> None:
    gc.enable()
    with importing():
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_lets_it_collect_again() -> None:
    gc.enable()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_who_has_disabled_it_keeps_it_so() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
