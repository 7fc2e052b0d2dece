"""Tests of some folders start many processes, install, or compare with transformers: slow ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.certificates import Host, make_host

SLOW_FOLDERS = {"install", "model", "pool", "serve"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that `make test` leaves them to `make test-slow`."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.relative_to(here).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tls_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The certificate of this machine."""
    return make_host(tmp_path_factory.mktemp("tls"))
