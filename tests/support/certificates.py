"""Certificates for tests, made as a person makes them: by `mooncake certificates`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from mooncake.cli.main import run


@dataclass(frozen=True)
class Host:
    """The files of one host."""

    cert: str
    key: str
    ca: str

    def trusting(self, *, proven: bool = False) -> ssl.SSLContext:
        """Return a client that trusts the host's authority; `proven`: it has this certificate."""
        context = ssl.create_default_context(cafile=self.ca)
        if proven:
            context.load_cert_chain(self.cert, self.key)
        return context


def make_host(directory: Path, *names: str) -> Host:
    """Return a host of an authority of its own, which is called 127.0.0.1 and `names`."""
    authority, out = directory / "ca", directory / "host"
    assert run(["certificates", "authority", "--out", str(authority)]) == 0
    words = [word for name in names or ("127.0.0.1",) for word in ("--name", name)]
    assert (
        run(["certificates", "host", *words, "--authority", str(authority), "--out", str(out)]) == 0
    )
    return Host(*(str(out / name) for name in ("cert.pem", "key.pem", "ca.pem")))
