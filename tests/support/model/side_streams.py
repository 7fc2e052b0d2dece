"""torch's CUDA streams without a GPU: what is begun on which, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


class FakeStream:
    """A stream that notes what it waits for."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name = name
        self._noted = noted

    def wait_stream(self, other: FakeStream) -> None:
        """Wait for what `other` was given so far."""
        self._noted.append(f"{self.name} waits for {other.name}")


class FakeStreams:
    """A main stream, and side streams as they are made; work is noted behind "on" its stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace those of torch until the test ends."""
        self.noted: list[str] = []
        self._current = [FakeStream("main", self.noted)]
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream("side", self.noted))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self._current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self._use)

    @contextmanager
    def _use(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        self.noted.append(f"on {stream.name}")
        try:
            yield
        finally:
            self._current.pop()
            self.noted.append(f"on {self._current[-1].name}")
