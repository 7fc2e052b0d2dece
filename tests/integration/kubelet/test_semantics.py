"""The small kubelet does what Kubernetes does, where the chart relies on it."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.kubelet import network
from tests.support.kubelet.api import merged
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.policies import blocks
from tests.support.kubelet.sandbox import Image

pytestmark = pytest.mark.skipif(network.why_not() != "", reason=network.why_not())

SERVE = "exec python3 -m http.server 80 --directory /tmp"
"""Ready once it listens. As pid 1 without a handler it ignores SIGTERM, and is killed."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    with Cluster(tmp_path, {"plain": Image({"PATH": path})}, nodes=2, enforces=True) as running:
        yield running


def workload(kind: str, name: str, script: str, **more: Any) -> dict[str, Any]:
    """Return a workload of one container that runs `script`; `more`: of container, pod, spec."""
    container = {
        "name": "main", "image": "plain", "command": ["/bin/sh", "-ec", script],
        **more.get("container", {}),
    }  # fmt: skip
    pod = {"terminationGracePeriodSeconds": 1, "containers": [container], **more.get("pod", {})}
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {
        "kind": kind, "apiVersion": "apps/v1", "metadata": {"name": name},
        "spec": {**spec, **more.get("spec", {})},
    }  # fmt: skip


READY = {"readinessProbe": {"httpGet": {"port": 80}, "periodSeconds": 1, "timeoutSeconds": 30}}


def pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return cluster.api.listed("pods", {"app": name})


def log(cluster: Cluster, pod: str) -> str:
    file = cluster.folder / "logs" / f"{pod}.main.log"
    return file.read_text() if file.exists() else ""


def test_a_service_reaches_ready_pods_by_name_and_from_outside(cluster: Cluster) -> None:
    cluster.api.put("deployments", workload("Deployment", "web", SERVE, container=READY))
    service = {"selector": {"app": "web"}, "ports": [{"port": 8080, "targetPort": 80}]}
    meta = {"name": "web"}
    cluster.api.put("services", {"kind": "Service", "metadata": meta, "spec": service})
    cluster.wait_until_rolled_out()
    with urllib.request.urlopen(cluster.url("web"), timeout=60) as answer:
        assert answer.status == 200
    ask = (
        "python3 -c 'import urllib.request as u;"
        'print(u.urlopen("http://web:8080", timeout=60).status)\'; sleep 3600'
    )
    cluster.api.put("deployments", workload("Deployment", "asks", ask))
    cluster.wait_for(lambda: any("200" in log(cluster, p) for p in cluster.pods), "an answer")


def test_ports_of_a_pod_are_seen_but_for_those_on_loopback(cluster: Cluster) -> None:
    script = (
        "exec python3 -c 'import socket, time\n"
        'for host in ("0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:127.0.0.2"):\n'
        " kind = socket.AF_INET6 if chr(58) in host else socket.AF_INET\n"
        " sock = socket.socket(kind)\n"
        " sock.bind((host, 90 + len(host)))\n"
        " sock.listen()\n"
        " globals()[host] = sock\n"
        'print("listens", flush=True)\n'
        "time.sleep(3600)'"
    )
    cluster.api.put("statefulsets", workload("StatefulSet", "set", script))
    cluster.wait_for(lambda: "listens" in log(cluster, "set-0"), "its ports")
    init = cluster.pods["set-0"].first_process("main")
    assert init is not None
    assert network.listening(init) == {90 + len("0.0.0.0"), 90 + len("::")}


