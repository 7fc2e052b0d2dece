"""What operators may add to the chart, role by role, and what Kubernetes' own schemas say of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mooncake import __version__
from mooncake.cli.main import make_parser
from tests.integration.chart.test_chart import (
    CHART,
    ROLES,
    SETTINGS,
    documents_of,
    is_signer,
    needs_helm,
    of_helm,
    pods,
    rendered,
    served,
)
from tests.support.docs.blocks import BLOCKS

pytestmark = needs_helm
CI = sorted((CHART / "ci").glob("*.yaml"))
VERSIONS = ("1.31", "1.34", "1.37")
"""Of Kubernetes: what it may meet, from the oldest that clouds run to the newest with a schema."""


SCHEMAS = Path(__file__).parents[2] / "support" / "chart" / "custom_resources.yaml"
"""Of custom resources, which do not come with Kubernetes."""


def from_file(values: Path | dict[str, Any]) -> list[dict[str, Any]]:
    """Return what helm makes of the chart with a file of values."""
    text = values.read_text() if isinstance(values, Path) else yaml.safe_dump(values)
    try:
        return documents_of(of_helm("template", "one", str(CHART), "--values", "-", given=text))
    except ValueError as error:
        raise AssertionError(error) from error


def custom_resources() -> dict[str, dict[str, Any]]:
    """Return the schema of each kind of custom resource."""
    described = yaml.safe_load(SCHEMAS.read_text())
    shared = described.pop("$defs")
    return {
        kind: {
            "type": "object",
            "required": ["apiVersion", "kind", "metadata", "spec"],
            "properties": {
                "apiVersion": {"const": each["apiVersion"]},
                "spec": {"type": "object", **each["spec"]},
            },
            "$defs": shared,
        }
        for kind, each in described.items()
    }


def test_a_wrong_field_of_a_custom_resource_is_noticed() -> None:
    for kind, schema in custom_resources().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        wrong = {
            "apiVersion": schema["properties"]["apiVersion"]["const"], "kind": kind,
            "metadata": {}, "spec": {"selectors": {}},
        }  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


NEEDED: dict[str, Any] = {
    "image": {"repository": "r"}, "gateway": {"allowKeyless": True},
    "model": {"volume": {"hostPath": {"path": "/m"}}},
}  # fmt: skip


def workloads(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {role: document for role, (document, _) in pods(documents).items()}


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_values_for_ci_are_what_kubernetes_takes(file: Path) -> None:
    import kubernetes_validate

    documents = from_file(file)
    assert {"Deployment", "StatefulSet"} <= {each["kind"] for each in documents}
    schemas = custom_resources()
    documents += [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": each}
        for role, each in (templates_of_kuberay(documents) | templates_of_groups(documents)).items()
    ]
    for document in documents:
        if document["kind"] in schemas:
            jsonschema.validate(document, schemas[document["kind"]])
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


def templates_of_kuberay(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pods that a RayCluster starts, by their roles."""
    return {
        group.get("groupName", "head"): group["template"]
        for each in documents
        if each["kind"] == "RayCluster"
        for group in (each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"])
    }


def templates_of_groups(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pods of LeaderWorkerSets: of leaders by their roles, of workers by ROLE-ranks."""
    found = {}
    for each in documents:
        if each["kind"] == "LeaderWorkerSet":
            role, group = component(each), each["spec"]["leaderWorkerTemplate"]
            found |= {role: group["leaderTemplate"], f"{role}-ranks": group["workerTemplate"]}
    return found


def component(document: dict[str, Any]) -> str:
    return str(document["metadata"]["labels"]["app.kubernetes.io/component"])


def test_kuberay_starts_the_same_pods_with_ray_beside_them() -> None:
    """Ray's head is nobody's but KubeRay's: what the pods do for Mooncake names none."""
    [file] = [each for each in CI if each.stem == "kuberay-values"]
    with_it = yaml.safe_load(file.read_text())
    own = workloads(from_file({**with_it, "kubeRay": {}}))
    documents = from_file(with_it)
    templates = templates_of_kuberay(documents)
    assert set(templates) == {"head", "prefill", "decode"}
    assert set(workloads(documents)) == {"gateway", "kvstore"}
    for role in ("gateway", "kvstore"):
        assert workloads(documents)[role] == own[role]
    for role, template in templates.items():
        assert len(ray_commands(template)) == 1
        if role == "head":
            continue
        plain = own[role]["spec"]["template"]
        [with_ray], [alone] = template["spec"]["containers"], plain["spec"]["containers"]
        without = script_of(template).replace(ray_commands(template)[0], "")
        assert without.split() == script_of(plain).split()
        assert {**with_ray, **dict.fromkeys(("args", "env", "ports"))} == {
            **alone, **dict.fromkeys(("args", "env", "ports"))
        }  # fmt: skip
        assert template["spec"]["volumes"] == plain["spec"]["volumes"]
    [cluster] = [each for each in documents if each["kind"] == "RayCluster"]
    counts = {g["groupName"]: g["replicas"] for g in cluster["spec"]["workerGroupSpecs"]}
    assert counts == {"prefill": 2, "decode": 3}
    budgets = {
        each["metadata"]["name"].rpartition("-")[2]: each["spec"].get("minAvailable")
        for each in documents
        if each["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"prefill": 1, "decode": 2, "gateway": None, "kvstore": None}


def script_of(template: dict[str, Any]) -> str:
    [container] = template["spec"]["containers"]
    script: str = container["args"][0]
    return script.replace("\\\n", " ")


def ray_commands(template: dict[str, Any]) -> list[str]:
    return re.findall(r"^(?:exec )?(ray start .*)$", script_of(template), re.MULTILINE)


def test_ray_is_started_by_flags_that_it_has_and_takes_no_port_that_is_not_named() -> None:
    from ray.scripts.scripts import start

    documents = rendered(*SETTINGS, "kubeRay.enabled=true")
    for role, template in templates_of_kuberay(documents).items():
        [command] = ray_commands(template)
        given = start.make_context("ray", shlex.split(command)[2:]).params
        assert {name for name in given if name.endswith("_port") and not given[name]} <= {
            "ray_client_server_port",  # without ray[client] there is no such server
            "port" if role != "head" else "",
        }
        [container] = template["spec"]["containers"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        named = ("node_manager", "object_manager", "runtime_env_agent")
        assert [given[f"{name}_port"] for name in named] == [
            ports["ray-node"], ports["ray-objects"], ports["ray-env"]
        ]  # fmt: skip
        given_env = {each["name"] for each in container["env"]}
        assert given_env >= {"RAY_AUTH_TOKEN", "RAY_USE_TLS", "RAY_TLS_SERVER_CERT"}
    keys = {d["metadata"]["name"]: d.get("data") for d in documents if d["kind"] == "Secret"}
    needed = ("image.repository=r", "model.volume.hostPath.path=/m", "gateway.allowKeyless=true")
    made = rendered(*needed, "kubeRay.enabled=true")
    keys = {d["metadata"]["name"]: set(d["data"]) for d in made if d["kind"] == "Secret"}
    assert keys["one-mooncake"] >= {"ray-token", "token-head"}


@pytest.mark.parametrize(
    "setting",
    ["decode.autoscaling.maxReplicas=3", "prefill.updateStrategy.type=Recreate"],
)
def test_what_kuberay_has_not_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="leave them out with kubeRay"):
        rendered(*SETTINGS, "kubeRay.enabled=true", setting)


def test_all_values_of_ci_together_use_every_kind() -> None:
    kinds = {d["kind"] for file in CI for d in from_file(file)}
    assert kinds >= {
        "HorizontalPodAutoscaler", "ScaledObject", "NetworkPolicy", "Ingress", "HTTPRoute",
        "InferencePool", "RayCluster", "ServiceMonitor", "PrometheusRule", "ConfigMap", "Secret",
        "LeaderWorkerSet", "BackendTLSPolicy",
    }  # fmt: skip


def test_the_chart_is_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@pytest.mark.parametrize("file", [CHART / "values.yaml", *CI], ids=lambda file: file.stem)
def test_lint_has_no_complaint(file: Path) -> None:
    words = ["helm", "lint", "--strict", os.fspath(CHART), "--values", os.fspath(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert not {"ERROR", "WARNING"} & set(done.stdout.replace("[", " ").replace("]", " ").split())


def test_what_a_role_adds_reaches_its_pods_alone() -> None:
    added: dict[str, Any] = {
        "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}, "podLabels": {"team": "x"},
        "nodeSelector": {"gpu": "h200"}, "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "high", "runtimeClassName": "nvidia", "hostNetwork": True,
        "serviceAccountName": "me", "extraEnv": [{"name": "A", "value": "b"}],
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "extraVolumes": [{"name": "v", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
        "initContainers": [{"name": "i", "image": "i"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    }  # fmt: skip
    for role in ROLES:
        values = {**NEEDED, role: {**NEEDED.get(role, {}), **added}}
        for other, workload in workloads(from_file(values)).items():
            template = workload["spec"]["template"]
            text, spec = yaml.safe_dump(template), template["spec"]
            if other != role:
                assert not {"h200", "nvidia", "mountPath: /v"} & set(text.split("\n")), other
                assert "runtimeClassName" not in spec
                continue
            for name in ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName"):
                assert spec[name] == added[name]
            assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
            assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == (
                "me",
                True,
            )
            assert template["metadata"]["labels"]["team"] == "x"
            assert added["podAnnotations"].items() <= template["metadata"]["annotations"].items()
            [container] = spec["containers"]
            assert added["extraEnv"][0] in container["env"]
            assert container["envFrom"] == added["envFrom"]
            assert added["extraVolumes"][0] in spec["volumes"]
            assert added["extraVolumeMounts"][0] in container["volumeMounts"]
            assert added["initContainers"][0] in spec["initContainers"]
            [spread] = spec["topologySpreadConstraints"]
            selected = spread["labelSelector"]["matchLabels"]
            assert selected == workload["spec"]["selector"]["matchLabels"]


def test_gateways_share_a_directory_of_batches_as_their_page_says() -> None:
    [block] = [each for each in BLOCKS if each.place.startswith("docs/batches.md") and
               each.text.startswith("gateway:")]  # fmt: skip
    [asked] = yaml.safe_load(block.text).values()
    values = {**NEEDED, "gateway": {**NEEDED.get("gateway", {}), **asked}}
    for role, workload in workloads(from_file(values)).items():
        spec = workload["spec"]["template"]["spec"]
        [container] = spec["containers"]
        is_gateway = role == "gateway"
        assert ("--batch-dir" in str(container)) is is_gateway
        assert (asked["extraVolumes"][0] in spec["volumes"]) is is_gateway
        assert (asked["extraVolumeMounts"][0] in container["volumeMounts"]) is is_gateway


def test_each_worker_has_its_shape_and_each_rank_a_gpu() -> None:
    shapes = {
        "prefill": {
            "shape": {"tensorParallelSize": 4, "pipelineParallelSize": 2, "gpu": "nvidia.com/gpu"},
        },
        "decode": {
            "shape": {
                "tensorParallelSize": 8, "decodeContextParallelSize": 2, "gpu": "amd.com/gpu",
            },
            "resources": {"limits": {"memory": "9Gi", "amd.com/gpu": 8}, "requests": {"cpu": 3}},
        },
    }  # fmt: skip
    documents = from_file({**NEEDED, **shapes})
    config = {role: served(container) for role, (_, container) in pods(documents).items()}
    prefill = config["prefill"]
    assert (prefill.tensor_parallel_size, prefill.pipeline_parallel_size) == (4, 2)
    decode = config["decode"]
    assert (decode.tensor_parallel_size, decode.decode_context_parallel_size) == (8, 2)
    resources = {
        role: workload["spec"]["template"]["spec"]["containers"][0]["resources"]
        for role, workload in workloads(documents).items()
    }
    assert resources["prefill"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 8}
    assert resources["prefill"]["requests"]["memory"] == "32Gi"
    assert resources["decode"]["limits"] == {"memory": "9Gi", "amd.com/gpu": 8}
    assert resources["decode"]["requests"]["cpu"] == 3
    assert "gpu" not in str(resources["kvstore"])


def test_gpus_that_are_not_one_a_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 of nvidia\.com/gpu for 8 ranks: leave it out"):
        rendered(
            *SETTINGS, "decode.shape.gpu=nvidia.com/gpu", "decode.shape.tensorParallelSize=8",
            "decode.resources.limits.nvidia\\.com/gpu=4",
        )  # fmt: skip


def test_engines_start_a_pod_before_one_ends_and_have_time_to_finish() -> None:
    found = workloads(rendered(*SETTINGS, "decode.drainSeconds=77"))
    kinds = {role: workload["kind"] for role, workload in found.items()}
    assert kinds == {
        "gateway": "Deployment", "prefill": "Deployment", "decode": "Deployment",
        "kvstore": "StatefulSet",
    }  # fmt: skip
    decode = found["decode"]["spec"]
    assert decode["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert decode["template"]["spec"]["terminationGracePeriodSeconds"] == 107
    [container] = decode["template"]["spec"]["containers"]
    assert "--shutdown-timeout 77" in container["args"][0]
    for role in ("prefill", "decode", "kvstore"):
        [container] = found[role]["spec"]["template"]["spec"]["containers"]
        assert '--node-id "$NODE_NAME"' in container["args"][0], "one pool for a node's engines"
    other = "decode.updateStrategy.type=Recreate"
    assert workloads(rendered(*SETTINGS, other))["decode"]["spec"]["strategy"] == {
        "type": "Recreate"
    }


def test_replicas_follow_our_own_metrics() -> None:
    from tests.support.reference_docs import metrics

    documented = "\n".join(metrics())
    for role in ("gateway", "prefill", "decode"):
        ask = f"{role}.autoscaling.maxReplicas=5", f"{role}.autoscaling.target=9"
        documents = rendered(*SETTINGS, *ask)
        [scaler] = [d for d in documents if d["kind"] == "HorizontalPodAutoscaler"]
        assert "replicas" not in workloads(documents)[role]["spec"]
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"one-mooncake-{role}"}
        assert scaler["spec"]["scaleTargetRef"] == target
        [metric] = scaler["spec"]["metrics"]
        name = metric["pods"]["metric"]["name"]
        assert f"`{name}`" in documented or f"`{name.replace('_', ':', 1)}`" in documented
        ask = (*ask, f"{role}.autoscaling.prometheus=http://prometheus:9090")
        [scaled] = [d for d in rendered(*SETTINGS, *ask) if d["kind"] == "ScaledObject"]
        assert scaled["spec"]["maxReplicaCount"] == 5
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        assert query.removeprefix("sum(").replace(":", "_").startswith(name)


DESIRED = ("prefill.autoscaling.metric=desired", "prefill.autoscaling.maxReplicas=5")


def test_gateways_know_the_bounds_of_what_they_desire() -> None:
    from mooncake.scheduler.scaling.config import Bounds, ScalingConfig

    def told(*ask: str) -> ScalingConfig | None:
        [container] = workloads(rendered(*SETTINGS, *ask))["gateway"]["spec"]["template"]["spec"][
            "containers"
        ]
        found = re.search(r"--autoscale (\S+)", container["args"][0])
        return ScalingConfig.parse(found[1]) if found else None

    assert told() is None
    assert told("prefill.autoscaling.maxReplicas=5") is None, "by load, pods are counted outside"
    config = told(*DESIRED, "prefill.autoscaling.startSeconds=90", "decode.replicas=3")
    assert config == ScalingConfig(
        prefill=Bounds(1, 5), decode=Bounds(3, 3), start_s=90.0, quiet_s=600.0
    )


def test_the_replicas_that_gateways_desire_are_waited_for_once() -> None:
    """The gateways have waited before they desire fewer."""
    [scaler] = [d for d in rendered(*SETTINGS, *DESIRED) if d["kind"] == "HorizontalPodAutoscaler"]
    assert scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 0
    [metric] = scaler["spec"]["metrics"]
    assert metric == {
        "type": "External",
        "external": {
            "metric": {
                "name": "mooncake_desired_replicas",
                "selector": {"matchLabels": {"service": "one-mooncake-gateway", "role": "prefill"}},
            },
            "target": {"type": "AverageValue", "averageValue": "1"},
        },
    }
    keda = (
        *DESIRED, "prefill.autoscaling.prometheus=http://p:9090",
        "prefill.autoscaling.minReplicas=0",
    )  # fmt: skip
    [scaled] = [d for d in rendered(*SETTINGS, *keda) if d["kind"] == "ScaledObject"]
    assert scaled["spec"]["minReplicaCount"] == 0
    assert scaled["spec"]["triggers"][0]["metadata"]["threshold"] == "1"


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (("gateway.autoscaling.metric=desired", "gateway.autoscaling.maxReplicas=3"),
         "gateways desire prefill and decode replicas"),
        ((*DESIRED, "prefill.autoscaling.minReplicas=0"), "only KEDA"),
        (("decode.autoscaling.minReplicas=0", "decode.autoscaling.maxReplicas=3",
          "decode.autoscaling.prometheus=http://p:9090"), "only KEDA"),
    ],
)  # fmt: skip
def test_what_would_never_scale_is_refused(ask: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rendered(*SETTINGS, *ask)


def test_a_network_policy_lets_clients_to_the_api_and_pods_to_one_another() -> None:
    ask = ("networkPolicy.enabled=true", "networkPolicy.metrics[0].ipBlock.cidr=10.0.0.0/8")
    documents = rendered(*SETTINGS, *ask)
    found = pods(documents)
    policies = {
        d["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: d["spec"]
        for d in documents
        if d["kind"] == "NetworkPolicy" and not is_signer(d)
    }
    assert set(policies) == set(ROLES)
    for role, spec in policies.items():
        own, *others = spec["ingress"]
        [peer] = own["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "one"
        declared = {(p["containerPort"], None) for p in found[role][1]["ports"]}
        ranges = set() if role == "gateway" else {(7000, 7099)}
        assert {(p["port"], p.get("endPort")) for p in own["ports"]} == declared | ranges
        opened = {each["ports"][0]["port"]: each.get("from") for each in others}
        ports = {p["name"]: p["containerPort"] for p in found[role][1]["ports"]}
        block = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
        wanted = {ports["http"]: None} if role == "gateway" else {ports["health"]: block}
        assert opened == wanted, "where gateways are joined, and admin ports, are for us alone"


def test_ways_in_lead_to_the_gateways_service() -> None:
    ask = (
        "ingress.hosts={a.example}", "ingress.className=nginx", "route.hostnames={b.example}",
        "route.parentRefs[0].name=edge", "gateway.service.port=81",
    )  # fmt: skip
    documents = rendered(*SETTINGS, *ask)
    services = {
        d["metadata"]["name"]: d["spec"]["ports"][0]["port"]
        for d in documents
        if d["kind"] == "Service"
    }
    [ingress] = [d for d in documents if d["kind"] == "Ingress"]
    [rule] = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert services[backend["name"]] == backend["port"]["number"] == 81
    [route] = [d for d in documents if d["kind"] == "HTTPRoute"]
    [ref] = route["spec"]["rules"][0]["backendRefs"]
    assert services[ref["name"]] == ref["port"]
    picker = "route.endpointPicker.name=picker"
    documents = rendered(*SETTINGS, *ask, picker)
    [pool] = [d for d in documents if d["kind"] == "InferencePool"]
    [route] = [d for d in documents if d["kind"] == "HTTPRoute"]
    [ref] = route["spec"]["rules"][0]["backendRefs"]
    assert (ref["kind"], ref["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert (
        pool["spec"]["selector"]["matchLabels"].items()
        <= workloads(documents)["gateway"]["spec"]["template"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize(("source", "tool"), [("hf://a/b", "hf download"), ("s3://a/b", "aws s3")])
def test_models_are_brought_where_they_are_read(source: str, tool: str) -> None:
    fetched = {"source": source, "revision": "0" * 40, "digests": "list", "size": "9Gi"}
    values = {**NEEDED, "model": {"path": "/models/b", "download": fetched}}
    for role, workload in workloads(from_file(values)).items():
        spec = workload["spec"]["template"]["spec"]
        [brings] = [each for each in spec["initContainers"] if each["name"] == "model"]
        assert tool in brings["args"][0]
        leaves_out = "--exclude '*.safetensors'" in brings["args"][0]
        assert leaves_out == (role not in ("prefill", "decode"))
        assert {"name": "model", "mountPath": "/models"} in brings["volumeMounts"]
        size = "9Gi" if role in ("prefill", "decode") else "1Gi"
        assert {"name": "model", "emptyDir": {"sizeLimit": size}} in spec["volumes"]
    done = subprocess.run(["sh", "-n", "-c", brings["args"][0]], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_small_volume_is_for_those_who_read_no_weights() -> None:
    small = {"configMap": {"name": "config"}}
    values = {**NEEDED, "model": {**NEEDED["model"], "smallVolume": small}}
    for role, workload in workloads(from_file(values)).items():
        [model, *_] = workload["spec"]["template"]["spec"]["volumes"]
        assert ("configMap" in model) == (role not in ("prefill", "decode"))


def test_ways_in_know_that_gateways_speak_https() -> None:
    known = {"hostname": "b.example", "wellKnownCACertificates": "System"}
    values = {
        **NEEDED, "gateway": {"allowKeyless": True, "tlsSecret": "c"},
        "ingress": {"hosts": ["a.example"]},
        "route": {"parentRefs": [{"name": "edge"}], "backendTls": known},
    }  # fmt: skip
    documents = from_file(values)
    [ingress] = [d for d in documents if d["kind"] == "Ingress"]
    assert set(ingress["metadata"]["annotations"].values()) == {"HTTPS"}
    [service] = [
        d
        for d in documents
        if d["metadata"]["name"] == "one-mooncake-gateway" and d["kind"] == "Service"
    ]
    assert service["spec"]["ports"][0]["appProtocol"] == "https"
    [policy] = [d for d in documents if d["kind"] == "BackendTLSPolicy"]
    assert policy["spec"]["validation"] == known
    [target] = policy["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == ("Service", service["metadata"]["name"])
    for route, problem in (
        ({}, r"route\.backendTls: gateways speak HTTPS"),
        ({"endpointPicker": {"name": "p"}}, r"route\.endpointPicker: .* in plain HTTP"),
    ):
        asked = {**values, "route": {"parentRefs": [{"name": "edge"}], **route}}
        with pytest.raises(AssertionError, match=problem):
            from_file(asked)
    plain = {**values, "gateway": {"allowKeyless": True}, "route": {}}
    text = yaml.safe_dump(from_file(plain))
    assert "appProtocol" not in text
    assert "backend-protocol" not in text


def test_a_claim_that_is_read_only_takes_no_download() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}
    fetched = {"source": "s3://a/b", "digests": "list"}
    with pytest.raises(AssertionError, match=r"model\.download\.source: nothing can be fetched"):
        from_file({**NEEDED, "model": {"volume": claim, "download": fetched}})


def test_helm_test_asks_the_service() -> None:
    [pod] = [d for d in rendered(*SETTINGS, "gateway.tlsSecret=c") if d["kind"] == "Pod"]
    url = pod["spec"]["containers"][0]["command"][-1]
    assert url == "https://one-mooncake-gateway:8000"
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_notes_and_guide_name_commands_that_there_are() -> None:
    guide = (CHART.parents[1] / "docs" / "kubernetes.md").read_text()
    for line in guide.splitlines():
        if line.startswith("    mooncake "):
            make_parser().parse_args(shlex.split(line)[1:])
