"""`mooncake conformance` that is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from mooncake.bench.conformance import suite
from mooncake.cli import main


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Otherwise the signal would end the tests."""

    def fail(*_: object) -> None:
        raise AssertionError("the command would just end")

    before = signal.signal(signal.SIGTERM, fail)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_check_undoes_what_it_has_done_before_sigterm_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a prefill process that is stopped would never go on."""
    undone: list[str] = []

    async def run(*_: object) -> AsyncIterator[None]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            undone.append("it goes on")
        yield

    monkeypatch.setattr(suite, "run", run)
    assert main.run(["conformance", "--model", "any"]) == 130
    assert undone == ["it goes on"]