def test_environment_and_volumes_follow_their_secrets_and_wait_for_them(cluster: Cluster) -> None:
    env = [
        {"name": "OWN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "word"}}},
        {"name": "BOTH", "value": "$(OWN)/$(WORD)"},
    ]
    container = {
        "env": env, "volumeMounts": [{"name": "s", "mountPath": "/etc/s", "readOnly": True}],
        "securityContext": {"readOnlyRootFilesystem": True, "runAsUser": 1000,
                            "capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False},
    }  # fmt: skip
    script = (
        "echo $BOTH; id -u; touch /x || echo read-only; echo y > /etc/s/word || echo fixed;"
        "until grep -q new /etc/s/word; do sleep 0.1; done; echo followed; sleep 3600"
    )
    volumes = {"volumes": [{"name": "s", "secret": {"secretName": "s"}}]}
    cluster.api.put(
        "statefulsets", workload("StatefulSet", "set", script, container=container, pod=volumes)
    )
    cluster.wait_for(lambda: "secrets s is not there" in cluster.report(), "it waits")
    secret = {"kind": "Secret", "metadata": {"name": "s"}}
    cluster.api.put("secrets", secret | {"data": {"word": base64.b64encode(b"old").decode()}})
    cluster.wait_for(lambda: "fixed" in log(cluster, "set-0"), "its words")
    said = log(cluster, "set-0").split()
    assert {"set-0/old", "1000", "read-only", "fixed"} <= set(said)
    cluster.api.put("secrets", secret | {"data": {"word": base64.b64encode(b"new").decode()}})
    cluster.wait_for(lambda: "followed" in log(cluster, "set-0"), "the new word")


def test_files_of_secrets_have_their_mode_and_the_group_of_the_pod(cluster: Cluster) -> None:
    cluster.api.put_secret("s", {"word": b"word"})
    container = {
        "volumeMounts": [{"name": "s", "mountPath": "/etc/s", "readOnly": True}],
        "securityContext": {"runAsUser": 1000, "capabilities": {"drop": ["ALL"]}},
    }
    script = "echo $(cat /etc/s/word || echo refused) $(stat -c %a /etc/s/word). ; sleep 3600"
    wanted = {
        "group": ({"defaultMode": 0o440}, {"fsGroup": 1000}, "word 440."),
        "alone": ({"defaultMode": 0o440}, {}, "refused 440."),
        "plain": ({}, {}, "word 644."),
    }
    for name, (mode, groups, _) in wanted.items():
        volume = {"name": "s", "secret": {"secretName": "s", **mode}}
        pod = {"volumes": [volume], "securityContext": groups}
        made = workload("StatefulSet", name, script, container=container, pod=pod)
        cluster.api.put("statefulsets", made)
    for name, (_, _, said) in wanted.items():
        cluster.wait_for(lambda pod=f"{name}-0": "." in log(cluster, pod), "its words")
        assert said in log(cluster, f"{name}-0")


def test_a_container_of_any_user_ends_with_a_test_that_is_killed(cluster: Cluster) -> None:
    container = {"securityContext": {"runAsUser": 1000, "capabilities": {"drop": ["ALL"]}}}
    script = "( while sleep 3600; do :; done ) & echo up; sleep 3600"
    cluster.api.put("statefulsets", workload("StatefulSet", "set", script, container=container))
    cluster.wait_for(lambda: "up" in log(cluster, "set-0"), "its word")
    init = cluster.pods["set-0"].first_process("main")
    assert init is not None
    first = psutil.Process(init)
    family = [first, *first.children(recursive=True)]
    assert len(family) > 1
    os.kill(first.ppid(), signal.SIGKILL)  # as the kernel does when the test's process ends
    cluster.wait_for(lambda: not any(each.is_running() for each in family), "their end")


def test_hook_signal_and_grace_come_in_this_order(cluster: Cluster) -> None:
    is_up = {"exec": {"command": ["test", "-e", "/tmp/up"]}, "periodSeconds": 1}
    up = {"readinessProbe": is_up | {"timeoutSeconds": 30}}
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook > /tmp/h"]}}}
    wait = "touch /tmp/up; while true; do sleep 0.05; done"
    polite = f"trap 'cat /tmp/h; echo term; exit 0' TERM; {wait}"
    cluster.api.put(
        "statefulsets",
        workload(
            "StatefulSet",
            "polite",
            polite,
            container={**up, "lifecycle": hook},
            pod={"terminationGracePeriodSeconds": 240},
        ),
    )
    deaf = f"trap '' TERM; {wait}"
    grace = {"terminationGracePeriodSeconds": 3}
    cluster.api.put("statefulsets", workload("StatefulSet", "deaf", deaf, container=up, pod=grace))
    cluster.wait_until_rolled_out()
    for name in ("polite", "deaf"):
        cluster.scale("statefulsets", name, 0)
    cluster.wait_for(lambda: not cluster.pods, "no pods")
    ended = {each.pod: each for each in cluster.ended}
    assert (ended["polite-0"].code, ended["polite-0"].killed) == (0, False)
    assert ended["deaf-0"].killed
    assert ended["deaf-0"].seconds > 1.0  # its grace began earlier, on a busy machine by seconds
    assert log(cluster, "polite-0").split()[-2:] == ["hook", "term"]


def test_what_is_not_live_or_ends_is_started_again(cluster: Cluster) -> None:
    probe = {"exec": {"command": ["test", "!", "-e", "/tmp/ill"]}, "periodSeconds": 1}
    live = {"livenessProbe": probe | {"failureThreshold": 1}}
    once = "sleep 0.5; touch /tmp/ill; sleep 3600"
    cluster.api.put("statefulsets", workload("StatefulSet", "ill", once, container=live))
    cluster.api.put("statefulsets", workload("StatefulSet", "ends", "echo again; exit 3"))

    def restarts(name: str) -> int:
        [pod] = pods(cluster, name)
        return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))

    cluster.wait_for(lambda: pods(cluster, "ill") and restarts("ill"), "a restart")
    cluster.wait_for(lambda: pods(cluster, "ends") and restarts("ends"), "a restart")


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_a_rollout_is_not_over_while_a_pod_is_seen_not_to_be_ready(
    cluster: Cluster, kind: str
) -> None:
    cluster.api.put(f"{kind.lower()}s", workload(kind, "web", "sleep 3600"))
    cluster.wait_until_rolled_out()
    with cluster.api.lock:  # the controllers cannot take a step before it is asked
        [pod] = pods(cluster, "web")
        pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}
        assert not cluster.is_rolled_out()
    cluster.wait_until_rolled_out()


