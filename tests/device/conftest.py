"""These tests have a GPU: an emulated one, in this process. They skip where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.cuda.install import Emulated, emulated, why_not


@pytest.fixture(autouse=True, scope="session")
def needs_the_emulator() -> None:
    """Skip all, saying why, where there is none."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu() -> Iterator[Emulated]:
    """One GPU; what is still queued at the test's end runs, and nothing may have raced."""
    with emulated() as made:
        yield made
        made.finish()


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of k2-nano."""
    return init_checkpoint("k2-nano", 0, tmp_path_factory.mktemp("nano") / "nano", dtype="float32")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of k2-tiny."""
    return init_checkpoint("k2-tiny", 0, tmp_path_factory.mktemp("tiny") / "tiny", dtype="float32")
