"""Which pods a namespace admits: Pod Security's level "restricted", and a quota."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.support.kubelet.api import Object
from tests.support.kubelet.manifests import quantity, requests

RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip


@dataclass(frozen=True)
class Admission:
    restricted: bool
    quota: Mapping[str, object]
    """What all pods may request together, such as {"memory": "4Gi"}."""

    def refusal(self, pod: Object, others: Sequence[Object]) -> str:
        """Return why a pod may not be made beside the others; empty: it may."""
        if self.restricted and (found := violations(pod["spec"])):
            return f"not restricted: {', '.join(found)}"
        for name, most in self.quota.items():
            for container in containers(pod["spec"]):
                resources = container.get("resources", {})
                if name not in {**resources.get("limits", {}), **resources.get("requests", {})}:
                    return f"quota: {container['name']} must say how much {name} it wants"
            wanted = sum(requests(each).get(name, 0) for each in [pod, *others])
            if wanted > quantity(most):
                return f"quota: all would want {wanted:g} of {name}"
        return ""


def containers(spec: Object) -> Iterator[Object]:
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def violations(spec: Object) -> list[str]:
    """Return what Kubernetes' Pod Security level "restricted" refuses in a pod."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for volume in spec.get("volumes", []):
        [kind] = set(volume) - {"name"}
        found += [kind] * (kind not in RESTRICTED_VOLUMES)
    for each in containers(spec):
        context = {**spec.get("securityContext", {}), **each.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        kept = {
            "root": context.get("runAsNonRoot") is True and context.get("runAsUser") != 0,
            "escalation": context.get("allowPrivilegeEscalation") is False,
            "privileged": not context.get("privileged"),
            "capabilities": capabilities.get("drop") == ["ALL"]
            and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "seccomp": context.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "ports": not [port for port in each.get("ports", []) if port.get("hostPort")],
        }
        found += [f"{each['name']}: {what}" for what, holds in kept.items() if not holds]
    return found
