"""Engines of the chart whose stages have a pod each: LeaderWorkerSets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake.cli.main import make_parser
from tests.integration.chart.test_chart import SETTINGS, needs_helm, pods, rendered
from tests.integration.chart.test_values import CI, component, from_file, templates_of_groups

pytestmark = needs_helm
APART = (
    *(each for each in SETTINGS if not each.startswith("prefill.")),
    "prefill.shape.podPerStage=true", "prefill.shape.pipelineParallelSize=3",
    "prefill.shape.tensorParallelSize=2", "prefill.replicas=4", "prefill.drainSeconds=77",
)  # fmt: skip
ENVIRONMENT = str(Path(sys.executable).parent)
"""Where `dumb-init` is."""
LEADER = "one-mooncake-prefill-2.one-mooncake-prefill.default"


def group_set(documents: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = [each for each in documents if each["kind"] == "LeaderWorkerSet"]
    spec: dict[str, Any] = found["spec"]
    return spec


def words_of(template: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """Run a pod's script with programs that only tell how they were called; return the words of the
    last call of each.
    """
    file = folder / "mooncake"
    file.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/mooncake.words\n")
    never = folder / "sleep"
    never.write_text("#!/bin/sh\nexit 1\n")  # what waits in the background ends
    for program in (file, never):
        program.chmod(0o755)
    [container] = template["spec"]["containers"]
    given = {"POD_IP": "10.1.2.3", "NODE_NAME": "node-7", "LWS_LEADER_ADDRESS": LEADER}
    subprocess.run(
        [*container["command"], *container["args"]], check=True,
        env={"PATH": os.pathsep.join((str(folder), ENVIRONMENT, os.environ["PATH"])), **given},
    )  # fmt: skip
    return {file.stem: file.read_text().splitlines() for file in folder.glob("*.words")}


def test_a_leader_has_the_last_stage_and_asks_its_workers_for_the_others(tmp_path: Path) -> None:
    documents = rendered(*APART)
    spec, templates = group_set(documents), templates_of_groups(documents)
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (4, 3)
    words = words_of(templates["prefill"], tmp_path)
    given = make_parser().parse_args(words["mooncake"])
    assert (given.role, given.rank_backend, given.bind_host) == ("prefill", "gloo", "10.1.2.3")
    assert (given.pipeline_parallel_size, given.tensor_parallel_size) == ("3", "2")
    name, _, service = LEADER.partition(".")
    assert given.stage_hosts == [f"{name}-{at}.{service}:7100" for at in (1, 2)]
    words = words_of(templates["prefill-ranks"], tmp_path)
    of_worker = make_parser().parse_args(words["mooncake"])
    assert (of_worker.bind_host, of_worker.port) == ("10.1.2.3", "7100")
    [container] = templates["prefill-ranks"]["spec"]["containers"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == of_worker.port
    assert of_worker.shutdown_timeout == given.shutdown_timeout == "77"
    assert templates["prefill-ranks"]["spec"]["terminationGracePeriodSeconds"] == 107
    for kind in ("startup", "liveness", "readiness"):
        assert container[f"{kind}Probe"]["tcpSocket"] == {"port": port["name"]}
    names = {each["name"] for each in container["env"]}
    assert {"MOONCAKE_CLUSTER_SECRET_FILE", "MOONCAKE_WEIGHTS_KEY"} <= names
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert {"model", "own"} <= mounts


def test_the_service_gives_all_pods_of_a_group_their_names_at_once() -> None:
    documents = rendered(*APART, "networkPolicy.enabled=true")
    of_role = {d["kind"]: d for d in documents if d["metadata"]["name"] == "one-mooncake-prefill"}
    service, budget = of_role["Service"]["spec"], of_role["PodDisruptionBudget"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    ports = {each["name"] for each in service["ports"]}
    for template in templates_of_groups(documents).values():
        labels = template["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        [container] = template["spec"]["containers"]
        assert {each["name"] for each in container["ports"]} <= ports
    policy = of_role["NetworkPolicy"]["spec"]
    assert {"port": 7100, "protocol": "TCP"} in policy["ingress"][0]["ports"]
    own = {"podSelector": {"matchLabels": service["selector"]}}
    assert {"from": [own]} in policy["ingress"], "ranks meet at ports of their own"
    decode = next(d for d in documents if d["kind"] == "NetworkPolicy" and component(d) == "decode")
    assert all("ports" in each for each in decode["spec"]["ingress"])


def test_groups_are_replaced_one_more_before_one_goes_or_as_is_said() -> None:
    def limits(*settings: str) -> Any:
        strategy = group_set(rendered(*APART, *settings))["rolloutStrategy"]
        return strategy["rollingUpdateConfiguration"]

    assert limits() == {"maxSurge": 1, "maxUnavailable": 0}
    ask = "prefill.updateStrategy.rollingUpdate.max"
    assert limits(f"{ask}Surge=0", f"{ask}Unavailable=1") == {"maxSurge": 0, "maxUnavailable": 1}
    with pytest.raises(ValueError, match="have RollingUpdate alone"):
        rendered(*APART, "prefill.updateStrategy.type=Recreate")


@pytest.mark.parametrize("kind", ["HorizontalPodAutoscaler", "ScaledObject"])
def test_groups_are_scaled_by_load(kind: str) -> None:
    ask = ["prefill.autoscaling.maxReplicas=5"]
    if kind == "ScaledObject":
        ask.append("prefill.autoscaling.prometheus=http://prometheus:9090")
    documents = rendered(*APART, *ask)
    assert "replicas" not in group_set(documents)
    [scaler] = [each for each in documents if each["kind"] == kind]
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
        "name": "one-mooncake-prefill",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("prefill.shape.pipelineParallelSize=1", "there is one stage; give prefill.shape.pipe"),
        (
            "prefill.shape.gpu=nvidia.com/gpu",
            "stages in pods of their own are computed by CPUs so far",
        ),
        ("kubeRay.enabled=true", "leave out kubeRay.enabled"),
    ],
)
def test_what_groups_cannot_have_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rendered(*APART, setting)


def test_names_of_pods_of_long_releases_fit_into_labels() -> None:
    """Pods of a group's workers are of a StatefulSet NAME-GROUP and labelled with it and a hash."""
    documents = rendered(*APART, release="a-release-of-which-the-name-is-as-long-as-helm-lets-1")
    [found] = [each for each in documents if each["kind"] == "LeaderWorkerSet"]
    assert len(f"{found['metadata']['name']}-99-0123456789") <= 63


def test_all_else_of_a_pod_is_that_of_an_engine_in_one_pod() -> None:
    [file] = [each for each in CI if each.stem == "stages-values"]
    apart = yaml.safe_load(file.read_text())
    together = json.loads(json.dumps(apart))
    for role in ("prefill", "decode"):
        del together[role]["shape"]["podPerStage"]
    whole = {role: document for role, (document, _) in pods(from_file(together)).items()}
    for name, template in templates_of_groups(from_file(apart)).items():
        expected = whole[name.removesuffix("-ranks")]["spec"]["template"]
        assert template["metadata"] == expected["metadata"]
        [own], [other] = template["spec"].pop("containers"), expected["spec"]["containers"]
        assert template["spec"] == {k: v for k, v in expected["spec"].items() if k != "containers"}
        for field in ("image", "resources", "securityContext", "volumeMounts"):
            assert own[field] == other[field]
        assert own["env"] == other["env"]
