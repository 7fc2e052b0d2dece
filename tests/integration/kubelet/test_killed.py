"""Each kind of pod killed as memory or a machine fails: no one of them is the cluster."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.kubelet import network
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.served import (
    CHART,
    GATEWAY,
    IMAGE,
    RELEASE,
    Answer,
    Refused,
    cluster_in,
    image,
    streamed,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(network.why_not() != "", reason=network.why_not()),
    pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed"),
]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 150
WORKERS = ("prefill", "decode", "kvstore")


def started(cluster: Cluster, role: str) -> dict[str, int]:
    """Return the pods of a role, and how often containers of each were started again."""
    return {
        pod["metadata"]["uid"]: sum(cluster.num_restarts(pod["metadata"]["name"]))
        for pod in cluster.present(role)
    }


def names(cluster: Cluster, role: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.present(role)]


def test_a_killed_pod_of_any_kind_is_a_pause_and_no_pod_is_the_cluster(tmp_path: Path) -> None:
    # Those who are killed leave their sockets behind, and the next ones find others by theirs.
    more: dict[str, dict[str, object]] = {
        "decode": {"replicas": 2},
        "pods": {"shmPath": f"{tmp_path}/sockets"},
    }
    with cluster_in(tmp_path, {IMAGE: image()}, nodes=2, more=more) as cluster:
        cluster.helm("install", RELEASE, str(CHART), "-f", f"{tmp_path}/values.yaml")
        cluster.wait_until_rolled_out()
        url = cluster.url(GATEWAY)

        def ask() -> Answer:
            return streamed(url, PROMPT, NUM_TOKENS)

        def moved(protocol: str) -> float:
            """Return the bytes that engines have moved so, as gateways have heard."""
            workers = httpx.get(f"{url}/v1/cluster/status").json()["workers"]
            name = f"transfer_{protocol}_bytes"
            return sum(
                float(each["load"]["counters"].get(name, 0)) for each in workers if each["load"]
            )

        def answered() -> bool:
            try:
                return ask().tokens == expected
            except (Refused, ValueError, httpx.HTTPError):
                return False

        expected = ask().tokens
        assert len(expected) == NUM_TOKENS
        assert ask().num_cached_tokens, "the second finds the first's prompt"
        cluster.wait_for(lambda: moved("shm") > 0, "KV between the memories of pods")
        assert moved("tcp") == 0

        for role in WORKERS:
            answers: list[Answer] = []
            asking = threading.Thread(target=_noting(ask, answers))
            asking.start()
            killed, *_ = names(cluster, role)
            cluster.crash(killed)
            asking.join(300)
            if role != "prefill":  # without the only one, requests are refused until it is back
                [answer] = answers
                assert answer.tokens == expected, f"{role}: the stream goes on"
            cluster.wait_until_rolled_out()
            cluster.wait_for(answered, f"an answer after the loss of a {role} pod")

        before = {role: started(cluster, role) for role in WORKERS}
        cluster.crash(*names(cluster, "gateway"))
        cluster.wait_until_rolled_out()
        cluster.wait_for(answered, "an answer of the new gateways")
        assert {role: started(cluster, role) for role in WORKERS} == before, "workers wait for them"
        assert ask().num_cached_tokens, "caches are warm"
        assert moved("shm") > moved("tcp") == 0

        [pod] = cluster.present("prefill")
        cluster.lose(pod["spec"]["nodeName"])
        cluster.wait_until_rolled_out()
        cluster.wait_for(answered, "an answer after the loss of a node")
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")


def _noting(ask: Callable[[], Answer], answers: list[Answer]) -> Callable[[], None]:
    def run() -> None:
        try:
            answers.append(ask())
        except (Refused, ValueError, httpx.HTTPError):
            return

    return run
