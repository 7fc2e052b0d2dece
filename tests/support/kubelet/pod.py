"""One pod: its containers started in turn, probed, started again, and ended in good order.

Owns the pod's processes and its thread, which writes the pod's status into the API.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kubelet import manifests
from tests.support.kubelet.api import KubeApi, Object
from tests.support.kubelet.manifests import NotYet
from tests.support.kubelet.names import RESOLV_CONF
from tests.support.kubelet.network import PodNetwork
from tests.support.kubelet.sandbox import Image, Mount, Process, remove
from tests.support.kubelet.volumes import Volumes

TICK_S = 0.1
REFRESH_S = 1.0
BACK_OFF_S = 10.0
LONGEST_BACK_OFF_S = 300.0
HEALTHY_S = 600.0
"""A container that ran so long is started again at once."""


@dataclass
class Probe:
    """One probe of a container: when it is asked next, and what it said so far."""

    kind: str
    spec: Object
    next_s: float
    successes: int = 0
    failures: int = 0
    last: str = ""

    @classmethod
    def of(cls, container: Object, kind: str, now: float) -> Probe | None:
        spec = container.get(f"{kind}Probe")
        return None if spec is None else cls(kind, spec, now + spec.get("initialDelaySeconds", 0))

    def ask(self, pod: PodRunner, process: Process, now: float) -> bool | None:
        """Ask if it is time; return what holds once as many answers as its threshold agree."""
        if now < self.next_s:
            return None
        self.next_s = now + self.spec.get("periodSeconds", 10)
        self.last = pod.asked(self.spec, process)
        if not self.last:
            self.successes, self.failures = self.successes + 1, 0
            return True if self.successes >= self.spec.get("successThreshold", 1) else None
        self.successes, self.failures = 0, self.failures + 1
        return False if self.failures >= self.spec.get("failureThreshold", 3) else None


@dataclass
class Container:
    """One container of a pod over its restarts."""

    spec: Object
    process: Process | None = None
    begun_s: float = 0.0
    next_s: float = 0.0
    restarts: int = -1
    back_off_s: float = 0.0
    started: bool = False
    ready: bool = False
    waiting: str = ""
    code: int | None = None
    probes: dict[str, Probe] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a container was told to end and did."""

    pod: str
    container: str
    seconds: float
    code: int | None
    killed: bool
    """It took longer than its grace."""


