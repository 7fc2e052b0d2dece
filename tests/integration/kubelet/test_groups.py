"""Groups of pods (LeaderWorkerSet) on the small kubelet: what it does with them, and engines of the
chart whose stages have a pod each.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.kubelet import network
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.sandbox import Image
from tests.support.kubelet.served import (
    CHART,
    GATEWAY,
    IMAGE,
    RELEASE,
    cluster_in,
    image,
    streamed,
)
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.skipif(network.why_not() != "", reason=network.why_not())

STAGES_VALUES = CHART / "ci" / "stages-values.yaml"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 10
NUM_TOKENS = 40
SAYS = (
    'echo "$LWS_WORKER_INDEX of $LWS_GROUP_SIZE follows $LWS_LEADER_ADDRESS";'
    "exec python3 -m http.server 80 --directory /tmp"
)
READY = {"httpGet": {"port": 80}, "periodSeconds": 1, "timeoutSeconds": 30}


def group_set(replicas: int, word: str = "") -> dict[str, Any]:
    """Return a set of groups of two pods; `word` tells one template from another."""
    container = {
        "name": "main", "image": "plain", "command": ["/bin/sh", "-ec", f"{SAYS} {word}"],
        "readinessProbe": READY,
    }  # fmt: skip
    template = {
        "metadata": {"labels": {"app": "g"}},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]},
    }
    rollout = {"rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0}}
    of_groups = {"size": 2, "leaderTemplate": template, "workerTemplate": template}
    return {
        "kind": "LeaderWorkerSet", "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "metadata": {"name": "g", "labels": {"app": "g"}},
        "spec": {
            "replicas": replicas, "rolloutStrategy": rollout, "leaderWorkerTemplate": of_groups,
        },
    }  # fmt: skip


def uids(cluster: Cluster, labels: dict[str, str]) -> dict[str, str]:
    pods = cluster.api.listed("pods", labels)
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def test_a_group_starts_ends_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    mine = {"app": "g"}
    with Cluster(tmp_path, {"plain": Image({"PATH": path})}) as cluster:
        cluster.api.put("leaderworkersets", group_set(2))
        cluster.wait_until_rolled_out()
        first = uids(cluster, mine)
        assert set(first) == {"g-0", "g-0-1", "g-1", "g-1-1"}
        said = (tmp_path / "logs" / "g-1-1.main.log").read_text()
        assert "1 of 2 follows g-1.g.default" in said

        init = cluster.pods["g-1-1"].first_process("main")
        assert init is not None
        os.kill(init, signal.SIGKILL)
        lost = {first["g-1"], first["g-1-1"]}
        cluster.wait_for(lambda: not lost & {*uids(cluster, mine).values()}, "both pods to go")
        cluster.wait_until_rolled_out()
        second = uids(cluster, mine)
        assert {name for name in first if second[name] == first[name]} == {"g-0", "g-0-1"}

        most = set(second)
        cluster.api.put("leaderworkersets", group_set(2, "# new"))

        def is_replaced() -> bool:
            now = uids(cluster, mine)
            most.update(now)
            return cluster.is_rolled_out() and not {*now.values()} & {*second.values()}

        cluster.wait_for(is_replaced, "the update")
        assert set(uids(cluster, mine)) == set(first)
        assert {"g-2", "g-2-1"} <= most, "a group more came before one went"
        cluster.api.put("leaderworkersets", group_set(1, "# new"))
        cluster.wait_for(lambda: set(uids(cluster, mine)) == {"g-0", "g-0-1"}, "one group left")
        cluster.api.delete("leaderworkersets", "g")
        cluster.wait_for(lambda: not cluster.pods, "no pods")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
def test_engines_of_several_pods_answer_and_come_back_together(tmp_path: Path) -> None:
    decode = {"app.kubernetes.io/component": "decode"}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": decode}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    more = {"decode": {"affinity": affinity}}
    with cluster_in(tmp_path, {IMAGE: image()}, nodes=2, of=STAGES_VALUES, more=more) as cluster:
        cluster.helm("install", RELEASE, str(CHART), "-f", f"{tmp_path}/values.yaml")
        cluster.wait_until_rolled_out()
        url = cluster.url(GATEWAY)
        cluster.wait_for(
            lambda: httpx.get(f"{url}/health", timeout=LONG_S).status_code == 200, "the gateway"
        )
        expected = streamed(url, PROMPT, NUM_TOKENS).tokens
        assert len(expected) == NUM_TOKENS
        before = uids(cluster, decode)
        leader = f"{RELEASE}-mooncake-decode-0"
        assert set(before) == {leader, f"{leader}-1"}
        nodes = {pod["spec"]["nodeName"] for pod in cluster.api.listed("pods", decode)}
        assert nodes == {"node-0", "node-1"}
        said = (tmp_path / "logs" / f"{leader}-1.ranks.log").read_text()
        assert "follows a lead at" in said, "its stage is computed there"
        assert "no rank is started for" not in said, "probes are no errors"

        init = cluster.pods[f"{leader}-1"].first_process("ranks")
        assert init is not None
        os.kill(init, signal.SIGKILL)
        old = {*before.values()}
        cluster.wait_for(
            lambda: not old & {*uids(cluster, decode).values()} and cluster.is_rolled_out(),
            "the group to be made anew",
        )

        # A leader that has lost a stage may end by itself just as it is told to.
        num_ended = len(cluster.ended)

        def again() -> bool:
            try:
                return streamed(url, PROMPT, NUM_TOKENS).tokens == expected
            except (ValueError, httpx.HTTPError):
                return False

        cluster.wait_for(again, "an answer")
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")
        # The one that was started again may be told to end before its program has begun.
        ended = cluster.ended[num_ended:]
        assert ended
        assert not [e for e in ended if e.killed or e.code not in (0, -signal.SIGTERM, 143)]
