"""What fields of manifests mean: quantities, selectors, environment, ports. Values in and out."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tests.support.kubelet.api import KubeApi, Object

UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20,
         "Gi": 2**30, "Ti": 2**40}  # fmt: skip


class NotYet(Exception):
    """What a pod needs is not there: its containers wait."""


def quantity(value: object) -> float:
    """Return the number that "500m" or "2Gi" is."""
    found = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(value))
    assert found is not None, value
    return float(found[1]) * (UNITS[found[2]] if found[2] else 1)


def part(value: object, whole: int, *, up: bool) -> int:
    """Return the number of pods that `value`, a number or a percentage, is of `whole`."""
    if not str(value).endswith("%"):
        return int(str(value))
    exact = whole * float(str(value)[:-1]) / 100
    return math.ceil(exact) if up else math.floor(exact)


def template_hash(template: Object) -> str:
    """Return what tells pods of one template from those of another."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def requests(pod: Object) -> dict[str, float]:
    """Return what a node must have free for the pod."""
    wanted: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        for name, value in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            wanted[name] = wanted.get(name, 0) + quantity(value)
    return wanted


def condition(pod: Object, kind: str) -> bool:
    listed = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in listed)


def is_ready(pod: Object | None) -> bool:
    """Whether there is a pod, and a Service may send to it."""
    if pod is None or "deletionTimestamp" in pod["metadata"]:
        return False
    return condition(pod, "Ready")


def port_of(pod: Object, port: object) -> int:
    """Return the number of a port that is named or numbered."""
    if isinstance(port, int):
        return port
    return next(
        int(each["containerPort"])
        for container in pod["spec"]["containers"]
        for each in container.get("ports", [])
        if each.get("name") == port
    )


def data_of(api: KubeApi, kind: str, name: str, *, optional: bool) -> Mapping[str, bytes]:
    """Return the entries of a Secret or a ConfigMap.

    Raises:
        NotYet: there is none.
    """
    found = api.get(kind, name)
    if found is None:
        if optional:
            return {}
        raise NotYet(f"{kind} {name} is not there")
    read = base64.b64decode if kind == "secrets" else str.encode
    return {key: read(text) for key, text in found.get("data", {}).items()}


def environment(api: KubeApi, pod: Object, container: Object) -> dict[str, str]:
    """Return the variables that a container is started with.

    Raises:
        NotYet: a Secret or ConfigMap that is not optional is not there, or lacks the key.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for field, kind in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
            if field in source:
                ref = source[field]
                data = data_of(api, kind, ref["name"], optional=ref.get("optional", False))
                found |= {source.get("prefix", "") + k: v.decode() for k, v in data.items()}
    for variable in container.get("env", []):
        value = _value(api, pod, variable)
        if value is not None:
            found[variable["name"]] = expanded(value, found)
    return found


def _value(api: KubeApi, pod: Object, variable: Object) -> str | None:
    if "value" in variable:
        return str(variable["value"])
    [(source, ref)] = variable["valueFrom"].items()
    if source == "fieldRef":
        return field_of(pod, ref["fieldPath"])
    kind = {"secretKeyRef": "secrets", "configMapKeyRef": "configmaps"}[source]
    optional = ref.get("optional", False)
    data = data_of(api, kind, ref["name"], optional=optional)
    if ref["key"] not in data and not optional:
        raise NotYet(f"{kind} {ref['name']} has no {ref['key']}")
    return data[ref["key"]].decode() if ref["key"] in data else None


def field_of(pod: Object, path: str) -> str:
    """Return the field of a pod that the downward API names."""
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    value: Any = pod
    for name in path.split("."):
        value = value.get(name, {})
    return str(value or "")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with each $(NAME) that is known replaced."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