class PodRunner:
    """Runs a pod that has a node until it was deleted and has ended."""

    def __init__(
        self, api: KubeApi, pod: Object, network: PodNetwork, images: Mapping[str, Image],
        folder: Path, ended: Callable[[Ended], None],
    ) -> None:  # fmt: skip
        """Start it. Use folders under `folder`; `images` by the name that containers give."""
        self.name = pod["metadata"]["name"]
        self._api = api
        self._pod = pod
        self._network = network
        self._images = images
        self._folder = folder / "pods" / pod["metadata"]["uid"]
        self._folder.mkdir(parents=True)
        self.logs = folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self._files = [
            Mount(self._folder / name, f"/etc/{name}") for name in ("hosts", "resolv.conf")
        ]
        self._ended = ended
        self._volumes = Volumes(api, pod, self._folder / "volumes", folder / "claims")
        self._containers = [Container(spec) for spec in pod["spec"]["containers"]]
        self._deleted = threading.Event()
        self._grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        self._namespace = ""
        self.address = ""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    @property
    def link(self) -> str:
        """The node's end of its link to the network; empty: it has none yet."""
        return self._network.link_of(self._namespace)

    @property
    def is_gone(self) -> bool:
        return not self._thread.is_alive()

    def join(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def delete(self) -> None:
        """Have it end, with its grace."""
        self._deleted.set()

    def kill(self) -> None:
        """Have it end now."""
        self._grace_s = 0.0
        self._deleted.set()

    def crash(self) -> None:
        """Kill all its processes, as where its node vanishes or memory is short."""
        for each in self._containers:
            if each.process is not None:
                each.process.signal(signal.SIGKILL)

    def _run(self) -> None:
        try:
            self._namespace, self.address = self._network.attach()
            hosts, resolver = [mount.source for mount in self._files]
            hosts.write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
            resolver.write_text(RESOLV_CONF.format(self._network.gateway))
            self._say("Pending")
            if self._initialized():
                self._serve()
            self._end()
        finally:
            for each in self._containers:
                if each.process is not None:
                    each.process.end()
            self._volumes.close()
            self._network.detach(self._namespace)
            remove(self._folder)
            self._api.remove("pods", self.name)

    # -- life

    def _initialized(self) -> bool:
        """Run the init containers one after another; return False when told to end meanwhile."""
        for spec in self._pod["spec"].get("initContainers", []):
            container = Container(spec)
            while container.code != 0:
                if self._deleted.is_set():
                    if container.process is not None:
                        container.process.end()
                    return False
                self._keep_running(container, time.monotonic())
                self._say("Pending", waiting=container.waiting)
                self._deleted.wait(TICK_S)
        return True

    def _serve(self) -> None:
        refresh_s = time.monotonic() + REFRESH_S
        while not self._deleted.is_set():
            now = time.monotonic()
            for each in self._containers:
                self._keep_running(each, now)
                if each.process is not None:
                    self._probe(each, now)
            if now > refresh_s:
                with contextlib.suppress(NotYet):
                    self._volumes.refresh()
                refresh_s = now + REFRESH_S
            self._say(self._phase())
            self._deleted.wait(TICK_S)

    def _keep_running(self, container: Container, now: float) -> None:
        """Notice that a container has ended, and start it when it is time."""
        if container.process is not None:
            code = container.process.poll()
            if code is None:
                return
            container.process, container.code = None, code
            container.started = container.ready = False
            if now - container.begun_s > HEALTHY_S:
                container.back_off_s = 0.0
            container.next_s = now + container.back_off_s
            container.back_off_s = min(
                max(2 * container.back_off_s, BACK_OFF_S), LONGEST_BACK_OFF_S
            )
        policy = self._pod["spec"].get("restartPolicy", "Always")
        done = container.code is not None
        is_init = container not in self._containers
        if done and (
            container.code == 0 if is_init or policy == "OnFailure" else policy == "Never"
        ):
            return
        if now >= container.next_s:
            self._start(container, now)

    def _start(self, container: Container, now: float) -> None:
        spec = container.spec
        try:
            self._volumes.make()
            pod = self._pod | {"status": self._pod["status"] | {"podIP": self.address}}
            variables = manifests.environment(self._api, pod, spec)
        except NotYet as problem:
            container.waiting, container.next_s = str(problem), now + 1.0
            return
        image = self._images.get(spec["image"])
        if image is None:
            container.waiting, container.next_s = f"no image {spec['image']}", now + 1.0
            return
        words = [*spec.get("command", []), *spec.get("args", [])]
        assert words, "containers of images' own commands cannot be run"
        root = self._folder / f"root-{spec['name']}"
        root.mkdir(exist_ok=True)
        container.waiting, container.code = "", None
        container.process = Process(
            self._pod, spec, image, self._namespace, root,
            [*self._files, *image.mounts(), *self._volumes.mounts(spec)],
            variables, [manifests.expanded(word, variables) for word in words], self.log(spec),
        )  # fmt: skip
        container.begun_s, container.restarts = now, container.restarts + 1
        kinds = ("startup", "readiness", "liveness")
        found = {kind: Probe.of(spec, kind, now) for kind in kinds}
        container.probes = {kind: probe for kind, probe in found.items() if probe is not None}
        container.started = "startup" not in container.probes
        container.ready = container.started and "readiness" not in container.probes

    def _probe(self, container: Container, now: float) -> None:
        """Ask what is due; a container that is not live, or did not start in time, is ended."""
        process = container.process
        assert process is not None
        if not container.started:
            said = container.probes["startup"].ask(self, process, now)
            container.started = bool(said)
            if container.started:
                container.ready = "readiness" not in container.probes
            elif said is False:
                self._stop(container, now + self._grace_s, "did not start")
            return
        if (readiness := container.probes.get("readiness")) is not None:
            said = readiness.ask(self, process, now)
            container.ready = container.ready if said is None else said
        liveness = container.probes.get("liveness")
        if liveness is not None and liveness.ask(self, process, now) is False:
            self._stop(container, now + self._grace_s, "is not live")

    def _end(self) -> None:
        end_s = time.monotonic() + self._grace_s
        threads = [
            threading.Thread(target=self._stop, args=(each, end_s, "was deleted"), daemon=True)
            for each in self._containers
            if each.process is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _stop(self, container: Container, end_s: float, why: str) -> None:
        """Run the preStop hook, send SIGTERM, wait until `end_s`, kill."""
        process, name = container.process, container.spec["name"]
        assert process is not None
        begun_s = time.monotonic()
        with self.log(container.spec).open("a") as log:
            last = "; ".join(p.last for p in container.probes.values() if p.last)
            print(f"-- kubelet: {name} {why} {last}", file=log)
        hook = container.spec.get("lifecycle", {}).get("preStop", {})
        if "exec" in hook:
            command = hook["exec"]["command"]
            process.run(command, end_s - time.monotonic(), self.log(container.spec))
        elif "sleep" in hook:
            time.sleep(min(hook["sleep"]["seconds"], max(0.0, end_s - time.monotonic())))
        process.signal(signal.SIGTERM)
        while process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        killed = process.poll() is None
        process.end()
        seconds = time.monotonic() - begun_s
        self._ended(Ended(self.name, name, seconds, process.poll(), killed))

    # -- what others ask

    def run_in(self, container: str, words: list[str], timeout_s: float) -> int:
        """Run a command in a container, as `kubectl exec`; what it says goes to its log."""
        [found] = [each for each in self._containers if each.spec["name"] == container]
        assert found.process is not None, f"{container} does not run"
        return found.process.run(words, timeout_s, self.log(found.spec))

    def first_process(self, container: str) -> int | None:
        """Return the pid of a container's first process."""
        [found] = [each for each in self._containers if each.spec["name"] == container]
        return found.process.init if found.process is not None else None

    def log(self, spec: Object) -> Path:
        return self.logs / f"{self.name}.{spec['name']}.log"

    def asked(self, spec: Object, process: Process) -> str:
        """Ask what a probe asks; return what was wrong, empty if nothing was."""
        timeout_s = spec.get("timeoutSeconds", 1)
        if "exec" in spec:
            code = process.run(spec["exec"]["command"], timeout_s)
            return f"exit code {code}" if code else ""
        try:
            if "tcpSocket" in spec:
                port = manifests.port_of(self._pod, spec["tcpSocket"]["port"])
                socket.create_connection((self.address, port), timeout_s).close()
                return ""
            return self._get(spec["httpGet"], timeout_s)
        except (OSError, http.client.HTTPException) as error:
            return repr(error)

    def _get(self, ask: Object, timeout_s: float) -> str:
        port = manifests.port_of(self._pod, ask["port"])
        connection: http.client.HTTPConnection
        if ask.get("scheme") == "HTTPS":
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(
                self.address, port, timeout=timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(self.address, port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", ask.get("path", "/"))
            answer = connection.getresponse()
            body = answer.read(2000).decode(errors="replace")
        return "" if 200 <= answer.status < 400 else f"{answer.status} {body}"

    # -- status

    def _phase(self) -> str:
        codes = [None if c.process is not None else c.code for c in self._containers]
        if self._pod["spec"].get("restartPolicy", "Always") == "Always" or None in codes:
            return "Running"
        return "Failed" if any(codes) else "Succeeded"

    def _say(self, phase: str, *, waiting: str = "") -> None:
        ready = phase == "Running" and all(each.ready for each in self._containers)
        status: dict[str, Any] = {
            "phase": phase,
            "podIP": self.address,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [
                {
                    "name": each.spec["name"],
                    "ready": each.ready,
                    "restartCount": max(each.restarts, 0),
                    "waiting": each.waiting or waiting,
                    "said": {kind: probe.last for kind, probe in each.probes.items()},
                }
                for each in self._containers
            ],
        }
        with self._api.lock:
            if self._pod.get("status") != status:
                self._pod["status"] = status
                self._api.put("pods", self._pod)
