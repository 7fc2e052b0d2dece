"""What the chart lets its pods do as it is shipped: little, unless a value says more."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mooncake.base import Role, WorkerLoad
from mooncake.cli.main import run as run_command
from mooncake.launch.host.families import render
from mooncake.launch.worker.metrics import EngineFigures, engine_families
from tests.integration.chart.test_chart import SETTINGS, needs_helm, pods, rendered
from tests.integration.chart.test_values import (
    CI,
    NEEDED,
    from_file,
    templates_of_groups,
    templates_of_kuberay,
    workloads,
)
from tests.support.kubelet.admission import containers, violations
from tests.unit.launch.test_monitoring import DESIRED, gateway_text

pytestmark = needs_helm
CLAIM = {"persistentVolumeClaim": {"claimName": "model", "readOnly": True}}
DIGESTS = {"a.json": b"{}", "sub/b.txt": b"b", "model.safetensors": b"weights"}
PROGRAM = Path(sys.executable).parent / "mooncake"
HUB = "0123456789abcdef0123456789abcdef01234567"


def all_pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the spec of each pod that the documents start, by what starts it."""
    templates = templates_of_kuberay(documents) | templates_of_groups(documents)
    found = {name: template["spec"] for name, template in templates.items()}
    for each in documents:
        if each["kind"] == "Pod":
            found[each["metadata"]["name"]] = each["spec"]
        elif "template" in each.get("spec", {}):
            found[each["metadata"]["name"]] = each["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_pods_are_restricted_and_small_unless_a_value_says_otherwise(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    if "hostPath" in values["model"].get("volume", {}):
        values["model"]["volume"] = CLAIM
    values.get("pods", {}).pop("rdma", None)
    found = all_pods(from_file(values))
    assert len(found) >= 5
    for name, spec in found.items():
        assert violations(spec) == [], name
        for each in containers(spec):
            assert each["resources"]["requests"].keys() >= {"cpu", "memory"}, (name, each["name"])
            assert each["resources"]["limits"]["memory"], (name, each["name"])
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
        for volume in spec.get("volumes", []):
            if "emptyDir" in volume:
                assert volume["emptyDir"]["sizeLimit"], (name, volume)
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, "root's, and the fsGroup's to read"


def test_memory_is_limited_to_what_is_requested_unless_a_limit_says_more() -> None:
    def resources(*settings: str) -> Any:
        return pods(rendered(*SETTINGS, *settings))["decode"][1]["resources"]

    assert resources("decode.resources.requests.memory=200Gi")["limits"] == {"memory": "200Gi"}
    more = resources("pods.resources.limits.memory=9Gi", "pods.resources.limits.x/nic=1")
    assert more["limits"] == {"memory": "9Gi", "x/nic": 1}


def test_a_user_whose_group_could_not_read_secrets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"podSecurityContext\.fsGroup: the files of Secrets"):
        rendered(*SETTINGS, "podSecurityContext.fsGroup=null")
    assert rendered(
        *SETTINGS, "podSecurityContext.fsGroup=null", "podSecurityContext.runAsUser=null"
    )


