"""What NetworkPolicies let pods do, and the kernel's filters that hold them to it.

Values in, words of tc(8) out. A filter looks at the first packet of a connection of TCP, at the pod
that sends it and at the one that gets it; all else passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.support.kubelet.api import Object

ANY = "0.0.0.0/0"
SYN = "match u8 0x06 0xff at 9 match u8 0x02 0x12 at 33"
"""TCP in IPv4, SYN without ACK."""


@dataclass(frozen=True)
class Network:
    """What policies choose from: the pods with an address, Services, and the node's own address."""

    pods: Sequence[Object]
    services: Sequence[Object]
    policies: Sequence[Object]
    node: str

    def filters(self, pod: Object, link: str, sink: str) -> str:
        """Return the words for `tc -batch` that filter what passes a pod's `link`. What is refused
        goes to the device `sink`. Empty: no policy selects the pod.
        """
        sides = [
            # What leaves the link on the node's side comes to the pod.
            *self._side(pod, "Ingress", "from", f"dev {link} egress", "src", sink),
            *self._side(pod, "Egress", "to", f"dev {link} ingress", "dst", sink),
        ]
        return "\n".join([f"qdisc add dev {link} clsact", *sides]) if sides else ""

    def _side(
        self, pod: Object, kind: str, peers: str, where: str, end: str, sink: str
    ) -> Iterator[str]:
        policies = [
            each["spec"]
            for each in self.policies
            if kind in each["spec"]["policyTypes"] and _selects(each["spec"]["podSelector"], pod)
        ]
        if not policies:
            return
        if kind == "Ingress":  # probes come from the node
            words = f"match ip src {self.node}/32 flowid 1:1"
            yield f"filter add {where} prio 1 protocol ip u32 {words}"
        for rule in [rule for each in policies for rule in each.get(kind.lower(), [])]:
            for address in self._addresses(rule.get(peers) or []):
                for port in _ports(rule.get("ports") or []):
                    words = f"match ip {end} {address} {port} flowid 1:1"
                    yield f"filter add {where} prio 1 protocol ip u32 {words}"
        yield (
            f"filter add {where} prio 2 protocol ip u32 {SYN} flowid 1:1 "
            f"action mirred egress redirect dev {sink}"
        )

    def _addresses(self, peers: Sequence[Object]) -> list[str]:
        """Return whom these peers are. No pod is of another namespace."""
        if not peers:
            return [ANY]
        found = []
        for peer in peers:
            if "ipBlock" in peer:
                assert peer["ipBlock"].keys() == {"cidr"}
                found += [peer["ipBlock"]["cidr"]] * (":" not in peer["ipBlock"]["cidr"])
            elif "namespaceSelector" not in peer:
                chosen = peer["podSelector"]
                found += [f"{p['status']['podIP']}/32" for p in self.pods if _selects(chosen, p)]
                # A Service is a relay of the node, to pods that it selects.
                found += [
                    f"{each['spec']['clusterIP']}/32"
                    for each in self.services
                    if each["spec"].get("clusterIP", "None") != "None"
                    and _matches(chosen, each["spec"]["selector"])
                ]
        return found


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _selects(selector: Object, pod: Object) -> bool:
    return _matches(selector, pod["metadata"].get("labels", {}))


def _ports(ports: Sequence[Object]) -> Iterator[str]:
    """Yield what tc(8) calls these ports of TCP; nothing, where all are meant."""
    if not ports:
        yield ""
    for each in ports:
        if each.get("protocol", "TCP") == "TCP":
            first = int(each["port"])
            for port, mask in blocks(first, int(each.get("endPort", first))):
                yield f"match ip dport {port} {mask:#06x}"


def blocks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers from `first` to `last` as few blocks, each a number and a mask."""
    while first <= last:
        size = first & -first or 1 << 16
        while first + size - 1 > last:
            size //= 2
        yield first, 0xFFFF & -size
        first += size