def test_a_crash_is_over_when_what_was_killed_has_been_started_again(cluster: Cluster) -> None:
    cluster.api.put("statefulsets", workload("StatefulSet", "set", "echo up; sleep 3600"))
    cluster.wait_for(lambda: "up" in log(cluster, "set-0"), "its word")
    cluster.crash("set-0")
    assert cluster.num_restarts("set-0") == [1]
    cluster.wait_for(lambda: log(cluster, "set-0").split().count("up") == 2, "it to say it again")


def test_a_deployment_surges_keeps_its_history_and_goes_back(cluster: Cluster) -> None:
    web = workload(
        "Deployment", "web", SERVE, container=READY,
        spec={"strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}},
    )  # fmt: skip
    cluster.api.put("deployments", web)
    cluster.wait_until_rolled_out()
    [first] = pods(cluster, "web")
    fewest = []

    def change(script: str) -> None:
        container = {"name": "main", "command": ["/bin/sh", "-ec", script]}
        template = {"template": {"spec": {"containers": [container]}}}
        cluster.api.patch("deployments", "web", {"spec": template})

        def done() -> bool:
            with cluster.api.lock:
                fewest.append(sum("True" in str(p["status"]) for p in pods(cluster, "web")))
            return cluster.is_rolled_out()

        cluster.wait_for(done, "the rollout")

    change(f"true; {SERVE}")
    [second] = pods(cluster, "web")
    change(SERVE)
    [third] = pods(cluster, "web")
    assert min(fewest) >= 1, "the old pod serves until the new one is ready"
    assert len({each["metadata"]["name"] for each in (first, second, third)}) == 3
    code = "pod-template-hash"
    assert third["metadata"]["labels"][code] == first["metadata"]["labels"][code]
    revisions = cluster.api.listed("replicasets")
    assert len(revisions) == 2
    cluster.wait_for(lambda: len(cluster.pods) == 1, "the old pods' end")


def test_a_stateful_set_replaces_one_pod_at_a_time_and_keeps_names_and_claims(
    cluster: Cluster,
) -> None:
    claim = {"metadata": {"name": "disk"}, "spec": {}}
    disk = {**READY, "volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}
    script = f"echo $HOSTNAME >> /disk/starts; wc -l /disk/starts; {SERVE}"
    more = {"replicas": 2, "volumeClaimTemplates": [claim], "podManagementPolicy": "Parallel"}
    made = workload("StatefulSet", "set", script, container=disk, spec=more)
    cluster.api.put("statefulsets", made)
    cluster.wait_until_rolled_out()
    before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods(cluster, "set")}
    away = []

    def done() -> bool:
        with cluster.api.lock:
            away.append(sum("True" not in str(p["status"]) for p in pods(cluster, "set")))
        return cluster.is_rolled_out()

    cluster.restart("statefulsets", "set")
    cluster.wait_for(done, "the rollout")
    after = {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods(cluster, "set")}
    assert set(before) == set(after) == {"set-0", "set-1"}
    assert not set(before.values()) & set(after.values())
    assert max(away) <= 1
    assert "2 /disk/starts" in log(cluster, "set-0")


def test_a_drained_node_is_left_one_pod_at_a_time(cluster: Cluster) -> None:
    web = workload("Deployment", "web", SERVE, container=READY, spec={"replicas": 2})
    cluster.api.put("deployments", web)
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    cluster.api.put(
        "poddisruptionbudgets", {"metadata": {"name": "web"}, "spec": budget, "kind": "x"}
    )
    cluster.wait_until_rolled_out()
    nodes = {each["spec"]["nodeName"] for each in pods(cluster, "web")}
    assert nodes == {"node-0", "node-1"}
    cluster.drain("node-0")
    cluster.wait_until_rolled_out()
    assert {each["spec"]["nodeName"] for each in pods(cluster, "web")} == {"node-1"}
    too_much = {"resources": {"requests": {"nvidia.com/gpu": 1}}}
    cluster.api.put("deployments", workload("Deployment", "gpu", SERVE, container=too_much))
    cluster.wait_for(lambda: pods(cluster, "gpu"), "its pod")
    assert "nodeName" not in pods(cluster, "gpu")[0]["spec"]


def test_pods_keep_apart_stay_together_and_off_tainted_nodes(cluster: Cluster) -> None:
    def near(app: str) -> dict[str, Any]:
        selected = {"matchLabels": {"app": app}}
        return {"topologyKey": "kubernetes.io/hostname", "labelSelector": selected}

    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near("own")]}}
    close = {"weight": 9, "podAffinityTerm": near("own")}
    together = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [close]}}
    own = workload("Deployment", "own", SERVE, pod={"affinity": apart}, spec={"replicas": 3})
    cluster.api.put("deployments", own)

    def places(name: str) -> list[str | None]:
        return sorted(str(pod["spec"].get("nodeName")) for pod in pods(cluster, name))

    cluster.wait_for(lambda: places("own") == ["None", "node-0", "node-1"], "two of three to start")
    cluster.scale("deployments", "own", 1)
    cluster.wait_for(lambda: places("own") in (["node-0"], ["node-1"]), "one to be left")
    [node] = places("own")
    more = workload("Deployment", "more", SERVE, pod={"affinity": together}, spec={"replicas": 4})
    cluster.api.put("deployments", more)
    cluster.wait_for(lambda: places("more") == [node] * 4, "all to be where the other is")
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    cluster.api.patch("nodes", str(node), {"spec": {"taints": [taint]}})
    cluster.api.put("deployments", workload("Deployment", "off", SERVE, spec={"replicas": 3}))
    cluster.wait_for(lambda: len(set(places("off"))) == 1 and None not in places("off"), "a place")
    assert node not in places("off")
    allowed = {"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector":
               {"kubernetes.io/hostname": node}}  # fmt: skip
    cluster.api.put("deployments", workload("Deployment", "on", SERVE, pod=allowed))
    cluster.wait_for(lambda: places("on") == [node], "what tolerates it to go there")


