"""GPUs of a worker's ranks as Ray sets them aside, on a machine that Ray was told has four."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

FULL = {"RAY_memory_usage_threshold": "0.01"}
"""Has Ray believe that the memory is used up, as it is by a large pool: it would kill what looks
after workers again and again.
"""


@pytest.fixture(scope="module")
def found() -> Any:
    command = [sys.executable, "-m", "tests.support.serve.placed_workers"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, **FULL},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_an_instance_sees_the_gpus_of_its_ranks_and_of_no_other(found: Any) -> None:
    seen = found["before"]
    assert {name: len(gpus) for name, gpus in seen.items() if name != "pool"} == {
        "pair": 2, "half": 1, "other_half": 1,
    }  # fmt: skip
    assert not set(seen["pair"]) & {*seen["half"], *seen["other_half"]}
    assert {*seen["pair"], *seen["half"]} < {"3", "4", "6", "7"}, "of those that we may see"


def test_a_killed_instance_comes_back_whole_on_its_gpus(found: Any) -> None:
    before, after = ({k: sorted(v) for k, v in found[when].items()} for when in ("before", "after"))
    assert after == before
    assert found["lost"] == ["pair"], "told once"


def test_more_gpus_than_a_node_has_free_are_refused_with_the_numbers(found: Any) -> None:
    needs = "its ranks need {} free GPUs of one node; this machine has 4, and {} are free in all"
    assert found["large"] == "large: " + needs.format(8, 4)
    assert found["second"] == "second: " + needs.format(3, 1)
