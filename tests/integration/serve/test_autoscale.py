"""`mooncake serve --autoscale`: real processes come with the load and leave when it has gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.chart.test_chart import SETTINGS, needs_helm, rendered
from tests.support.autoscalers import adapter_query, replicas, value_of
from tests.support.promql import Recording
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_SEQS = 4
NUM_CLIENTS = 3 * NUM_SEQS
"""More at once than one engine takes."""
NUM_TOKENS = 200
FEW_TOKENS = 20
PAUSE_S = 1.0
FEW, MORE = {"prefill-0", "decode-0"}, {"prefill-0", "decode-0", "decode-1"}


class Followed:
    """A server that was asked much and then little, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.advised: dict[str, dict[str, int]] = {}
        """The number of each role that is wanted, and what /metrics says, under load and after."""
        self.metrics: dict[str, str] = {}
        self._prompts = [[7 + number, 8, 9, 10] for number in range(NUM_CLIENTS)]
        with ServerProcess(
            str(nano_checkpoint(folder)), "--port", "0", "--dtype", "float32", "--kvstore", "0",
            "--kv-cache-memory-bytes", "16MiB", "--max-model-len", "512",
            "--max-num-seqs", str(NUM_SEQS),
            "--autoscale", "prefill=1..1,decode=1..2,start=1,quiet=15",
        ) as self._server:  # fmt: skip
            self._server.wait_until_serving()
            self.first = self._server.wait_for_workers(FEW)
            self._expected = [self._server.complete(each, NUM_TOKENS) for each in self._prompts]
            self._play()
        self.output = self._server.output

    def _play(self) -> None:
        self._load_is_gone, self._all_is_over = threading.Event(), threading.Event()
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
            asking = [clients.submit(self._ask_little)]
            asking += [clients.submit(self._ask_much, number) for number in range(NUM_CLIENTS)]
            try:
                self.with_one_more = self._server.wait_for_workers(MORE)
                self._look("load")
                self._load_is_gone.set()
                for each in asking[1:]:
                    each.result()
                self.last = self._server.wait_for_workers(FEW)
                self._look("rest")
            finally:
                self._load_is_gone.set()
                self._all_is_over.set()
            for each in asking:
                each.result()

    def _ask_much(self, number: int) -> None:
        while not self._load_is_gone.is_set():
            answer = self._server.complete(self._prompts[number], NUM_TOKENS)
            assert answer == self._expected[number]

    def _ask_little(self) -> None:
        while not self._all_is_over.wait(PAUSE_S):
            answer = self._server.complete(self._prompts[0], FEW_TOKENS)
            assert answer == self._expected[0][:FEW_TOKENS]

    def _look(self, when: str) -> None:
        self.metrics[when] = self._server.text("/metrics")
        told = self._server.get("/v1/cluster/status")["replicas"]
        self.advised[when] = {each["role"]: each["wanted"] for each in told}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    return Followed(tmp_path_factory.mktemp("model"))


def test_a_decode_worker_comes_with_the_load_and_leaves_when_it_has_gone(
    followed: Followed,
) -> None:
    """Requests run all the time, also while it comes and leaves, and every answer is right."""
    few = {name: followed.with_one_more[name] for name in FEW}
    assert followed.last == followed.first == few
    assert "Traceback" not in followed.output


@needs_helm
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("by", ["prometheus-adapter", "KEDA"])
def test_kubernetes_makes_as_many_of_its_metrics(by: str, role: str, followed: Followed) -> None:
    """The shipped queries over what a Prometheus would have scraped, and the published formula of
    HorizontalPodAutoscalers, which KEDA makes too.
    """
    query, target = (adapter_asks if by == "prometheus-adapter" else keda_asks)(role)
    recording = Recording()
    service = {"namespace": "default", "service": "one-mooncake-gateway"}
    for at_s, when in ((0.0, "load"), (600.0, "rest")):
        # A gateway that has just started does not know the load yet.
        recording.add(followed.metrics["rest"], at_s, **service, pod="p0")
        recording.add(followed.metrics[when], at_s, **service, pod="p1")
        elsewhere = service | {"namespace": "other"}
        recording.add(followed.metrics["load"], at_s, **elsewhere, pod="p2")
    counts = {"prefill": 1, "decode": 1}
    for at_s, when in ((0.0, "load"), (600.0, "rest")):
        counts[role] = replicas(counts[role], value_of(query, recording, at_s), target)
        assert counts[role] == followed.advised[when][role]
    assert followed.advised == {
        "load": {"prefill": 1, "decode": 2}, "rest": {"prefill": 1, "decode": 1},
    }  # fmt: skip


def chart_of(role: str, *settings: str) -> list[dict[str, Any]]:
    ask = f"{role}.autoscaling.metric=desired", f"{role}.autoscaling.maxReplicas=5"
    return rendered(*SETTINGS, *ask, *settings)


def adapter_asks(role: str) -> tuple[str, float]:
    """Return the query and the target where prometheus-adapter answers."""
    documents = chart_of(role, "monitoring.adapter=true")
    [scaler] = [d for d in documents if d["kind"] == "HorizontalPodAutoscaler"]
    [asked] = [metric["external"] for metric in scaler["spec"]["metrics"]]
    [rule] = [
        rule
        for document in documents
        if document["metadata"]["name"] == "one-mooncake-adapter"
        for rule in yaml.safe_load(document["data"]["config.yaml"])["externalRules"]
        if rule["name"]["as"] == asked["metric"]["name"]
    ]
    assert asked["target"]["type"] == "AverageValue"
    labels = asked["metric"]["selector"]["matchLabels"]
    return adapter_query(rule, "default", labels), float(asked["target"]["averageValue"])


def keda_asks(role: str) -> tuple[str, float]:
    """Return the query and the target where KEDA asks Prometheus."""
    documents = chart_of(role, f"{role}.autoscaling.prometheus=http://p:9090")
    [scaled] = [d for d in documents if d["kind"] == "ScaledObject"]
    [trigger] = scaled["spec"]["triggers"]
    return trigger["metadata"]["query"], float(trigger["metadata"]["threshold"])


@pytest.mark.parametrize(
    ("current", "wanted", "made"),
    [(1, 2, 2), (9, 10, 10), (10, 9, 10), (11, 12, 11), (10, 12, 12), (20, 18, 20)],
)
def test_kubernetes_ignores_a_tenth(current: int, wanted: int, made: int) -> None:
    """So docs/scaling.md says."""
    assert replicas(current, wanted, 1.0) == made