def shown_to(spec: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the Secrets and their keys that any container of a pod could see; "*": all."""
    found = set()
    volumes = spec.get("volumes", [])
    sources = [each for v in volumes for each in v.get("projected", {}).get("sources", [])]
    for source in (*volumes, *sources):
        if (secret := source.get("secret")) is not None:
            keys = [item["key"] for item in secret.get("items", [])] or ["*"]
            found |= {(secret.get("secretName", secret.get("name")), key) for key in keys}
    for each in containers(spec):
        refs = [source["secretRef"] for source in each.get("envFrom", []) if "secretRef" in source]
        found |= {(ref["name"], "*") for ref in refs}
        refs = [v.get("valueFrom", {}).get("secretKeyRef") for v in each.get("env", [])]
        found |= {(ref["name"], ref["key"]) for ref in refs if ref}
    return found


def signing(documents: list[dict[str, Any]]) -> dict[str, set[tuple[str, str]]]:
    """Return the pods that see what can sign for others, and what they see of it."""
    specs = all_pods(documents)
    [signer] = [spec for name, spec in specs.items() if name.endswith("-signer")]
    wanted = {each for each in shown_to(signer) if not each[1].startswith("token-")}
    whole = {(secret, "*") for secret, _ in wanted}
    seen = {name: shown_to(spec) & (wanted | whole) for name, spec in specs.items()}
    return {name: keys for name, keys in seen.items() if keys}


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_no_pod_but_the_signer_sees_what_signs_for_others(file: Path) -> None:
    """Init containers, groups, KubeRay's pods and helm's test, too, by any kind of source."""
    found = signing(from_file(file))
    assert {name.rpartition("-")[2] for name in found} == {"signer"}
    [seen] = found.values()
    assert {key for _, key in seen} == {"cluster-secret", "tls.crt", "tls.key"}


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_no_pod_but_the_signer_names_the_secret_of_the_cluster(file: Path) -> None:
    """Root of a node can read a Secret whole of which a pod there sees one key."""
    specs = all_pods(from_file(file))
    signs = [name for name, spec in specs.items() if "cluster-secret" in json.dumps(spec)]
    [signer] = [name for name in specs if name.endswith("-signer")]
    assert signs == [signer]
    [secret] = [name for name, key in shown_to(specs[signer]) if key == "cluster-secret"]
    naming = {name for name, spec in specs.items() if secret in {n for n, _ in shown_to(spec)}}
    assert naming == {signer}
    assert {key for name, key in shown_to(specs[signer]) if name == secret} == {"cluster-secret"}


@pytest.mark.parametrize(
    "leak",
    [
        {"extraVolumes": [{"name": "x", "secret": {"secretName": "one-mooncake-signer"}}]},
        {"extraVolumes": [
            {"name": "x", "projected": {"sources": [{"secret": {"name": "one-mooncake-signer"}}]}}
        ]},
        {"envFrom": [{"secretRef": {"name": "one-mooncake-signer"}}]},
        {"extraEnv": [{"name": "X", "valueFrom": {
            "secretKeyRef": {"name": "one-mooncake-signer", "key": "cluster-secret"}
        }}]},
    ],
)  # fmt: skip
def test_a_pod_that_sees_more_is_noticed(leak: dict[str, Any]) -> None:
    assert "one-mooncake-decode" in signing(from_file({**NEEDED, "decode": leak}))


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("pods.rdma=true", "prefill: capabilities"),
        ("prefill.hostNetwork=true", "hostNetwork"),
        ("pods.shmPath=/run/kv", "sockets: root"),
        ("podSecurityContext.runAsUser=0", "prefill: root"),
        ("model.volume.hostPath.path=/m", "hostPath"),
    ],
)
def test_what_is_not_restricted_is_noticed(setting: str, found: str) -> None:
    needed = ("image.repository=r", "gateway.allowKeyless=true")
    claim = ("model.volume.persistentVolumeClaim.claimName=c",) * ("hostPath" not in setting)
    assert found in violations(all_pods(rendered(*needed, *claim, setting))["one-mooncake-prefill"])


def policies(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        d["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: d["spec"]
        for d in documents
        if d["kind"] == "NetworkPolicy"
    }


def test_pods_send_to_this_release_and_to_names_unless_more_is_said() -> None:
    own = {"app.kubernetes.io/name": "mooncake", "app.kubernetes.io/instance": "one"}
    inside = {"to": [{"podSelector": {"matchLabels": own}}]}
    found = policies(rendered(*SETTINGS))
    assert set(found) >= set(pods(rendered(*SETTINGS)))
    for spec in found.values():
        assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
        if not spec["egress"]:  # the signer asks nobody
            continue
        asked, names = spec["egress"]
        assert asked == inside
        assert {(port["port"], port["protocol"]) for port in names["ports"]} == {
            (53, "UDP"), (53, "TCP")
        }  # fmt: skip
        assert names["to"], "no peer would be all"
    assert not policies(rendered(*SETTINGS, "networkPolicy.enabled=false"))
    collector = {"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "ports": [{"port": 4317}]}
    asks = {**NEEDED, "networkPolicy": {"egress": [collector], "dns": []}}
    found = policies(from_file(asks))
    assert found.pop("signer")["egress"] == []
    for spec in found.values():
        assert spec["egress"] == [inside, collector]


def test_only_pods_that_download_may_send_to_the_hub() -> None:
    def hub(values: dict[str, Any]) -> list[Any]:
        return [
            rule["to"]
            for spec in policies(from_file(values)).values()
            for rule in spec["egress"]
            if {"port": 443, "protocol": "TCP"} in rule.get("ports", [])
        ]

    assert hub(NEEDED) == []
    fetched = {"source": "hf://a/b", "revision": HUB, "digests": "list"}
    values = {**NEEDED, "model": {**NEEDED["model"], "download": fetched}}
    assert len(hub(values)) == 4
    peers = [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
    assert hub({**values, "networkPolicy": {"downloads": peers}}) == [peers] * 4


def test_prometheus_reaches_the_gateways_beside_their_clients() -> None:
    clients, metrics = (
        [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
        [{"ipBlock": {"cidr": "10.2.0.0/16"}}],
    )
    values = {**NEEDED, "networkPolicy": {"clients": clients, "metrics": metrics}}
    [gateway] = [s for role, s in policies(from_file(values)).items() if role == "gateway"]
    asked = [
        rule["from"] for rule in gateway["ingress"] if rule.get("ports", [{}])[0]["port"] == 8000
    ]
    assert clients + metrics in asked


def test_a_deployment_has_not_failed_while_its_pods_may_still_start() -> None:
    for role, workload in workloads(rendered(*SETTINGS)).items():
        if workload["kind"] == "Deployment" and role != "signer":
            [container] = workload["spec"]["template"]["spec"]["containers"]
            probe = container["startupProbe"]
            assert (
                workload["spec"]["progressDeadlineSeconds"]
                > probe["periodSeconds"] * probe["failureThreshold"]
            ), role


def test_keda_waits_before_it_ends_pods_and_asks_for_this_namespace_alone() -> None:
    ask = (
        "decode.autoscaling.maxReplicas=5", "decode.autoscaling.prometheus=http://p:9090",
        "decode.autoscaling.quietSeconds=77",
    )  # fmt: skip
    [scaled] = [d for d in rendered(*SETTINGS, *ask) if d["kind"] == "ScaledObject"]
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 77}}
    metadata = scaled["spec"]["triggers"][0]["metadata"]
    assert 'namespace="default"' in metadata["query"]
    assert metadata["ignoreNullValues"] == "false"


def scraped(role: Role, number: float) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield what Prometheus has of /metrics of a role's two pods, whose load is `number` and one
    more, with the labels that a ServiceMonitor adds.
    """
    for pod in (0, 1):
        load = WorkerLoad(num_running=int(number) + pod, num_queued_tokens=int(number) + pod)
        if role is Role.GATEWAY:
            text = gateway_text()
        else:
            text = render(engine_families("w", role, EngineFigures(load, 0.0))).decode()
        added = {"namespace": "default", "pod": f"p{pod}", "service": f"one-mooncake-{role.value}"}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, {**sample.labels, **added}, sample.value


def selected(
    selector: str, series: Iterable[tuple[str, dict[str, str], float]]
) -> list[tuple[dict[str, str], float]]:
    """Return the series that a selector of Prometheus matches: a name and `=`, `!=` of labels."""
    name, conditions = re.fullmatch(r"([a-z_:]+)\{(.*)\}", selector).groups()
    found = re.findall(r'(\w+)(=|!=)"([^"]*)"', conditions)
    assert ",".join(f'{label}{sign}"{value}"' for label, sign, value in found) == conditions
    return [
        (labels, value)
        for known, labels, value in series
        if known == name
        and all((labels.get(label, "") == text) == (sign == "=") for label, sign, text in found)
    ]


SCALED = {Role.GATEWAY: [0.0, 0.0], Role.PREFILL: [9.0, 10.0], Role.DECODE: [9.0, 10.0]}


@pytest.mark.parametrize("role", SCALED)
def test_what_scales_a_role_finds_its_pods_in_our_metrics(role: Role) -> None:
    ask = f"{role.value}.autoscaling.maxReplicas=5"
    keda = f"{role.value}.autoscaling.prometheus=http://p:9090"
    series = [each for other in SCALED for each in scraped(other, 9.0)]
    documents = rendered(*SETTINGS, ask, "monitoring.adapter=true")
    [scaler] = [d for d in documents if d["kind"] == "HorizontalPodAutoscaler"]
    asked = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    [rules] = [
        yaml.safe_load(d["data"]["config.yaml"])["rules"]
        for d in documents
        if d["metadata"]["name"] == "one-mooncake-adapter"
    ]
    [rule] = [rule for rule in rules if rule["name"]["as"] == asked]
    assert rule["metricsQuery"] == "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)"
    assert rule["resources"]["overrides"] == {n: {"resource": n} for n in ("namespace", "pod")}
    found = selected(rule["seriesQuery"], series)
    assert {labels["service"] for labels, _ in found} == {f"one-mooncake-{role.value}"}
    assert sorted(value for _, value in found) == SCALED[role]
    [scaled] = [d for d in rendered(*SETTINGS, ask, keda) if d["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    found = selected(re.fullmatch(r"sum\((.*)\)", query)[1], series)
    assert sum(value for _, value in found) == sum(SCALED[role])
    elsewhere = [(name, {**labels, "namespace": "other"}, value) for name, labels, value in series]
    assert selected(re.fullmatch(r"sum\((.*)\)", query)[1], elsewhere) == []


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_gateways_desire_is_found_in_their_metrics(role: Role) -> None:
    ask = f"{role.value}.autoscaling.maxReplicas=5", f"{role.value}.autoscaling.metric=desired"
    keda = f"{role.value}.autoscaling.prometheus=http://p:9090"
    series = list(scraped(Role.GATEWAY, 0.0))
    documents = rendered(*SETTINGS, *ask, "monitoring.adapter=true")
    [scaler] = [d for d in documents if d["kind"] == "HorizontalPodAutoscaler"]
    asked = scaler["spec"]["metrics"][0]["external"]["metric"]
    [rules] = [
        yaml.safe_load(d["data"]["config.yaml"])["externalRules"]
        for d in documents
        if d["metadata"]["name"] == "one-mooncake-adapter"
    ]
    [rule] = [rule for rule in rules if rule["name"]["as"] == asked["name"]]
    assert rule["metricsQuery"] == "max(<<.Series>>{<<.LabelMatchers>>})"
    labels = ",".join(f'{name}="{text}"' for name, text in asked["selector"]["matchLabels"].items())
    seen = selected(rule["seriesQuery"].replace("}", f",{labels}}}"), series)
    assert [value for _, value in seen] == [DESIRED[role]] * 2, "both gateways say so"
    [scaled] = [d for d in rendered(*SETTINGS, *ask, keda) if d["kind"] == "ScaledObject"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert selected(re.fullmatch(r"max\((.*)\)", query)[1], series) == seen


@pytest.mark.parametrize(
    ("download", "problem"),
    [
        ({"source": "hf://a/b", "digests": "list"}, "model.download.revision: the commit"),
        ({"source": "hf://a/b", "revision": "main"}, "Does not match pattern"),
        ({"source": "s3://a/b"}, "model.download.digests: name a ConfigMap"),
        ({"source": "hf://a/b", "revision": HUB}, "model.download.digests: name a ConfigMap"),
        (
            {"source": "hf://a/b", "revision": HUB, "digests": "l", "size": ""},
            "model.download.size",
        ),
    ],
)
def test_downloads_that_may_change_or_fill_a_disk_are_refused(
    download: dict[str, str], problem: str
) -> None:
    values = {**NEEDED, "model": {"download": {"size": "9Gi", **download}}}
    with pytest.raises(AssertionError, match=problem):
        from_file(values)


def run_downloads(
    roles: str,
    folder: Path,
    files: dict[str, bytes],
    flock: str = 'exec /usr/bin/flock "$@"',
    source: str = "hf://a/b",
) -> list[str]:
    """Run the init containers of pods of these roles at once, with programs that download those of
    `files` that they are asked for, and a `flock` that does this; return what each said.
    """
    place = folder / "model"
    fetched = {"source": source, "revision": HUB, "digests": "list", "size": "9Gi"}
    values = {**NEEDED, "model": {"path": str(place), "download": fetched}}
    rendered_roles = workloads(from_file(values))
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    writes = {
        weights: "".join(
            f"mkdir -p $(dirname {place}/{name}); printf %s {content.decode()} > {place}/{name}\n"
            for name, content in files.items()
            if name.endswith(".safetensors") is weights
        )
        for weights in (True, False)
    }
    downloads = f"""echo "$@" >> {folder}/called
            ! [ -e {folder}/fetches ] || echo 'two at once' >&2
            touch {folder}/fetches; sleep 0.1; mkdir -p {place}
            case "$*" in *"--exclude *.safetensors") ;; *) {writes[True]} ;; esac
            case "$*" in *"--include *.safetensors") ;; *) {writes[False]} ;; esac
            rm {folder}/fetches"""
    for name, script in {"hf": downloads, "aws": downloads, "flock": flock}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)

    def run(each: dict[str, Any]) -> str:
        [script] = each["args"]
        script = script.replace("/etc/mooncake-digests/digests", str(folder / "list"))
        script = script.replace("/etc/mooncake-digests", str(folder / "said"))
        script = script.replace("mooncake model", f"{PROGRAM} model")
        done = subprocess.run(
            [*each["command"], script], capture_output=True, text=True, check=False,
            env={"PATH": f"{programs}:/usr/bin:/bin", "HF_HOME": str(folder)},
        )  # fmt: skip
        return done.stderr

    def start(role: str) -> list[str]:
        steps = rendered_roles[role]["spec"]["template"]["spec"]["initContainers"]
        return [run(each) for each in steps if each["name"] in ("model", "verify")]

    pods = roles.split()
    with ThreadPoolExecutor(len(pods)) as pool:
        return [said for pod in pool.map(start, pods) for said in pod]


def listed_downloads(folder: Path) -> None:
    """Write what the ConfigMap of digests has."""
    listed = {name: hashlib.sha256(content).hexdigest() for name, content in DIGESTS.items()}
    (folder / "list").write_text("".join(f"{d}  {n}\n" for n, d in listed.items()))
    (folder / "said").mkdir()
    (folder / "said" / "weights-digests.json").write_text("{}")


@pytest.mark.parametrize("role", ["decode", "gateway"])
def test_what_is_fetched_is_of_one_commit_and_compared_once(role: str, tmp_path: Path) -> None:
    listed_downloads(tmp_path)
    (tmp_path / "said" / "weights-digests.json").unlink()
    wrong = run_downloads(role, tmp_path, {**DIGESTS, "a.json": b"[]"})
    assert wrong[0] == ""
    assert f"a.json has the SHA-256 {hashlib.sha256(b'[]').hexdigest()}" in wrong[1]
    assert "fetch it again" in wrong[1]
    assert (
        "the ConfigMap has no weights-digests.json; make"
        in run_downloads(role, tmp_path, DIGESTS)[1]
    )
    (tmp_path / "said" / "weights-digests.json").write_text("{}")
    assert run_downloads(role, tmp_path, DIGESTS) == ["", ""]
    assert (tmp_path / "model" / "weights-digests.json").read_text() == "{}"
    calls = (tmp_path / "called").read_text().splitlines()
    assert all(f"--revision {HUB}" in call for call in calls)
    assert len(calls) == 2, "what was wrong is fetched again"
    assert run_downloads(role, tmp_path, DIGESTS) == ["", ""]
    assert len((tmp_path / "called").read_text().splitlines()) == 2, "what is whole is kept"


def fetched_by(folder: Path) -> list[str]:
    """Return which files each download was asked for."""
    calls = (folder / "called").read_text().splitlines()
    return [call.partition(f" {folder}/model")[2].strip() for call in calls]


SMALL, WEIGHTS, ALL = "--exclude *.safetensors", "--include *.safetensors", ""


def test_pods_of_one_claim_fetch_each_file_once(tmp_path: Path) -> None:
    listed_downloads(tmp_path)
    roles = "decode gateway prefill kvstore decode gateway"
    assert run_downloads(roles, tmp_path, DIGESTS) == [""] * 12
    assert fetched_by(tmp_path) in ([ALL], [SMALL, WEIGHTS]), "as the first pod needs it"


@pytest.mark.parametrize(
    ("source", "first", "then", "asked"),
    [
        ("hf://a/b", "gateway", "decode", [SMALL, WEIGHTS]),
        ("hf://a/b", "decode", "gateway", [ALL]),
        ("s3://a/b", "gateway", "decode", [SMALL, f"--exclude * {WEIGHTS}"]),
        ("s3://a/b", "decode", "gateway", [ALL]),
    ],
)
def test_a_pod_fetches_what_is_missing_of_what_it_needs(
    source: str, first: str, then: str, asked: list[str], tmp_path: Path
) -> None:
    listed_downloads(tmp_path)
    for role in (first, then):
        assert run_downloads(role, tmp_path, DIGESTS, source=source) == ["", ""]
    assert fetched_by(tmp_path) == asked
    assert {name: (tmp_path / "model" / name).read_bytes() for name in DIGESTS} == DIGESTS


def test_small_files_that_engines_find_wrong_are_fetched_again(tmp_path: Path) -> None:
    listed_downloads(tmp_path)
    assert run_downloads("gateway", tmp_path, DIGESTS) == ["", ""]
    (tmp_path / "model" / "a.json").write_text("[]")
    assert "a.json has the SHA-256" in run_downloads("decode", tmp_path, DIGESTS)[1]
    assert run_downloads("decode", tmp_path, DIGESTS) == ["", ""]
    assert fetched_by(tmp_path) == [SMALL, WEIGHTS, ALL]


def test_files_without_locks_are_fetched_all_the_same(tmp_path: Path) -> None:
    listed_downloads(tmp_path)
    refuses = "echo 'flock: 9: No locks available' >&2; exit 66"
    said = run_downloads("decode", tmp_path, DIGESTS, refuses)
    assert ["do not wait for one another" in each for each in said] == [True, True]
    assert fetched_by(tmp_path) == [ALL]
    assert (tmp_path / "model" / "weights-digests.json").exists()


def test_the_list_that_is_compared_is_the_one_that_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in DIGESTS.items():
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_bytes(content)
    (tmp_path / "m" / ".cache").mkdir()
    (tmp_path / "m" / ".cache" / "x").touch()
    assert run_command(["model", "digests", str(tmp_path / "m")]) == 0
    (tmp_path / "list").write_text(capsys.readouterr().out)
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", str(tmp_path / "list")],
        cwd=tmp_path / "m", check=False,
    )  # fmt: skip
    assert checked.returncode == 0
    wanted = ["model", "verify", str(tmp_path / "m"), "--digests", str(tmp_path / "list")]
    assert run_command(wanted) == 0
