"""What the tests of several processes share."""

from __future__ import annotations

import pytest

from tests.support.certificates import Host, make_host


@pytest.fixture(scope="session")
def tls_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The certificate of this machine."""
    return make_host(tmp_path_factory.mktemp("tls"))