def test_pods_are_admitted_by_pod_security_and_a_quota(tmp_path: Path) -> None:
    harmless = {
        "runAsNonRoot": True, "runAsUser": 1000, "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    small = {"resources": {"requests": {"memory": "1Gi"}}, "securityContext": harmless}
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    images = {"plain": Image({"PATH": path})}
    with Cluster(tmp_path, images, restricted=True, quota={"memory": "2.5Gi"}) as cluster:
        wanted: dict[str, dict[str, Any]] = {
            "root": {"resources": small["resources"]},
            "unlimited": {"securityContext": harmless},
            "good": small,
        }
        for name, container in wanted.items():
            made = workload("Deployment", name, "sleep 3600", container=container)
            cluster.api.put("deployments", made | {"spec": made["spec"] | {"replicas": 3}})
        cluster.wait_for(lambda: len(pods(cluster, "good")) == 2, "what the quota has room for")
        cluster.wait_for(lambda: len(cluster.refused) >= 3, "the others to be refused")
        refused = {name.partition("-")[0]: why for name, why in cluster.refused.items()}
        assert refused["root"].startswith("not restricted: main: root, main: escalation")
        assert refused["unlimited"] == "quota: main must say how much memory it wants"
        assert refused["good"] == f"quota: all would want {3 * 2**30:g} of memory"
        cluster.scale("deployments", "good", 2)
        cluster.wait_for(lambda: pods(cluster, "good")[1]["status"]["phase"] == "Running", "both")
        assert not pods(cluster, "root") + pods(cluster, "unlimited")


def policy(name: str, of: str, kind: str, *rules: dict[str, Any]) -> dict[str, Any]:
    """Return a policy for pods of an app."""
    spec = {"podSelector": {"matchLabels": {"app": of}}, "policyTypes": [kind]}
    return {
        "kind": "NetworkPolicy", "apiVersion": "networking.k8s.io/v1", "metadata": {"name": name},
        "spec": {**spec, kind.lower(): list(rules)},
    }  # fmt: skip


def test_policies_hold_for_pods_that_come_and_go(cluster: Cluster) -> None:
    serve = "python3 -m http.server 81 --directory /tmp & exec python3 -m http.server 80 -d /tmp"
    cluster.api.put("statefulsets", workload("StatefulSet", "web", serve, container=READY))
    cluster.wait_until_rolled_out()
    address = pods(cluster, "web")[0]["status"]["podIP"]
    asks = (
        "exec python3 -c 'import socket, time\n"
        "while True:\n"
        " for port in (80, 81):\n"
        "  try:\n"
        f'   socket.create_connection(("{address}", port), 0.5).close()\n'
        '   print(port, "yes", flush=True)\n'
        "  except OSError:\n"
        '   print(port, "no", flush=True)\n'
        " time.sleep(0.1)'"
    )

    def sees(name: str, *wanted: str) -> None:
        """Wait until a pod has had these answers twice."""

        def holds() -> bool:
            return log(cluster, f"{name}-0").splitlines()[-4:] == [*wanted, *wanted]

        cluster.wait_for(holds, f"{name} to have {wanted}: {log(cluster, f'{name}-0')[-99:]}")

    for name in ("friend", "stranger"):
        cluster.api.put("statefulsets", workload("StatefulSet", name, asks))
        sees(name, "80 yes", "81 yes")
    friend = {"podSelector": {"matchLabels": {"app": "friend"}}}
    cluster.api.put(
        "networkpolicies",
        policy("web", "web", "Ingress", {"from": [friend], "ports": [{"port": 80}]}),
    )
    sees("friend", "80 yes", "81 no")
    sees("stranger", "80 no", "81 no")
    for port in (80, 81):
        with urllib.request.urlopen(f"http://{address}:{port}", timeout=60) as answer:
            assert answer.status == 200, "the node is kept out by no policy"
    cluster.api.delete("pods", "friend-0")
    cluster.wait_until_rolled_out()
    sees("friend", "80 yes", "81 no")
    cluster.api.put("networkpolicies", policy("friend", "friend", "Egress", {"to": [friend]}))
    sees("friend", "80 no", "81 no")
    web = {"podSelector": {"matchLabels": {"app": "web"}}}
    anywhere = {"ports": [{"port": 79, "endPort": 82}]}
    cluster.api.put("networkpolicies", policy("web", "web", "Ingress", anywhere))
    cluster.api.put("networkpolicies", policy("friend", "friend", "Egress", {"to": [web]}))
    for name in ("friend", "stranger"):
        sees(name, "80 yes", "81 yes")


def test_a_range_of_ports_is_a_few_blocks() -> None:
    for first, last in ((80, 80), (7000, 7099), (1, 65535), (0, 65535), (6380, 6382)):
        found = list(blocks(first, last))
        assert len(found) <= 32
        ports = [p for start, mask in found for p in range(start, start + (~mask & 0xFFFF) + 1)]
        assert ports == list(range(first, last + 1))


def test_a_node_that_vanishes_takes_its_pods_along_without_a_signal(cluster: Cluster) -> None:
    says = "trap 'echo told; exit' TERM; while :; do sleep 0.1; done"
    cluster.api.put("deployments", workload("Deployment", "web", says))
    cluster.wait_until_rolled_out()
    [pod] = pods(cluster, "web")
    lost = pod["metadata"]["name"]
    cluster.lose(pod["spec"]["nodeName"])
    cluster.wait_for(
        lambda: lost not in cluster.pods and cluster.is_rolled_out(), "another pod elsewhere"
    )
    [new] = pods(cluster, "web")
    assert new["spec"]["nodeName"] != pod["spec"]["nodeName"]
    assert "told" not in log(cluster, lost)


def test_names_that_nobody_has_are_refused(cluster: Cluster) -> None:
    ask = "getent hosts nothing-here || echo unknown; sleep 3600"
    cluster.api.put("statefulsets", workload("StatefulSet", "asks", ask))
    cluster.wait_for(lambda: "unknown" in log(cluster, "asks-0"), "an answer")
    empty = {"selector": {"app": "none"}, "ports": [{"port": 80}]}
    meta = {"name": "empty"}
    cluster.api.put("services", {"kind": "Service", "metadata": meta, "spec": empty})
    service = cluster.api.objects["services", "empty"]["spec"]
    cluster.wait_for(lambda: ("empty", 80) in cluster.relays, "its relay")
    with pytest.raises(OSError, match=r"(?i)closed|refused|reset"):
        urllib.request.urlopen(f"http://{service['clusterIP']}:80", timeout=60)


def test_strategic_merges() -> None:
    value = {"a": 1, "list": [{"name": "x", "v": 1}, {"name": "y"}], "plain": [1, 2]}
    change = {
        "a": None, "plain": [3], "$setElementOrder/list": [],
        "list": [{"name": "x", "v": 2}, {"name": "y", "$patch": "delete"}],
    }  # fmt: skip
    assert merged(value, change) == {"list": [{"name": "x", "v": 2}], "plain": [3]}
    assert merged({"m": {"a": 1}}, {"m": {"$patch": "replace", "b": 2}}) == {"m": {"b": 2}}
    kept = {"m": {"$retainKeys": ["b"], "b": 2}}
    assert merged({"m": {"a": 1}}, kept) == {"m": {"b": 2}}


def test_this_machine_has_what_it_takes() -> None:
    assert all(map(shutil.which, ("ip", "unshare", "nsenter", "setpriv", "hostname")))
