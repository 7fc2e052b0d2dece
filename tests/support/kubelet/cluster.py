"""A small Kubernetes on this machine: an API for `helm`, controllers, and pods as processes.

`README.md` says where it differs from the real one. Use `Cluster` as a context: leaving it ends all
pods and takes the network away.
"""

from __future__ import annotations

import contextlib
import operator
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import yaml

from tests.support.kubelet import manifests
from tests.support.kubelet import policies as policies_of
from tests.support.kubelet.admission import Admission
from tests.support.kubelet.api import KubeApi, Object, serving
from tests.support.kubelet.controllers import Controllers
from tests.support.kubelet.names import DOMAIN, NameServer
from tests.support.kubelet.network import PodNetwork
from tests.support.kubelet.pod import Ended, PodRunner
from tests.support.kubelet.sandbox import Image, remove
from tests.support.relay import Relay

STEP_S = 0.1
WAIT_S = 300.0


class Cluster:
    """Nodes of this machine's size divided by their number, and what `helm` puts on them."""

    def __init__(
        self,
        folder: Path,
        images: Mapping[str, Image],
        nodes: int = 1,
        *,
        restricted: bool = False,
        quota: Mapping[str, object] | None = None,
        enforces: bool = False,
    ) -> None:
        """`images`: by the full name that manifests use; state and logs lie in `folder`.
        `restricted`: Pod Security admits no other pods. `quota`: what all may request together.
        `enforces`: network policies hold.
        """
        self.folder = folder
        self._enforces = enforces
        self.images = dict(images)
        self.ended: list[Ended] = []
        """How containers ended that were told to, in order."""
        self._lost_claims: list[str] = []
        """Those to be deleted with the pod that has them."""
        self._closing = contextlib.ExitStack()
        self.api: KubeApi = self._closing.enter_context(serving())
        self._network = PodNetwork()
        self._closing.callback(self._network.close)
        names = NameServer(self._network.gateway, self._lookup)
        self._closing.callback(names.close)
        self._controllers = Controllers(self.api, Admission(restricted, quota or {}))
        self.pods: dict[str, PodRunner] = {}
        self.relays: dict[tuple[str, int], Relay] = {}
        self._random = random.Random(0)
        self._stop = threading.Event()
        self.error: BaseException | None = None
        for number in range(nodes):
            name = f"node-{number}"
            node = {
                "kind": "Node",
                "apiVersion": "v1",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
                "spec": {},
                "status": {"allocatable": {"cpu": "64", "memory": "256Gi"}},
            }
            self.api.put("nodes", node)
        self._loop = threading.Thread(target=self._run, name="controllers", daemon=True)
        self._loop.start()

    # -- what operators do

    def helm(self, *words: str) -> str:
        """Run helm against this cluster; returns what it says.

        Raises:
            ValueError: it refused.
        """
        done = subprocess.run(
            ["helm", *words, "--namespace", "default"],
            capture_output=True, text=True, timeout=300, check=False,
            env=os.environ | {"HELM_KUBEAPISERVER": self.api.url, "KUBECONFIG": os.devnull},
        )  # fmt: skip
        if done.returncode:
            raise ValueError(done.stderr + done.stdout)
        return done.stdout

    def kubectl(self, *words: str) -> None:
        """Do what a command of `kubectl` does, of those that the operator's guide has."""
        flags = dict(word.lstrip("-").split("=") for word in words if "=" in word)
        match [word for word in words if not word.startswith("-")]:
            case ["scale", place]:
                kind, _, name = place.partition("/")
                self.scale(f"{kind}s", name, int(flags["replicas"]))
            case ["rollout", "restart", place]:
                kind, _, name = place.partition("/")
                self.restart(f"{kind}s", name)
            case ["rollout", "status", _]:
                self.wait_until_rolled_out()
            case ["drain", node]:
                self.drain(node)
            case ["uncordon", node]:
                self.cordon(node, unschedulable=False)
            case ["patch", "secret", name]:
                change = yaml.safe_load(Path(flags["patch-file"]).read_text())
                self.api.patch("secrets", name, change)
            case ["delete", "pod", name]:
                self.api.delete("pods", name)
            case ["delete", "pvc", name]:  # it goes when no pod has it any more
                self._lost_claims.append(name)
            case other:
                raise NotImplementedError(f"kubectl {' '.join(other)}")

    def volume(self, pod: Object, name: str) -> Path:
        """Return where a volume of a running pod lies on this machine."""
        return self.folder / "pods" / pod["metadata"]["uid"] / "volumes" / name

    def scale(self, kind: str, name: str, replicas: int) -> None:
        self.api.patch(kind, name, {"spec": {"replicas": replicas}})

    def restart(self, kind: str, name: str) -> None:
        """Replace all pods, as `kubectl rollout restart`."""
        stamp = {"kubectl.kubernetes.io/restartedAt": str(time.time_ns())}
        change = {"spec": {"template": {"metadata": {"annotations": stamp}}}}
        self.api.patch(kind, name, change)

    def cordon(self, node: str, *, unschedulable: bool = True) -> None:
        self.api.patch("nodes", node, {"spec": {"unschedulable": unschedulable or None}})

    def drain(self, node: str) -> None:
        """Take all pods off a node, each as its budget allows, and wait until they have gone."""
        self.cordon(node)

        def is_empty() -> bool:
            left = [p for p in self.api.listed("pods") if p["spec"].get("nodeName") == node]
            for pod in left:
                if "deletionTimestamp" not in pod["metadata"]:
                    self._controllers.evict(pod["metadata"]["name"])
            return not left

        self.wait_for(is_empty, f"{node} to be empty")

    def lose(self, node: str) -> None:
        """Have a node vanish with all its processes, which get no signal that they could handle."""
        self.cordon(node)
        for pod in self.api.listed("pods"):
            name = pod["metadata"]["name"]
            if pod["spec"].get("nodeName") == node and name in self.pods:
                self.pods[name].crash()
                self.pods[name].kill()
                self.api.delete("pods", name)

    def crash(self, *pods: str) -> None:
        """Kill all processes of pods, as where memory is short, and wait until each container was
        started again: a pod that is not ready in between could be missed.
        """
        before = {name: self.num_restarts(name) for name in pods}
        for name in pods:
            self.pods[name].crash()

        def is_again(name: str) -> bool:
            return all(map(operator.gt, self.num_restarts(name), before[name]))

        for name in pods:
            self.wait_for(partial(is_again, name), f"the containers of {name} to be started again")

    # -- what tests ask

    @property
    def refused(self) -> dict[str, str]:
        """The pods that were not admitted when that was tried last, and why."""
        return self._controllers.refused

    def wait_for(self, holds: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
        """Wait until `holds`; when it never does, say what all pods say."""
        end_s = time.monotonic() + seconds
        while not holds():
            if self.error is not None:
                raise self.error
            if time.monotonic() > end_s:
                raise AssertionError(f"waited for {what}\n{self.report()}")
            time.sleep(STEP_S)

    def is_rolled_out(self) -> bool:
        """Whether all workloads have the pods they want, as they want them, and no others.

        The controllers take a step first: what they counted last may be older than what the caller
        has just seen of a pod.
        """
        with self.api.lock:
            self._controllers.reconcile()
            for kind in ("deployments", "statefulsets", "leaderworkersets"):
                for each in self.api.listed(kind):
                    wanted, status = each["spec"].get("replicas", 1), each.get("status", {})
                    names = ["replicas", "readyReplicas", "updatedReplicas"]
                    if each["spec"].get("updateStrategy", {}).get("type") == "OnDelete":
                        names.remove("updatedReplicas")
                    counts = {status.get(name) for name in names}
                    if counts != {wanted} or (
                        status.get("observedGeneration") != each["metadata"]["generation"]
                    ):
                        return False
            return not [p for p in self.pods.values() if self._is_ending(p)]

    def wait_until_rolled_out(self) -> None:
        self.wait_for(self.is_rolled_out, "the rollout")

    def present(self, component: str) -> list[Object]:
        """Return the pods of one role that are not about to end: after a rollout those that it
        made, also where one of them is not ready for a moment.
        """
        pods = self.api.listed("pods", {"app.kubernetes.io/component": component})
        return [each for each in pods if "deletionTimestamp" not in each["metadata"]]

    def num_restarts(self, pod: str) -> list[int]:
        """Return how often each container of a pod was started again."""
        found = self.api.get("pods", pod)
        assert found is not None, f"pod {pod} is gone"
        return [each["restartCount"] for each in found["status"].get("containerStatuses", [])]

    def url(self, service: str, scheme: str = "http") -> str:
        """Return where a Service with an address is reached from this machine."""
        spec = self.api.objects["services", service]["spec"]
        return f"{scheme}://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def report(self) -> str:
        """Return what all pods are and the end of what each said."""
        lines = [f"{name}: {why}" for name, why in self.refused.items()]
        for pod in self.api.listed("pods"):
            lines.append(
                f"{pod['metadata']['name']}: {pod['spec'].get('nodeName')} {pod['status']}"
            )
        for log in sorted((self.folder / "logs").glob("*.log")):
            text = log.read_text(errors="replace").splitlines()[-25:]
            lines += [f"== {log.name}", *text]
        return "\n".join(lines)

    # -- the loop

    def _run(self) -> None:
        try:
            while not self._stop.wait(STEP_S):
                self._controllers.reconcile()
                self._start_and_end_pods()
                self._connect_services()
                if self._enforces:
                    self._enforce_policies()
        except BaseException as error:
            self.error = error
            raise

    def _start_and_end_pods(self) -> None:
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.is_gone}
        for pod in self.api.listed("pods"):
            name = pod["metadata"]["name"]
            is_leaving = "deletionTimestamp" in pod["metadata"]
            if name in self.pods:
                if is_leaving:
                    self.pods[name].delete()
            elif is_leaving:
                self.api.remove("pods", name)  # it was never started
            elif "nodeName" in pod["spec"]:
                self._drop_claims(name)
                self.pods[name] = PodRunner(
                    self.api, pod, self._network, self.images, self.folder, self.ended.append
                )

    def _drop_claims(self, pod: str) -> None:
        for claim in [each for each in self._lost_claims if each.endswith(f"-{pod}")]:
            remove(self.folder / "claims" / claim)
            self._lost_claims.remove(claim)

    def _is_ending(self, pod: PodRunner) -> bool:
        found = self.api.get("pods", pod.name)
        return found is None or "deletionTimestamp" in found["metadata"]

    def _connect_services(self) -> None:
        """Give Services addresses, and their ports relays."""
        for service in self.api.listed("services"):
            name, spec = service["metadata"]["name"], service["spec"]
            if spec.get("clusterIP") == "None":
                continue
            if "clusterIP" not in spec:
                spec["clusterIP"] = self._network.service_address()
            for port in spec["ports"]:
                if (name, port["port"]) not in self.relays:
                    self.relays[name, port["port"]] = Relay(
                        partial(self._endpoint, name, port),
                        host=spec["clusterIP"],
                        port=port["port"],
                    )

    def _enforce_policies(self) -> None:
        with self.api.lock:
            pods = [each for each in self.api.listed("pods") if each["status"].get("podIP")]
            services, policies = self.api.listed("services"), self.api.listed("networkpolicies")
            known = policies_of.Network(pods, services, policies, self._network.gateway)
            wanted = {
                runner.link: known.filters(pod, runner.link, self._network.sink)
                for pod in pods
                if (runner := self.pods.get(pod["metadata"]["name"])) is not None
            }
        self._network.filter(wanted)

    def _lookup(self, name: str) -> list[str] | None:
        """Return the addresses that a name of the cluster has; None: there is no such name."""
        host, _, service_name = name.removesuffix(f".{DOMAIN}").rpartition(".")
        service = self.api.get("services", service_name)
        if service is None or not name.endswith(f".{DOMAIN}"):
            return None
        if service["spec"].get("clusterIP") != "None":
            return [service["spec"]["clusterIP"]] if not host else None
        pods = self._behind(service)
        if host:
            pods = [pod for pod in pods if pod["spec"].get("hostname") == host]
        return [pod["status"]["podIP"] for pod in pods] or None

    def _behind(self, service: Object) -> list[Object]:
        """Return the pods that a Service sends to."""
        spec = service["spec"]
        return [
            pod
            for pod in self.api.listed("pods", spec["selector"])
            if manifests.is_ready(pod)
            or (spec.get("publishNotReadyAddresses") and pod["status"].get("podIP"))
        ]

    def _endpoint(self, name: str, port: Object) -> tuple[str, int] | None:
        service = self.api.get("services", name)
        pods = self._behind(service) if service is not None else []
        if not pods:
            return None
        pod = self._random.choice(pods)
        return pod["status"]["podIP"], manifests.port_of(pod, port.get("targetPort", port["port"]))

    # -- end

    def close(self) -> None:
        """End all pods at once and take everything away."""
        self._stop.set()
        self._loop.join()
        for pod in self.pods.values():
            pod.kill()
        for pod in self.pods.values():
            pod.join(60.0)
        for relay in self.relays.values():
            relay.close()
        self._closing.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
