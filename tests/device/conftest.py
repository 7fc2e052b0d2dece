"""These tests have a GPU: an emulated one, in this process. They skip where there can be none.

With a real GPU those marked `any_gpu` run on it, so that what the emulated one does is compared
with what a GPU does, and the others skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.cuda.install import Emulated, Real, one_gpu, why_not
from tests.support.followers import forked_followers

IMPORTED = (
    "tests.support.cuda.processes", "tests.support.cuda.install", "tests.support.cuda.ops",
    "torch.distributed.tensor", "torch._dynamo",
)  # fmt: skip


@pytest.fixture(autouse=True)
def needs_a_gpu(request: pytest.FixtureRequest) -> None:
    """Skip, saying why, what cannot run on the GPU that there is."""
    if torch.cuda.is_available():
        if request.node.get_closest_marker("any_gpu") is None:
            pytest.skip("looks into the emulated GPU, and torch sees a real one here")
    elif (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of several threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpu() -> Iterator[Real | Emulated]:
    """One GPU; what is still queued at the test's end runs, and nothing may have raced."""
    with one_gpu() as made:
        yield made
        made.finish()


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of k2-nano."""
    return init_checkpoint("k2-nano", 0, tmp_path_factory.mktemp("nano") / "nano", dtype="float32")


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Followers are forked. They find imported what torch imports at a device's first op, too."""
    with forked_followers(tmp_path_factory.mktemp("forks"), *IMPORTED):
        yield
