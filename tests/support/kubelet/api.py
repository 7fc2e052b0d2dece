"""Kubernetes' API as far as `helm` and the small kubelet need it: objects in memory, over HTTP.

Owns the objects; whoever changes one holds `lock`. Nothing here starts a pod: `controllers` and
`cluster` do what the objects say.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

KINDS = {
    "v1": {
        "services": "Service", "secrets": "Secret", "configmaps": "ConfigMap", "pods": "Pod",
        "nodes": "Node", "serviceaccounts": "ServiceAccount",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {
        "deployments": "Deployment", "statefulsets": "StatefulSet", "replicasets": "ReplicaSet",
    },
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
}  # fmt: skip
"""What is known of each group and version: plural names and kinds."""

PATH = re.compile(r"/apis?/(?P<group>.+)/namespaces/default/(?P<kind>[a-z]+)(?:/(?P<name>.+))?$")

LIST_KEYS = ("name", "containerPort", "mountPath", "port", "ip", "topologyKey")
"""The keys by which strategic merges find an entry of a list. A list without them is replaced."""


class KubeApi(ThreadingHTTPServer):
    """Keeps what is created; `objects` maps (kind, name) to the object as it was sent last."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], Object] = {}
        self._versions = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, kind: str, value: Object) -> Object:
        """Store an object, as new as none before it."""
        with self.lock:
            meta = value["metadata"]
            known = self.objects.get((kind, meta["name"]))
            if kind == "secrets" and (plain := value.pop("stringData", None)):
                encoded = {key: _base64(text.encode()) for key, text in plain.items()}
                value["data"] = {**value.get("data", {}), **encoded}
            version = str(next(self._versions))
            meta["resourceVersion"] = version
            meta.setdefault("namespace", "default")
            meta["uid"] = known["metadata"]["uid"] if known else f"uid-{version}"
            if known is None or known.get("spec") != value.get("spec"):
                meta["generation"] = (known or {"metadata": {}})["metadata"].get(
                    "generation", 0
                ) + 1
            self.objects[kind, meta["name"]] = value
            return value

    def patch(self, kind: str, name: str, change: Object) -> Object:
        """Merge `change` into an object as `kubectl patch` does by default."""
        with self.lock:
            return self.put(kind, merged(self.objects[kind, name], change))

    def put_secret(self, name: str, files: Mapping[str, bytes]) -> Object:
        data = {key: _base64(content) for key, content in files.items()}
        return self.put("secrets", {"kind": "Secret", "metadata": {"name": name}, "data": data})

    def get(self, kind: str, name: str) -> Object | None:
        with self.lock:
            return self.objects.get((kind, name))

    def listed(self, kind: str, labels: dict[str, str] | None = None) -> list[Object]:
        """Return the objects of a kind that have these labels, in the order of their making."""
        with self.lock:
            return [
                each
                for (of_kind, _), each in self.objects.items()
                if of_kind == kind
                and (labels or {}).items() <= each["metadata"].get("labels", {}).items()
            ]

    def remove(self, kind: str, name: str) -> Object | None:
        with self.lock:
            return self.objects.pop((kind, name), None)

    def delete(self, kind: str, name: str) -> Object | None:
        """Remove an object; a pod is told to end first, and goes when it has ended."""
        with self.lock:
            found = self.objects.get((kind, name))
            if found is not None and kind == "pods":
                found["metadata"].setdefault("deletionTimestamp", "now")
                return self.put(kind, found)
            return self.remove(kind, name)


