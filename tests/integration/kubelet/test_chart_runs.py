"""The chart's pods come up on the small kubelet and answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.kubelet import network
from tests.support.kubelet.served import GATEWAY, installed, streamed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(network.why_not() != "", reason=network.why_not()),
    pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed"),
]


def test_the_values_for_cpus_come_up_and_answer(tmp_path: Path) -> None:
    with installed(tmp_path) as cluster:
        tokens = streamed(cluster.url(GATEWAY), "The quick brown fox", 8)
        assert len(tokens) == 8
        roles = ("head", "gateway", "prefill", "decode", "kvstore")
        assert {role: len(cluster.ready(role)) for role in roles} == dict.fromkeys(roles, 1)
        cluster.helm("uninstall", "one")
        cluster.wait_for(lambda: not cluster.pods, "no pods")
        assert not [each for each in cluster.ended if each.killed or each.code]
