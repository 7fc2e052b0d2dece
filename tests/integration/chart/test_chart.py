"""The Helm chart: its values keep their schema, its commands are ones that `mooncake serve` takes.

Rendering needs `helm` (3 or newer) on the PATH; what can be checked without it is. Upgrades run
against a stand-in for Kubernetes' API.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mooncake.cli.main import make_parser
from mooncake.crypto.keys import KeySource
from mooncake.identity.credential import own_credential
from mooncake.launch.config import options
from mooncake.launch.config.config import read_settings, resolve
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.enrolment import PLACES, Enrolment, Signer, SignerSettings, enrol
from mooncake.launch.host.health import PROBE_PATHS
from tests.support.api.server import ScriptedBackend, says, tiny_model
from tests.support.certificates import Host, make_host
from tests.support.kubelet import api as kube_api
from tests.support.waiting import LONG_S

CHART = Path(__file__).parents[3] / "charts" / "mooncake"
SETTINGS = (
    "image.repository=registry/mooncake", "model.volume.hostPath.path=/mnt/models",
    "kvstore.ssd[0].size=900GiB", "kvstore.ssd[0].storage=1Ti", "kvstore.ssd[1].size=5GiB",
    "kvstore.ssd[1].storage=6Gi", "prefill.replicas=3", "pods.rdma=true",
    "prefill.shape.gpu=nvidia.com/gpu", "gateway.replicas=4", "secret.apiKeys=true",
    "secret.existing=mine", "secret.signer=signs", "gateway.allowClear=true",
    "gateway.args={--slo-ttft-s,5}", "decode.args={--max-num-seqs,16}",
)  # fmt: skip
ROLES = ("gateway", "prefill", "decode", "kvstore")
KEYS = {f"token-{role}" for role in ROLES}
"""Of the Secret that all pods have something of."""
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def test_the_values_keep_their_schema_and_all_are_in_it() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values(), schema())
    for name in schema()["required"]:
        assert name in values()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("monitoring.interval", "often"),
        ("monitoring.alerts", True),
        ("decode.probes.startup.failureTreshold", 3),
        ("pods.probes.liveness", {"periodSeconds": 0}),
        ("decode.ssd", []),
        ("kvstore.shape", {"tensorParallelSize": 2}),
        ("decode.shape.tensorParallelSize", 0),
        ("decode.shape.gpu", "gpu"),
        ("kvstore.autoscaling", {"maxReplicas": 3}),
        ("head", {"replicas": 1}),
        ("kubeRay.head", {"replicas": 2}),
        ("model.download.source", "ftp://host"),
        ("kvstore.drainSeconds", 0),
        ("securityContext", []),
        ("gateway.replica", 3),
        ("gateway.replicas", -1),
        ("prefill.replicas", 0),
        ("prefill.args", "--max-num-seqs 4"),
        ("kvstore.dram", "16"),
        ("kvstore.ssd", [{"size": "900GiB"}]),
        ("model.path", "models/k2"),
        ("image.pullPolicy", "Sometimes"),
    ],
)
def test_wrong_values_are_refused(path: str, value: object) -> None:
    changed = copy.deepcopy(values())
    *parents, last = path.split(".")
    place = changed
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, schema())


def rendered(*settings: str, release: str = "one") -> list[dict[str, Any]]:
    """Return the documents that helm makes of the chart."""
    words = [word for setting in settings for word in ("--set", setting)]
    return documents_of(
        of_helm("template", release, str(CHART), "--kube-version", "1.28.0", *words)
    )


@functools.cache
def of_helm(*words: str, given: str = "") -> str:
    """Return what helm prints of these words and this standard input; tests ask for much of it
    again. ValueError: it fails.
    """
    done = subprocess.run(
        ["helm", *words], input=given, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def documents_of(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


def is_signer(document: dict[str, Any]) -> bool:
    labels = document["metadata"].get("labels", {})
    return bool(labels.get("app.kubernetes.io/component") == "signer")


def pods(documents: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the (workload, container) of each role."""
    found = {}
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet") and not is_signer(document):
            [container] = document["spec"]["template"]["spec"]["containers"]
            found[container["name"]] = (document, container)
    return found


