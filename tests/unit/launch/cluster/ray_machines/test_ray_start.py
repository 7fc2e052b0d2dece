"""The start of Ray's processes on a machine. No Ray runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake.base import MooncakeError
from mooncake.launch.cluster.ray_machines import ray_node
from mooncake.launch.host.secrets.credentials import private_dir


class Silent:
    """Stands for a `ray start` that never says that it runs, such as one whose head hangs."""

    def __init__(self, words: list[str], **_: Any) -> None:
        self.words = words
        self.ended = False

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.ended = True

    def wait(self, _: float) -> int:
        return 0


@pytest.mark.parametrize("head", [True, False])
def test_a_start_that_hangs_is_given_up_at_a_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: bool
) -> None:
    """Else `mooncake up` kills its process before the engines of the machine were told to leave.
    What Ray writes is for its user alone, on the head and elsewhere.
    """
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    started: list[Silent] = []

    def start(*words: Any, **settings: Any) -> Silent:
        started.append(Silent(*words, **settings))
        return started[-1]

    monkeypatch.setattr(ray_node.subprocess, "Popen", start)
    signals = iter([False, True])
    with pytest.raises(MooncakeError, match=r"^stopped while Ray was starting"):
        ray_node.OwnRaylet("10.0.0.7:6379", "10.0.0.8", lambda: next(signals), head=head)
    [process] = started
    assert process.ended
    assert f"--temp-dir={private_dir()}" in process.words
    assert [*private_dir().iterdir()] == [], "nothing is left of its log"
