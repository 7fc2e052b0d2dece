"""What Kubernetes' controllers and its scheduler do with the objects: pods made, placed, replaced.

Decisions only: `reconcile` reads and writes the API's objects, again and again, and starts nothing.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from tests.support.kubelet.admission import Admission
from tests.support.kubelet.api import KubeApi, Object
from tests.support.kubelet.manifests import is_ready, part, quantity, requests, template_hash

HASH = "pod-template-hash"
GROUPS = "leaderworkerset.sigs.k8s.io"
REVISION = "deployment.kubernetes.io/revision"


class Controllers:
    """Deployments with their ReplicaSets, StatefulSets, LeaderWorkerSets, and the scheduler."""

    def __init__(self, api: KubeApi, admission: Admission) -> None:
        self._api = api
        self._admission = admission
        self.refused: dict[str, str] = {}
        """Pods that were not admitted, and why."""
        self._numbers = itertools.count(1)

    def reconcile(self) -> None:
        """Take one step from what there is towards what is wanted."""
        with self._api.lock:
            for each in self._api.listed("deployments"):
                self._deployment(each)
            for each in self._api.listed("replicasets"):
                self._replica_set(each)
            for each in self._api.listed("statefulsets"):
                self._stateful_set(each)
            for each in self._api.listed("leaderworkersets"):
                self._leader_worker_set(each)
            for kind in ("replicasets", "pods"):
                for each in self._api.listed(kind):
                    self._collect(kind, each)
            self._schedule()

    def evict(self, name: str) -> bool:
        """Delete a pod unless a PodDisruptionBudget forbids it; return whether it was."""
        with self._api.lock:
            pod = self._api.get("pods", name)
            if pod is None:
                return True
            labels = pod["metadata"].get("labels", {})
            for budget in self._api.listed("poddisruptionbudgets"):
                selected = budget["spec"]["selector"]["matchLabels"]
                if selected.items() <= labels.items() and not self._may_go(budget, selected, pod):
                    return False
            self._api.delete("pods", name)
            return True

    def _may_go(self, budget: Object, selected: dict[str, str], pod: Object) -> bool:
        pods = self._api.listed("pods", selected)
        expected = sum(
            owner["spec"].get("replicas", 1)
            for kind in ("deployments", "statefulsets")
            for owner in self._api.listed(kind)
            if selected.items() <= owner["spec"]["template"]["metadata"]["labels"].items()
        ) + sum(
            owner["spec"].get("replicas", 1) * owner["spec"]["leaderWorkerTemplate"]["size"]
            for owner in self._api.listed("leaderworkersets")
            if selected.items() <= owner["metadata"].get("labels", {}).items()
        )
        spec = budget["spec"]
        if "minAvailable" in spec:
            needed = part(spec["minAvailable"], expected, up=True)
        else:
            needed = expected - part(spec["maxUnavailable"], expected, up=True)
        healthy = sum(is_ready(each) for each in pods)
        return not is_ready(pod) or healthy > needed

    # -- Deployments

    def _deployment(self, deployment: Object) -> None:
        spec = deployment["spec"]
        wanted = spec.get("replicas", 1)
        new, old = self._replica_sets(deployment)
        pods = {each["metadata"]["name"]: self._pods_of("ReplicaSet", each) for each in [new, *old]}
        ready = {name: sum(map(is_ready, those)) for name, those in pods.items()}
        strategy = spec.get("strategy", {})
        if strategy.get("type") == "Recreate":
            for each in old:
                each["spec"]["replicas"] = 0
            if not any(pods[each["metadata"]["name"]] for each in old):
                new["spec"]["replicas"] = wanted
            return
        limits = strategy.get("rollingUpdate") or {}
        surge = part(limits.get("maxSurge", "25%"), wanted, up=True)
        missing = part(limits.get("maxUnavailable", "25%"), wanted, up=False)
        if not surge and not missing:
            missing = 1
        available = sum(ready.values())
        total = sum(each["spec"]["replicas"] for each in [new, *old])
        if (room := wanted + surge - total) > 0 or new["spec"]["replicas"] > wanted:
            new["spec"]["replicas"] = min(wanted, new["spec"]["replicas"] + max(0, room))
        else:
            starting = new["spec"]["replicas"] - ready[new["metadata"]["name"]]
            useless = max(0, total - starting - (wanted - missing))
            for each in old:  # what is not ready serves nobody
                gone = min(useless, each["spec"]["replicas"] - ready[each["metadata"]["name"]])
                each["spec"]["replicas"] -= gone
                useless -= gone
            spare = max(0, available - (wanted - missing))
            for each in old:
                gone = min(spare, each["spec"]["replicas"])
                each["spec"]["replicas"] -= gone
                spare -= gone
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": sum(map(len, pods.values())),
            "updatedReplicas": len(pods[new["metadata"]["name"]]),
            "readyReplicas": available,
            "availableReplicas": available,
        }
        limit = spec.get("revisionHistoryLimit", 10)
        idle = [
            each
            for each in old
            if not each["spec"]["replicas"] and not pods[each["metadata"]["name"]]
        ]
        for each in idle[: max(0, len(idle) - limit)]:
            self._api.remove("replicasets", each["metadata"]["name"])

    def _replica_sets(self, deployment: Object) -> tuple[Object, list[Object]]:
        """Return the ReplicaSet of the template as it is, and those of older ones."""
        name, template = deployment["metadata"]["name"], deployment["spec"]["template"]
        owned = [s for s in self._api.listed("replicasets") if _owner(s) == ("Deployment", name)]
        revision = max((int(s["metadata"]["annotations"][REVISION]) for s in owned), default=0)
        code = template_hash(template)
        [new, *_] = [s for s in owned if s["metadata"]["labels"][HASH] == code] or [None]
        if new is None:
            made = copy.deepcopy(template)
            made["metadata"].setdefault("labels", {})[HASH] = code
            new = self._api.put(
                "replicasets",
                {
                    "kind": "ReplicaSet",
                    "apiVersion": "apps/v1",
                    "metadata": {
                        "name": f"{name}-{code}",
                        "labels": made["metadata"]["labels"],
                        "annotations": {REVISION: str(revision + 1)},
                        "ownerReferences": [{"kind": "Deployment", "name": name}],
                    },
                    "spec": {"replicas": 0, "template": made},
                },
            )
        elif int(new["metadata"]["annotations"][REVISION]) < revision:  # gone back to
            new["metadata"]["annotations"][REVISION] = str(revision + 1)
        deployment["metadata"].setdefault("annotations", {})[REVISION] = new["metadata"][
            "annotations"
        ][REVISION]
        old = [s for s in owned if s is not new]
        return new, sorted(old, key=lambda s: int(s["metadata"]["annotations"][REVISION]))

    def _replica_set(self, owner: Object) -> None:
        pods = self._pods_of("ReplicaSet", owner)
        excess = len(pods) - owner["spec"]["replicas"]
        for _ in range(-excess):
            name = f"{owner['metadata']['name']}-{next(self._numbers):05d}"
            self._make("ReplicaSet", owner, name, owner["spec"]["template"])
        first = sorted(pods, key=lambda pod: ("nodeName" in pod["spec"], is_ready(pod)))
        for pod in first[: max(0, excess)]:
            self._api.delete("pods", pod["metadata"]["name"])

    # -- StatefulSets

    def _stateful_set(self, owner: Object) -> None:
        spec, own = owner["spec"], owner["metadata"]["name"]
        wanted, code = spec.get("replicas", 1), template_hash(spec["template"])
        in_order = spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        pods = {
            each["metadata"]["name"]: each
            for each in self._api.listed("pods")
            if _owner(each) == ("StatefulSet", own)
        }
        named = [f"{own}-{number}" for number in range(wanted)]
        status = {
            "observedGeneration": owner["metadata"]["generation"],
            "replicas": len(pods),
            "readyReplicas": sum(is_ready(each) for each in pods.values()),
            "updatedReplicas": sum(_revision(each) == code for each in pods.values()),
        }
        owner["status"] = status
        for name in named:
            if name not in pods:
                self._make_stateful(owner, name, code)
            if in_order and not is_ready(pods.get(name)):
                return
        for name in sorted(set(pods) - set(named), key=_ordinal, reverse=True):
            self._api.delete("pods", name)
            if in_order:
                return
        strategy = spec.get("updateStrategy", {})
        first = (strategy.get("rollingUpdate") or {}).get("partition", 0)
        if strategy.get("type") == "OnDelete":
            return
        for name in reversed(named[first:]):
            pod = pods.get(name)
            if pod and _revision(pod) != code and "deletionTimestamp" not in pod["metadata"]:
                self._api.delete("pods", name)
                return
            if not is_ready(pod):
                return

    def _make_stateful(self, owner: Object, name: str, code: str) -> None:
        spec = owner["spec"]
        template = copy.deepcopy(spec["template"])
        template["metadata"].setdefault("labels", {})["controller-revision-hash"] = code
        template["spec"] |= {"hostname": name, "subdomain": spec.get("serviceName", "")}
        for claim in spec.get("volumeClaimTemplates", []):
            claimed = claim["metadata"]["name"]
            volume = {"name": claimed, "persistentVolumeClaim": {"claimName": f"{claimed}-{name}"}}
            template["spec"].setdefault("volumes", []).append(volume)
        self._make("StatefulSet", owner, name, template)

    # -- LeaderWorkerSets

    def _leader_worker_set(self, owner: Object) -> None:
        """Keep groups of a leader and its workers: one that loses a pod, or has a container started
        again, is made anew as a whole; an update goes from group to group.
        """
        spec, own = owner["spec"], owner["metadata"]["name"]
        wanted, template = spec.get("replicas", 1), spec["leaderWorkerTemplate"]
        code, size = template_hash(template), template["size"]
        groups: dict[int, dict[int, Object]] = {}
        for pod in self._api.listed("pods"):
            if _owner(pod) == ("LeaderWorkerSet", own):
                labels = pod["metadata"]["labels"]
                group = groups.setdefault(int(labels[f"{GROUPS}/group-index"]), {})
                group[int(labels[f"{GROUPS}/worker-index"])] = pod
        for group in groups.values():
            leader = group.get(0)
            if leader is None or (not _is_ending(leader) and not _is_whole(group, size)):
                for pod in group.values():
                    self._api.delete("pods", pod["metadata"]["name"])
        current = {at for at, group in groups.items() if _revision(group.get(0)) == code}
        ready = {at for at, group in groups.items() if _is_group_ready(group, size)}
        owner["status"] = {
            "observedGeneration": owner["metadata"]["generation"],
            "replicas": len(groups),
            "readyReplicas": len(ready),
            "updatedReplicas": len(current),
        }
        limits = spec.get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
        old = sorted(at for at in groups if at not in current and at < wanted)
        number = wanted + (part(limits.get("maxSurge", 0), wanted, up=True) if old else 0)
        for at in range(number):
            if at not in groups:
                for worker in range(size):
                    self._make_of_group(owner, at, worker, code)
        least = wanted - part(limits.get("maxUnavailable", 1), wanted, up=False)
        gone = [at for at in groups if at >= number]
        gone += [at for at in reversed(old) if at not in ready or len(ready) > least][:1]
        for at in gone:  # its workers go when the leader has gone
            if 0 in groups[at]:
                self._api.delete("pods", f"{own}-{at}")

    def _make_of_group(self, owner: Object, at: int, worker: int, code: str) -> None:
        own, spec = owner["metadata"]["name"], owner["spec"]["leaderWorkerTemplate"]
        kind = "workerTemplate" if worker else "leaderTemplate"
        template = copy.deepcopy(spec.get(kind, spec["workerTemplate"]))
        name = f"{own}-{at}-{worker}" if worker else f"{own}-{at}"
        template["metadata"].setdefault("labels", {}).update(
            {
                f"{GROUPS}/name": own,
                f"{GROUPS}/group-index": str(at),
                f"{GROUPS}/worker-index": str(worker),
                "controller-revision-hash": code,
            }
        )
        template["spec"] |= {"hostname": name, "subdomain": own}
        given = {
            "LWS_LEADER_ADDRESS": f"{own}-{at}.{own}.{owner['metadata']['namespace']}",
            "LWS_GROUP_SIZE": str(spec["size"]),
            "LWS_WORKER_INDEX": str(worker),
        }
        variables = [{"name": each, "value": value} for each, value in given.items()]
        for kind in ("initContainers", "containers"):
            for container in template["spec"].get(kind, []):
                container["env"] = [*variables, *container.get("env", [])]
        self._make("LeaderWorkerSet", owner, name, template)

    # -- what they share

    def _make(self, kind: str, owner: Object, name: str, template: Object) -> None:
        made = copy.deepcopy(template)
        if why := self._admission.refusal(made, self._api.listed("pods")):
            self.refused[name] = why  # it is tried again
            return
        self.refused.pop(name, None)
        self._api.put(
            "pods",
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {
                    **made["metadata"],
                    "name": name,
                    "ownerReferences": [{"kind": kind, "name": owner["metadata"]["name"]}],
                },
                "spec": made["spec"],
                "status": {"phase": "Pending"},
            },
        )

    def _pods_of(self, kind: str, owner: Object) -> list[Object]:
        """Return the pods of an owner that are not about to end."""
        wanted = kind, owner["metadata"]["name"]
        return [
            each
            for each in self._api.listed("pods")
            if _owner(each) == wanted and "deletionTimestamp" not in each["metadata"]
        ]

    def _collect(self, kind: str, value: Object) -> None:
        """Delete what belongs to an object that is gone."""
        owner, name = _owner(value), value["metadata"]["name"]
        if owner is None or self._api.get(f"{owner[0].lower()}s", owner[1]) is not None:
            return
        if kind == "replicasets" or "deletionTimestamp" not in value["metadata"]:
            self._api.delete(kind, name)

    def _schedule(self) -> None:
        """Give each pod without a node one that has what it asks for."""
        pods = self._api.listed("pods")
        for pod in pods:
            if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
                continue
            wanted, selected = requests(pod), pod["spec"].get("nodeSelector", {})
            fitting = []
            for node in self._api.listed("nodes", selected):
                own = [each for each in pods if each["spec"].get("nodeName") == _name(node)]
                if (
                    not node["spec"].get("unschedulable")
                    and _is_tolerated(node, pod)
                    and _fits(node, own, wanted)
                    and not _keeps_apart(pod, own)
                ):
                    fitting.append((-_liking(pod, own), len(own), _name(node)))
            if fitting:
                pod["spec"]["nodeName"] = min(fitting)[-1]


def _fits(node: Object, pods: list[Object], wanted: dict[str, float]) -> bool:
    there = {name: quantity(value) for name, value in node["status"]["allocatable"].items()}
    for each in pods:
        for name, value in requests(each).items():
            there[name] = there.get(name, 0) - value
    return all(there.get(name, 0) >= value for name, value in wanted.items())


def _is_tolerated(node: Object, pod: Object) -> bool:
    """Whether a pod may go to a node with these taints."""
    tolerations = pod["spec"].get("tolerations", [])
    return all(
        any(
            each.get("key") in (None, taint["key"])
            and each.get("effect") in (None, taint["effect"])
            and (each.get("operator") == "Exists" or each.get("value") == taint.get("value"))
            for each in tolerations
        )
        for taint in node["spec"].get("taints", [])
        if taint["effect"] != "PreferNoSchedule"
    )


def _is_meant(term: Object, pods: list[Object]) -> bool:
    """Whether a term of affinity selects one of the pods of a node."""
    assert term["topologyKey"] == "kubernetes.io/hostname", "nodes are the only places"
    wanted = term["labelSelector"]["matchLabels"].items()
    return any(wanted <= each["metadata"].get("labels", {}).items() for each in pods)


def _keeps_apart(pod: Object, pods: list[Object]) -> bool:
    """Whether a pod must not be where these are."""
    apart = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
    terms = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    return any(_is_meant(term, pods) for term in terms)


def _liking(pod: Object, pods: list[Object]) -> int:
    """Return the weight with which a pod wants to be where these are."""
    near = pod["spec"].get("affinity", {}).get("podAffinity", {})
    terms = near.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    return sum(each["weight"] for each in terms if _is_meant(each["podAffinityTerm"], pods))


def _name(value: Object) -> str:
    return str(value["metadata"]["name"])


def _owner(value: Object) -> tuple[str, str] | None:
    for owner in value["metadata"].get("ownerReferences", []):
        return owner["kind"], owner["name"]
    return None


def _revision(pod: Object | None) -> Any:
    return pod and pod["metadata"]["labels"].get("controller-revision-hash")


def _is_ending(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_whole(group: dict[int, Object], size: int) -> bool:
    """Whether all pods of a group are there, and no container was started again."""
    containers = [c for p in group.values() for c in p["status"].get("containerStatuses", [])]
    return (
        len(group) == size
        and not any(map(_is_ending, group.values()))
        and not any(each["restartCount"] for each in containers)
    )


def _is_group_ready(group: dict[int, Object], size: int) -> bool:
    return len(group) == size and all(map(is_ready, group.values()))


def _ordinal(name: str) -> int:
    return int(name.rpartition("-")[2])
