"""Waits of ranks for each other's hosts are needed: without each of them a test fails.

Those by which a GPU's work waits for other ranks are in `tests/device/test_group.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda.mutants import TAKEN_OUT
from tests.support.examples import tries_all

TESTS = Path(__file__).parents[2] / "unit/model/running/test_followers.py"
_RUNNER, _FOLLOWER, _LEAD = (
    f"mooncake.model.{each}"
    for each in ("running.runner:ModelRunner", "running.follower", "parallel.lead:Lead")
)
MISSED = {
    "test_samples_are_told_once_all_ranks_have_heard_of_the_step_begun_on_them": [
        f"{_RUNNER}._decode: self._lead.wait_until_guesses_are_heard()"
    ],
    "test_who_waits_for_guesses_waits_for_the_device_too": [
        f"{_FOLLOWER}:_Behind.reached: mark.reached()",
        f"{_FOLLOWER}:_Behind.reached: self.guesses.wait_until_begun(self.number)",
    ],
    "test_a_result_is_told_once_no_rank_writes_to_pages_of_its_step": [
        f"{_RUNNER}._leave_pages: self._model.stage.ranks.meet()\n"
        f"{_FOLLOWER}:Follower.step: self._model.stage.ranks.meet()"
    ],
    "test_a_follower_that_holds_other_pages_ends_all_ranks": [
        f"{_LEAD}._meeting: self.group.meet()\n{_FOLLOWER}:Follower.check: self._group.meet()\n"
        f"{_FOLLOWER}:Follower.use: self._group.meet()\n"
        f"{_FOLLOWER}:Follower.measure: self._group.meet()"
    ],
}
"""Test -> waits without which it fails; those of several ranks together, a line each."""


@pytest.mark.slow
@pytest.mark.skipif(not tries_all(), reason="make test-all takes these waits out")
@pytest.mark.parametrize(
    ("test", "waits"), [(test, waits) for test, each in MISSED.items() for waits in each]
)
def test_waits_that_are_taken_out_are_missed(test: str, waits: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.cuda.mutants",
         f"{TESTS}::{test}"],
        env=os.environ | {TAKEN_OUT: waits}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "1 failed" in done.stdout
