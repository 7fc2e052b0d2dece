"""What the tests of several processes share."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.certificates import Host, make_host

AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that say where httpx reads the certificates of authorities."""


@pytest.fixture(scope="session")
def tls_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The certificate of this machine."""
    return make_host(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """Each client of httpx otherwise reads all their certificates, in 30 ms of computing, also one
    that speaks plain HTTP. Tests make thousands.
    """
    if "httpx" not in sys.modules:
        yield
        return
    from httpx import create_ssl_context as make

    @functools.cache
    def read(*_: str | None) -> Any:
        return make()

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is True and cert is None and trust_env:
            return read(*map(os.environ.get, AUTHORITIES))
        return make(verify=verify, cert=cert, trust_env=trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", create)
        yield