def served(container: dict[str, Any], address: str = "10.1.2.3") -> ServeConfig:
    """Return the settings of a container's `mooncake serve`, as the command itself reads them."""
    [script] = container["args"]
    names = {"$POD_IP": address}
    for line in re.findall("^at=.*", script, re.MULTILINE):  # made of the pod's address
        words = ["sh", "-c", f'{line}; echo "$at" "$all"']
        said = subprocess.run(
            words, check=True, text=True, capture_output=True, env={"POD_IP": address}
        )
        names |= zip(("$at", "$all"), said.stdout.split(), strict=True)
    command = re.findall(r"exec mooncake (serve .*)", script.replace("\\\n", " "))[0]
    for name, value in names.items():
        command = command.replace(name, value)
    arguments = vars(make_parser().parse_args(shlex.split(command)))
    known = options.options_of(ServeConfig)
    environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    mounted = environ.pop("MOONCAKE_CLUSTER_SECRET_FILE")  # is read at once, and is not here
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted == f"{mounts['own']}/credential"
    environ["MOONCAKE_CLUSTER_SECRET"] = "what the signer gave"
    given = {name: value for name, value in arguments.items() if name in known}
    return resolve(given, None, environ)


@needs_helm
def test_every_pod_runs_a_command_that_the_program_takes() -> None:
    documents = rendered(*SETTINGS)
    found = pods(documents)
    assert set(found) == set(ROLES)
    configs = {role: served(container) for role, (_, container) in found.items()}
    joined = {}
    for role, config in configs.items():
        assert config.role == role
        assert config.bind_host == "10.1.2.3"
        joined[role] = config.seeds
    [seeds] = [
        d
        for d in documents
        if d["kind"] == "Service" and d["metadata"]["name"].endswith("gateways")
    ]
    named = f"tcp://{seeds['metadata']['name']}:{seeds['spec']['ports'][0]['port']}"
    own = "tcp://10.1.2.3:6400"
    assert joined == {**dict.fromkeys(ROLES[1:], (named,)), "gateway": (own, named)}
    assert configs["gateway"].is_seed, "its flags say how the cluster works"
    of_ipv6 = served(found["gateway"][1], "fd00::7")
    assert of_ipv6.is_seed, "with addresses of IPv6, too"
    assert (configs["gateway"].host, of_ipv6.host) == ("0.0.0.0", "::")
    assert (configs["gateway"].join_port, configs["gateway"].slo_ttft_s) == (6400, 5)
    spec = seeds["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    labels = found["gateway"][0]["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"].items() <= labels.items()
    assert configs["gateway"].api_keys_file == "/etc/mooncake/keys.yaml"
    assert configs["decode"].max_num_seqs == 16
    sizes = {"/ssd/0": 900 * 2**30, "/ssd/1": 5 * 2**30}
    assert dict(configs["kvstore"].ssd) == sizes
    mounts = {mount["mountPath"] for mount in found["kvstore"][1]["volumeMounts"]}
    assert mounts >= sizes.keys()
    claims = found["kvstore"][0]["spec"]["volumeClaimTemplates"]
    assert [claim["spec"]["resources"]["requests"]["storage"] for claim in claims] == ["1Ti", "6Gi"]
    assert {d["spec"].get("replicas") for d, _ in found.values()} == {1, 3, 4}


@needs_helm
def test_without_kuberay_nothing_is_of_ray_or_of_one_pod_alone() -> None:
    documents = rendered(*SETTINGS)
    plain = [{**d, "data": list(d.get("data", ()))} for d in documents]  # secrets are drawn
    text = yaml.safe_dump_all(plain).lower()
    assert "ray" not in text.replace("array", "")
    assert "head" not in text
    alone = [d["metadata"]["name"] for d in documents if d["kind"] == "StatefulSet"]
    assert alone == ["one-mooncake-kvstore"], "what is lost with its node is started elsewhere"


@needs_helm
def test_pods_find_the_pool_of_their_node_and_no_node_has_two() -> None:
    """Names of pool nodes are of their machine, and so is whom engines write through to."""
    found = pods(rendered(*SETTINGS))
    affinities = {
        role: document["spec"]["template"]["spec"].get("affinity", {})
        for role, (document, _) in found.items()
    }
    assert affinities["gateway"] == {}
    [apart] = affinities["kvstore"]["podAntiAffinity"][REQUIRED]
    [near] = affinities["decode"]["podAffinity"][PREFERRED]
    assert affinities["prefill"] == affinities["decode"]
    for term in (apart, near["podAffinityTerm"]):
        assert term["topologyKey"] == "kubernetes.io/hostname"
        labels = found["kvstore"][0]["spec"]["template"]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    other = pods(rendered(*SETTINGS, "decode.affinity.nodeAffinity.x=y"))["decode"][0]
    assert other["spec"]["template"]["spec"]["affinity"] == {"nodeAffinity": {"x": "y"}}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@needs_helm
def test_on_the_network_of_their_node_pods_of_all_roles_have_room() -> None:
    found = pods(rendered(*SETTINGS, "pods.hostNetwork=true"))
    ports = [p["containerPort"] for _, container in found.values() for p in container["ports"]]
    assert len(set(ports)) == len(ports)


@needs_helm
def test_rdma_is_used_or_the_worker_does_not_start() -> None:
    for role, (_, container) in pods(rendered(*SETTINGS)).items():
        assert served(container).require_transport == "rdma"
        added = container["securityContext"]["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if role != "gateway" else [])
    without = (each for each in SETTINGS if "rdma" not in each)
    for _, container in pods(rendered(*without, "prefill.replicas=2")).values():
        assert served(container).require_transport is None
    for role in ("gateway", "prefill", "decode", "kvstore"):
        with pytest.raises(ValueError, match=rf"{role}\.rdma: all roles .*; give pods\.rdma"):
            rendered(*SETTINGS, f"{role}.rdma=true")


@needs_helm
def test_pods_of_a_node_share_memory_by_sockets_in_a_folder_of_the_node() -> None:
    shared = "pods.shmPath=/run/kv"
    for role, (document, container) in pods(rendered(*SETTINGS, shared)).items():
        spec = document["spec"]["template"]["spec"]
        folders = [each["hostPath"] for each in spec["volumes"] if each["name"] == "sockets"]
        [place] = [
            each["mountPath"] for each in container["volumeMounts"] if each["name"] == "sockets"
        ] or [None]
        assert served(container).shm_directory == place
        opens = [each for each in spec["initContainers"] if each["name"] == "sockets"]
        if role == "gateway":
            assert (place, folders, opens) == (None, [], []), "it moves no KV"
        else:
            assert folders == [{"path": "/run/kv", "type": "DirectoryOrCreate"}]
            [context] = [each["securityContext"] for each in opens]
            assert (context["runAsUser"], context["capabilities"]["drop"]) == (0, ["ALL"])
    for _, container in pods(rendered(*SETTINGS)).values():
        assert served(container).shm_directory is None
    with pytest.raises(ValueError, match=r"decode\.shmPath: all roles .*; give pods\.shmPath"):
        rendered(*SETTINGS, "decode.shmPath=/run/kv")


@needs_helm
def test_what_is_mounted_named_and_selected_is_there() -> None:
    for document, container in pods(rendered(*SETTINGS)).values():
        spec = document["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        claims = document["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("secretKeyRef", {})
            assert source.get("name", "mine") == "mine"
    services = [d for d in rendered(*SETTINGS) if d["kind"] == "Service" and not is_signer(d)]
    selectors = [service["spec"]["selector"] for service in services]
    assert len({json.dumps(each) for each in selectors}) == len(selectors) - 1 == 4
    made = [d["metadata"]["name"] for d in rendered(*SETTINGS) if d["kind"] == "Secret"]
    assert made == ["one-mooncake-authority"]
    both = (*SETTINGS, "tls.authority=our-ca")
    assert not [d for d in rendered(*both) if d["kind"] == "Secret"]


@needs_helm
def test_keys_of_disks_are_with_those_who_read_them() -> None:
    found = {}
    for role, (_, container) in pods(rendered(*SETTINGS)).items():
        sources = {
            variable["name"]: variable["valueFrom"]["secretKeyRef"]
            for variable in container["env"]
            if variable["name"].endswith("_KEY") and "valueFrom" in variable
        }
        assert all(source["optional"] for source in sources.values())
        found[role] = {name: source["key"] for name, source in sources.items()}
    weights = {KeySource(name="weights-key").variable: "weights-key"}
    disks = {KeySource(name="ssd-key").variable: "ssd-key"}
    assert found == {
        "prefill": weights, "decode": weights, "kvstore": disks, "gateway": {}
    }  # fmt: skip


@needs_helm
def test_probes_ask_what_the_program_answers_and_there_is_time_to_drain() -> None:
    from mooncake.api.app import create_app
    from mooncake.api.config import ApiConfig

    app = create_app(ScriptedBackend(says("x")), tiny_model(), ApiConfig())
    routes = set(app.openapi()["paths"])
    found = pods(rendered(*SETTINGS))
    kinds = {"startup": "startup", "liveness": "live", "readiness": "ready"}
    for role, (_, container) in found.items():
        config, port = served(container), "http" if role == "gateway" else "health"
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports[port] == (config.port if role == "gateway" else config.health_port)
        assert role == "gateway" or config.health_host == "10.1.2.3"
        for kind, path in kinds.items():
            probe = container[f"{kind}Probe"]
            scheme = "HTTP" if role == "gateway" else "HTTPS"
            asked = {"path": f"/health/{path}", "port": port, "scheme": scheme}
            assert probe.pop("httpGet") == asked
            own = values()[role].get("probes", {}).get(kind, {})
            assert probe == values()["pods"]["probes"][kind] | own
            assert asked["path"] in (routes if role == "gateway" else PROBE_PATHS)
        begun_s = limit_s(container["startupProbe"])
        assert begun_s >= 1800, "large models take long to load"
        assert limit_s(container["livenessProbe"]) >= RESTART_S
    document, container = found["gateway"]
    grace_s = document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > served(container).shutdown_timeout
    kvstore = found["kvstore"][1]
    ports = {each["name"]: each["containerPort"] for each in kvstore["ports"]}
    assert ports["admin"] == served(kvstore).admin_port
    changed = "decode.probes.startup.failureThreshold=9"
    container = pods(rendered(*SETTINGS, changed))["decode"][1]
    assert container["startupProbe"]["failureThreshold"] == 9


def drained(hook: str, address: str) -> Any:
    """Return how a hook calls `mooncake pool drain` in a pod of an address, as that reads it."""
    done = subprocess.run(
        ["/bin/sh", "-c", 'mooncake() { for word; do echo "$word"; done; }\n' + hook],
        env={"POD_IP": address}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return make_parser().parse_args(done.stdout.splitlines())


RESTART_S = 30
"""The longest pause before a worker that died while it was starting is started again in its pod."""


def limit_s(probe: dict[str, Any]) -> int:
    """Return for how many seconds a probe may fail."""
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@needs_helm
def test_values_without_a_sensible_default_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"image\.repository: an image with mooncake"):
        rendered("model.volume.hostPath.path=/m")
    with pytest.raises(ValueError, match=r"model\.volume: where the checkpoint is"):
        rendered("image.repository=r", "gateway.allowKeyless=true")
    with pytest.raises(ValueError, match="gateway"):
        rendered("image.repository=r", "model.volume.hostPath.path=/m", "gateway.replica=2")
    needed = "image.repository=r", "model.volume.hostPath.path=/m"
    with pytest.raises(ValueError, match=r"gateway\.allowKeyless: all who reach the API could use"):
        rendered(*needed)
    with pytest.raises(
        ValueError, match=r"gateway\.tlsSecret: API keys would travel in plain HTTP"
    ):
        rendered(*needed, "gateway.args={--api-key,k}")
    assert rendered(*needed, "gateway.args={--api-key,k}", "gateway.tlsSecret=cert")
    documents = rendered(*needed, "gateway.allowKeyless=true")
    drawn = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "Secret"}
    assert set(drawn["one-mooncake"]) == KEYS
    assert len(set(drawn["one-mooncake"].values())) == len(KEYS)
    assert set(drawn["one-mooncake-signer"]) == {"cluster-secret"}
    assert set(drawn["one-mooncake-authority"]) == {"tls.crt", "tls.key"}


@needs_helm
def test_pods_may_do_little_and_leave_in_order() -> None:
    found = pods(rendered(*SETTINGS, "podSecurityContext.runAsUser=7"))
    for role, (document, container) in found.items():
        spec = document["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (
            7,
            1000,
        )
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        added = ["IPC_LOCK"] if role != "gateway" else []
        assert context["capabilities"].get("add", []) == added
        assert context["capabilities"]["drop"] == ["ALL"]
    drain = found["kvstore"][1]["lifecycle"]["preStop"]["exec"]["command"][-1]
    arguments = drained(drain, "10.1.2.3")
    assert drained(drain, "fd00::7").url == "https://[fd00::7]:8100"
    grace_s = found["kvstore"][0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert arguments.url == f"https://10.1.2.3:{served(found['kvstore'][1]).admin_port}"
    assert float(arguments.wait) < grace_s
    gateway = found["gateway"]
    [pause, seconds] = gateway[1]["lifecycle"]["preStop"]["exec"]["command"]
    left_s = gateway[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] - int(seconds)
    assert (pause, left_s > served(gateway[1]).shutdown_timeout) == ("sleep", True)
    budgets = [d for d in rendered(*SETTINGS) if d["kind"] == "PodDisruptionBudget"]
    selected = [d["spec"]["selector"]["matchLabels"] for d in budgets]
    roles = {each["app.kubernetes.io/component"] for each in selected}
    assert roles == {"gateway", "prefill", "decode", "kvstore"}


@needs_helm
def test_what_operators_of_prometheus_and_grafana_get() -> None:
    wanted = ("serviceMonitor", "rules", "dashboard")
    switches = [f"monitoring.{name}=true" for name in wanted]
    documents = rendered(*SETTINGS, *switches, "monitoring.labels.release=prometheus")
    monitors = [d for d in documents if d["kind"] == "ServiceMonitor"]
    ports = {
        (port["name"], json.dumps(d["metadata"]["labels"]))
        for d in documents
        if d["kind"] == "Service"
        for port in d["spec"].get("ports", [])
    }
    for monitor in monitors:
        [endpoint] = monitor["spec"]["endpoints"]
        selected = json.dumps(monitor["spec"]["selector"]["matchLabels"])
        assert (endpoint["port"], selected) in ports
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert len(monitors) == len(pods(documents)) == 4
    [rule] = [d for d in documents if d["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((CHART / "monitoring" / "alerts.yaml").read_text())
    [board] = [d for d in documents if d["kind"] == "ConfigMap"]
    shown = json.loads(board["data"]["mooncake.json"])
    assert shown == json.loads((CHART / "monitoring" / "dashboard.json").read_text())
    kinds = {document["kind"] for document in rendered(*SETTINGS)}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "ConfigMap"}, "all of it is asked for"


@needs_helm
def test_api_keys_need_a_secret_that_has_them() -> None:
    needed = SETTINGS[:2]
    with pytest.raises(ValueError, match=r"secret\.apiKeys: name a Secret that has `keys\.yaml`"):
        rendered(*needed, "secret.apiKeys=true")
    with kube_api.serving() as api:
        mine = {"metadata": {"name": "mine", "labels": {}}, "kind": "Secret", "apiVersion": "v1"}
        own = ("secret.apiKeys=true", "secret.existing=mine", "gateway.tlsSecret=cert")
        with pytest.raises(ValueError, match=r"secret\.signer: name a Secret"):
            helm(api, "install", *needed, *own)
        with pytest.raises(ValueError, match=r"secret\.signer: a Secret other than the one"):
            helm(api, "install", *needed, *own, "secret.signer=mine")
        wanted = (*needed, *own, "secret.signer=signs")
        for missing in ("keys.yaml", "token-decode"):
            has = dict.fromkeys({*KEYS, "keys.yaml"} - {missing}, "eA==")
            api.objects["secrets", "mine"] = mine | {"data": has}
            with pytest.raises(ValueError, match=f"the Secret mine has no `{missing}`"):
                helm(api, "install", *wanted)
        api.objects["secrets", "mine"] = mine | {
            "data": dict.fromkeys({*KEYS, "keys.yaml"}, "eA==")
        }
        signs = {"metadata": {"name": "signs", "labels": {}}, "kind": "Secret", "apiVersion": "v1"}
        api.objects["secrets", "signs"] = signs | {"data": {"other": "eA=="}}
        with pytest.raises(ValueError, match="the Secret signs has no `cluster-secret`"):
            helm(api, "install", *wanted)
        api.objects["secrets", "signs"] = signs | {"data": {"cluster-secret": "eA=="}}
        helm(api, "install", *wanted)


@needs_helm
def test_a_certificate_is_mounted_and_probes_use_https() -> None:
    documents = rendered(*SETTINGS, "gateway.tlsSecret=cert", "monitoring.serviceMonitor=true")
    document, container = pods(documents)["gateway"]
    config = served(container)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.ssl_certfile == f"{mounts['tls']}/tls.crt"
    assert config.ssl_keyfile == f"{mounts['tls']}/tls.key"
    volumes = {each["name"]: each for each in document["spec"]["template"]["spec"]["volumes"]}
    assert volumes["tls"]["secret"] == {"secretName": "cert", "defaultMode": 0o440}
    kinds = ("startup", "liveness", "readiness")
    assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in kinds} == {"HTTPS"}
    endpoints = {
        d["metadata"]["name"]: d["spec"]["endpoints"][0]
        for d in documents
        if d["kind"] == "ServiceMonitor"
    }
    assert endpoints["one-mooncake-gateway"]["scheme"] == "https"
    assert "insecureSkipVerify" not in endpoints["one-mooncake-kvstore"]["tlsConfig"]


@needs_helm
def test_each_pod_gets_a_certificate_of_the_signer_and_its_ports_speak_tls(tmp_path: Path) -> None:
    documents = rendered(*SETTINGS, "tls.authority=our-ca", "monitoring.serviceMonitor=true")
    monitors = {
        d["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: d["spec"]["endpoints"]
        for d in documents
        if d["kind"] == "ServiceMonitor"
    }
    ca = {"ca": {"secret": {"name": "our-ca", "key": "tls.crt"}}}
    signer = opened_signer(documents, tmp_path)
    for role, (document, container) in pods(documents).items():
        spec = document["spec"]["template"]["spec"]
        places = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        [asks] = spec["initContainers"]
        given = asked_by(asks["args"][0])
        assert (given.signer, given.place) == ("http://one-mooncake-signer:8300", role)
        assert (given.out, given.address, given.renew) == (places["own"], "$POD_IP", False)
        assert str(Path(given.token_file).parent) == places["token"]
        renews = asked_by(re.findall(r"do (mooncake enrol .*?) >", container["args"][0])[0])
        assert (given.wait, renews) == (1800, dataclasses.replace(given, renew=True, wait=0))
        own = tmp_path / "own" / role
        token = str(tmp_path / "tokens" / role)
        enrol(
            dataclasses.replace(
                given, signer=signer.url, token_file=token, out=str(own), address="127.0.0.1"
            )
        )
        host = Host(*(str(own / name) for name in ("cert.pem", "key.pem", "ca.pem")))
        host.trusting(proven=True)
        config = served(container)
        if role == "gateway":
            credential = own_credential((own / "credential").read_text().strip(), PLACES[role])
            assert credential.listening_seed is not None, "others can join it"
            continue
        ports = ["health", "admin"] if role == "kvstore" else ["health"]
        for port in ports:
            files = (getattr(config, f"{port}_ssl_{name}") for name in ("certfile", "keyfile"))
            assert [moved(file, places, host) for file in files] == [host.cert, host.key]
        for kind in ("startup", "liveness", "readiness"):
            assert container[f"{kind}Probe"]["httpGet"]["scheme"] == "HTTPS"
        assert (monitors[role][0]["scheme"], monitors[role][0]["tlsConfig"]) == ("https", ca)
    signer.close()
    drain = pods(documents)["kvstore"][1]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert drained(drain, "10.1.2.3").ssl_ca_certs == f"{places['own']}/ca.pem"


def opened_signer(documents: list[dict[str, Any]], here: Path) -> Signer:
    """Start the signer that the chart's pod starts, on folders of this machine."""
    [found] = [d for d in documents if d["kind"] == "Deployment" and is_signer(d)]
    [container] = found["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    given = make_parser().parse_args(words[words.index("mooncake") + 1 :])
    assert given.host == "$(POD_IP)"
    assert int(given.port) == container["ports"][0]["containerPort"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    for place in (given.tokens, given.authority, str(Path(given.cluster_secret_file).parent)):
        assert place in mounts
    make_host(here)
    (here / "secret").write_text("a secret")
    (here / "tokens").mkdir()
    for place in PLACES:
        (here / "tokens" / place).write_text(place.ljust(40, "t"))
    return Signer(
        SignerSettings(
            host="127.0.0.1", port=0, cluster_secret_file=str(here / "secret"),
            tokens=str(here / "tokens"), authority=str(here / "ca"),
            name_prefix=given.name_prefix, hours=float(given.hours),
        )
    )  # fmt: skip


def asked_by(script: str) -> Enrolment:
    """Return what a shell command asks of the signer, as the command itself reads it."""
    words = shlex.split(script.removeprefix("exec "))
    given = vars(make_parser().parse_args(words[1:]))
    names = {field.name for field in dataclasses.fields(Enrolment)}
    return read_settings(Enrolment, {k: v for k, v in given.items() if k in names}, None, {})


def moved(text: str, places: dict[str, str], host: Host) -> str:
    """Return a path of a pod as it is on this machine."""
    return text.replace(places["own"].rstrip("/"), str(Path(host.cert).parent))


@needs_helm
def test_what_a_pod_is_given_is_of_its_role_alone() -> None:
    """The cluster secret and the authority's key are with the signer."""
    apart = ("prefill.shape.podPerStage=true", "prefill.shape.pipelineParallelSize=2")
    documents = rendered(
        *(each for each in SETTINGS if not each.startswith("prefill.")), *apart,
        "gateway.tlsSecret=cert",
    )  # fmt: skip
    templates = {name: d["spec"]["template"] for name, (d, _) in pods(documents).items()}
    for each in documents:
        if each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            templates |= {"prefill": group["leaderTemplate"], "ranks": group["workerTemplate"]}
        elif each["kind"] == "Deployment" and is_signer(each):
            templates["signer"] = each["spec"]["template"]
        elif each["kind"] == "Pod":
            templates["test"] = each
    found = {name: given_to(template["spec"]) for name, template in templates.items()}
    signs = found.pop("signer")
    tokens = {("mine", f"token-{role}") for role in ROLES}
    authority = {("one-mooncake-authority", key) for key in ("tls.crt", "tls.key")}
    assert signs == {("signs", "cluster-secret"), *tokens, *authority}
    weights = ("mine", "weights-key")
    assert found == {
        "gateway": {("mine", "token-gateway"), ("mine", "keys.yaml"), ("cert", "*")},
        "prefill": {("mine", "token-prefill"), weights},
        "ranks": {("mine", "token-prefill"), weights},
        "decode": {("mine", "token-decode"), weights},
        "kvstore": {("mine", "token-kvstore"), ("mine", "ssd-key")},
        "test": set(),
    }


def given_to(spec: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the Secrets and their keys that a pod sees; "*": all."""
    found = set()
    for volume in spec.get("volumes", []):
        if secret := volume.get("secret"):
            items = [item["key"] for item in secret.get("items", [])] or ["*"]
            found |= {(secret["secretName"], key) for key in items}
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        assert not container.get("envFrom")
        for variable in container.get("env", []):
            if source := variable.get("valueFrom", {}).get("secretKeyRef"):
                found.add((source["name"], source["key"]))
    return found


@needs_helm
@pytest.mark.parametrize(
    ("role", "flag", "cure"),
    [
        ("gateway", "--ssl-certfile=/c.pem", "tlsSecret"),
        ("gateway", "--ssl-ca-certs", "probes have no client cert"),
        ("decode", "--health-ssl-ca-certs", "probes have no client cert"),
        ("kvstore", "--health-ssl-certfile=/c.pem", "tls.authority"),
    ],
)
def test_flags_that_no_probe_could_pass_are_refused(role: str, flag: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        rendered(*SETTINGS, f"{role}.args={{{flag}}}")


@needs_helm
def test_pods_speak_in_clear_only_if_that_is_wanted() -> None:
    clear = (*SETTINGS, "tls.allowClear=true")
    found = pods(rendered(*clear))
    assert served(found["kvstore"][1]).http_without_tls
    with pytest.raises(ValueError, match=r"tls\.allowClear: with an authority"):
        rendered(*clear, "tls.authority=our-ca")
    assert not served(pods(rendered(*SETTINGS))["kvstore"][1]).http_without_tls
    with pytest.raises(ValueError, match=r"signer\.renewSeconds: a credential must be renewed"):
        rendered(*SETTINGS, "signer.renewSeconds=7200", "signer.credentialHours=2")


@needs_helm
def test_names_of_long_releases_fit_into_labels_and_stay_apart() -> None:
    """A pod of a StatefulSet is labelled with its name and a hash of 10; a label has 63."""
    begun_alike = "a-release-of-which-the-name-is-as-long-as-helm-lets"
    assert len(f"{begun_alike}-1") == 53
    workloads = []
    for release in (f"{begun_alike}-1", f"{begun_alike}-2", "one"):
        documents = rendered(*SETTINGS, release=release)
        found = [document["metadata"]["name"] for document, _ in pods(documents).values()]
        assert all(len(f"{name}-0123456789") <= 63 for name in found)
        texts = [*found, *(d["metadata"]["name"] for d in documents)]
        assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", text) for text in texts)
        workloads += found
    assert len(set(workloads)) == 12


@needs_helm
def test_secrets_stay_over_upgrades_and_a_secret_of_ones_own_renders_the_same() -> None:
    needed = (*SETTINGS[:2], "gateway.allowKeyless=true")
    with kube_api.serving() as api:
        helm(api, "install", *needed)
        drawn = api.objects["secrets", "one-mooncake"]["data"]
        signs = api.objects["secrets", "one-mooncake-signer"]["data"]
        assert set(signs) == {"cluster-secret"}
        authority = api.objects["secrets", "one-mooncake-authority"]["data"]
        assert set(drawn) == KEYS
        helm(api, "upgrade", *needed, "gateway.replicas=3")
        assert api.objects["secrets", "one-mooncake"]["data"] == drawn
        assert api.objects["secrets", "one-mooncake-signer"]["data"] == signs
        assert api.objects["secrets", "one-mooncake-authority"]["data"] == authority
        assert api.objects["deployments", "one-mooncake-gateway"]["spec"]["replicas"] == 3
        drawn |= {"cluster-secret": "b2xk"}  # as an earlier chart left it
        del api.objects["secrets", "one-mooncake-signer"]
        helm(api, "upgrade", *needed)
        assert api.objects["secrets", "one-mooncake-signer"]["data"] == {"cluster-secret": "b2xk"}
    both = (*SETTINGS, "tls.authority=our-ca")
    assert anew(*both) == anew(*both)
    assert anew(*needed) != anew(*needed), "nothing says what was drawn before"


def anew(*settings: str) -> list[dict[str, Any]]:
    """Return the documents of a new run of helm."""
    of_helm.cache_clear()
    return rendered(*settings)


def helm(api: kube_api.KubeApi, verb: str, *settings: str) -> None:
    """Install or upgrade the chart as release `one`."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = ["helm", verb, "one", str(CHART), *words]
    done = subprocess.run(
        [*command, "--namespace", "default"], capture_output=True, text=True, timeout=LONG_S,
        env=os.environ | {"HELM_KUBEAPISERVER": api.url, "KUBECONFIG": os.devnull},
    )  # fmt: skip
    if done.returncode:
        raise ValueError(done.stderr)