class _Handler(BaseHTTPRequestHandler):
    server: KubeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if found := PATH.match(url.path):
            kind, name = found["kind"], found["name"]
            if name is None and "watch" in query:
                self._watch(kind, query)
            elif name is None:
                items = self._listed(kind, query)
                name = f"{_kind(kind)}List"
                self._answer(
                    200, {"kind": name, "apiVersion": "v1", "metadata": {}, "items": items}
                )
            elif value := self.server.get(kind, name):
                self._answer(200, value)
            else:
                self._missing()
        elif url.path == "/version":
            self._answer(200, {"major": "1", "minor": "31", "gitVersion": "v1.31.0"})
        elif url.path == "/openapi/v2":  # no schemas (of protobuf): helm then checks none
            self._send(200, b"", "application/json")
        elif url.path == "/api":
            self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif url.path == "/apis":
            groups = [_group(version) for version in KINDS if "/" in version]
            self._answer(200, {"kind": "APIGroupList", "groups": groups})
        elif (version := url.path.removeprefix("/apis/").removeprefix("/api/")) in KINDS:
            self._answer(200, _resources(version))
        else:
            self._missing()

    def do_POST(self) -> None:
        found, sent = self._place(), self._body()
        self._answer(201, self.server.put(found["kind"], sent))

    def do_PUT(self) -> None:
        found = self._place()
        self._answer(200, self.server.put(found["kind"], self._body()))

    def do_PATCH(self) -> None:
        found, change = self._place(), self._body()
        if self.server.get(found["kind"], found["name"]) is None:
            self._missing()
        else:
            self._answer(200, self.server.patch(found["kind"], found["name"], change))

    def do_DELETE(self) -> None:
        found = self._place()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if (gone := self.server.delete(found["kind"], found["name"])) is None:
            self._missing()
        else:
            self._answer(200, gone)

    def _listed(self, kind: str, query: dict[str, str]) -> list[Object]:
        labels = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        listed = self.server.listed(kind, labels)
        return copy.deepcopy([each for each in listed if name in ("", each["metadata"]["name"])])

    def _watch(self, kind: str, query: dict[str, str]) -> None:
        """Tell of each change for as long as the client listens."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.close_connection = True
        told: dict[str, str] = {}
        try:
            while True:
                for each in self._listed(kind, query):
                    meta = each["metadata"]
                    if told.get(meta["name"]) != meta["resourceVersion"]:
                        event = "MODIFIED" if meta["name"] in told else "ADDED"
                        told[meta["name"]] = meta["resourceVersion"]
                        line = json.dumps({"type": event, "object": each}).encode()
                        self.wfile.write(line + b"\n")
                threading.Event().wait(0.1)
        except OSError:
            return

    def _place(self) -> re.Match[str]:
        found = PATH.match(urlsplit(self.path).path)
        assert found is not None, self.path
        return found

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _missing(self) -> None:
        self._answer(
            404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
                  "code": 404},
        )  # fmt: skip

    def _answer(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _kind(plural: str) -> str:
    return next(kinds[plural] for kinds in KINDS.values() if plural in kinds)


def _group(version: str) -> Object:
    name, _, number = version.rpartition("/")
    entry = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def _resources(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    listed = [
        {"name": plural, "singularName": "", "namespaced": plural != "nodes", "kind": kind,
         "verbs": verbs}
        for plural, kind in KINDS[version].items()
    ]  # fmt: skip
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


def merged(value: Any, change: Any) -> Any:
    """Return `value` after a strategic merge of `change`: null takes a field out, `$patch` replaces
    or deletes, entries of lists are found by their key.
    """
    if isinstance(change, dict):
        if change.get("$patch") == "replace" or not isinstance(value, dict):
            value = {}
        if (kept := change.get("$retainKeys")) is not None:
            value = {name: each for name, each in value.items() if name in kept}
        result = dict(value)
        for name, new in change.items():
            if name.startswith("$"):
                continue
            if new is None:
                result.pop(name, None)
            else:
                result[name] = merged(value.get(name), new)
        return result
    if isinstance(change, list) and isinstance(value, list):
        key = _list_key([*value, *change])
        return copy.deepcopy(change) if key is None else _merged_list(value, change, key)
    return copy.deepcopy(change)


def _list_key(entries: list[Any]) -> str | None:
    """Return what all entries of a list are told apart by, if there is such a field."""
    if not entries or not all(isinstance(each, dict) for each in entries):
        return None
    return next((key for key in LIST_KEYS if all(key in each for each in entries)), None)


def _merged_list(value: list[Object], change: list[Object], key: str) -> list[Object]:
    result = {each[key]: each for each in value}
    for each in change:
        if each.get("$patch") == "delete":
            result.pop(each[key], None)
        else:
            result[each[key]] = merged(result.get(each[key], {}), each)
    return list(result.values())


@contextmanager
def serving() -> Iterator[KubeApi]:
    """Run one on a free port of this machine."""
    with KubeApi() as api:
        thread = threading.Thread(target=api.serve_forever)
        thread.start()
        try:
            yield api
        finally:
            api.shutdown()
            thread.join()
