"""A store of objects that answers `helm install` and `helm upgrade` as Kubernetes' API would."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = {
    "v1": ("services", "secrets", "configmaps"),
    "apps/v1": ("deployments", "statefulsets"),
    "policy/v1": ("poddisruptionbudgets",),
}
NAMES = {
    "services": "Service", "secrets": "Secret", "configmaps": "ConfigMap",
    "deployments": "Deployment", "statefulsets": "StatefulSet",
    "poddisruptionbudgets": "PodDisruptionBudget",
}  # fmt: skip
PATH = re.compile(r"/apis?/(?P<group>.+)/namespaces/default/(?P<kind>[a-z]+)(?:/(?P<name>.+))?$")


class KubeApi(ThreadingHTTPServer):
    """Keeps what is created; `objects` maps (kind, name) to the object as it was sent last."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: KubeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if found := PATH.match(url.path):
            kind, name = found["kind"], found["name"]
            if name is None:
                self._answer(200, self._listed(kind, parse_qs(url.query).get("labelSelector")))
            elif (kind, name) in self.server.objects:
                self._answer(200, self.server.objects[kind, name])
            else:
                self._missing()
        elif url.path == "/version":
            self._answer(200, {"major": "1", "minor": "28", "gitVersion": "v1.28.0"})
        elif url.path == "/api":
            self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif url.path == "/apis":
            self._answer(
                200, {"kind": "APIGroupList", "groups": [_group(v) for v in KINDS if "/" in v]}
            )
        elif (version := url.path.removeprefix("/apis/").removeprefix("/api/")) in KINDS:
            self._answer(200, _resources(version))
        else:
            self._missing()

    def do_POST(self) -> None:
        found = PATH.match(urlsplit(self.path).path)
        assert found is not None, self.path
        sent = self._body()
        self.server.objects[found["kind"], sent["metadata"]["name"]] = sent
        self._answer(201, sent)

    def do_PUT(self) -> None:
        found = PATH.match(urlsplit(self.path).path)
        assert found is not None, self.path
        stored = self.server.objects[found["kind"], found["name"]] = self._body()
        self._answer(200, stored)

    def do_PATCH(self) -> None:
        found = PATH.match(urlsplit(self.path).path)
        assert found is not None, self.path
        stored = self.server.objects[found["kind"], found["name"]]
        _merge(stored, self._body())
        self._answer(200, stored)

    def _listed(self, kind: str, selectors: list[str] | None) -> dict[str, Any]:
        wanted = dict(pair.split("=") for pair in ",".join(selectors or []).split(",") if pair)
        items = [
            each
            for (of_kind, _), each in self.server.objects.items()
            if of_kind == kind and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        return {"kind": f"{NAMES[kind]}List", "apiVersion": "v1", "metadata": {}, "items": items}

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _missing(self) -> None:
        self._answer(
            404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
                  "code": 404},
        )  # fmt: skip

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _group(version: str) -> dict[str, Any]:
    name, _, number = version.rpartition("/")
    entry = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def _resources(version: str) -> dict[str, Any]:
    verbs = ["create", "get", "list", "patch", "update"]
    listed = [
        {"name": kind, "singularName": "", "namespaced": True, "kind": NAMES[kind], "verbs": verbs}
        for kind in KINDS[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


def _merge(into: dict[str, Any], patch: dict[str, Any]) -> None:
    for name, value in patch.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


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
