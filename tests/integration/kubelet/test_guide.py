"""The operator's guide, followed on the small kubelet: its steps work, and lose no request."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.kubelet import network
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.served import GATEWAY, RELEASE, TOP, Refused, cluster_in, streamed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(network.why_not() != "", reason=network.why_not()),
    pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed"),
]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 10
NUM_TOKENS = 60
ROLES = ("head", "gateway", "prefill", "decode", "kvstore")


class Load:
    """Two clients that ask again and again; `wrong` is what they got that is not the answer."""

    def __init__(self, url: str, expected: list[int]) -> None:
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self._url = url
        self._expected = expected
        self._answered = threading.Semaphore(0)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._asking = [self._pool.submit(self._ask) for _ in range(2)]

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._answered.acquire(timeout=120), self.wrong

    def close(self) -> None:
        self._stop.set()
        for asking in self._asking:
            asking.result(120)
        self._pool.shutdown()

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                tokens = streamed(self._url, PROMPT, NUM_TOKENS)
                if tokens != self._expected:
                    self.wrong.append(str(tokens))
            except Refused as refusal:
                self.refused.append(str(refusal))
                self._stop.wait(0.5)
                continue
            except (ValueError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
            self._answered.release()


@contextmanager
def asked(cluster: Cluster, *, may_refuse: bool = False) -> Iterator[Load]:
    """Have clients ask the Service meanwhile; all their answers must be right. `may_refuse`: it may
    also say that nobody can serve now.
    """
    url = cluster.url(GATEWAY)
    load = Load(url, streamed(url, PROMPT, NUM_TOKENS))
    try:
        load.wait_for(2)
        yield load
        load.wait_for(4)
    finally:
        load.close()
    assert load.wrong == []
    assert may_refuse or load.refused == []


def listening(cluster: Cluster, role: str) -> set[int]:
    """Return the ports beyond loopback on which a pod listens."""
    [pod] = cluster.ready(role)
    init = cluster.pods[pod["metadata"]["name"]].first_process(role)
    words = ["nsenter", f"--target={init}", "--net", "ss", "-Hltn"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines]
    return {int(port) for host, _, port in places if not host.startswith(("127.", "[::1]"))}


def uids(cluster: Cluster) -> dict[str, str]:
    """Return the one ready pod of each role."""
    return {role: cluster.ready(role)[0]["metadata"]["uid"] for role in ROLES}


def declared(cluster: Cluster, role: str) -> set[int]:
    [pod] = cluster.ready(role)
    return {p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}


def commands() -> dict[str, list[list[str]]]:
    """Return the commands of each section of the operator's guide."""
    found: dict[str, list[list[str]]] = {}
    for line in (TOP / "docs" / "kubernetes.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("    "):
            found.setdefault(section, []).append(shlex.split(line))
    return found


class Operator:
    """Follows the guide, section after section."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._words = {
            "NAME": RELEASE, "charts/mooncake": str(TOP / "charts" / "mooncake"),
            "VALUES.yaml": str(folder / "values.yaml"), "NODE": "",
        }  # fmt: skip
        self._left = commands()

    def follow(self, section: str, node: str = "") -> dict[str, bool]:
        """Run a section's commands and wait; return which roles have another pod afterwards."""
        before = uids(self.cluster) if section != "Install" else {}
        self._words["NODE"] = node
        for tool, *words in self._left.pop(section):
            own = [self._given(word) for word in words]
            getattr(self.cluster, tool)(*own)
            if tool == "helm":
                self.cluster.wait_until_rolled_out()
        self.cluster.wait_until_rolled_out()
        after = uids(self.cluster)
        return {role: after[role] != before.get(role) for role in ROLES}

    def _given(self, word: str) -> str:
        if word in self._words:
            return self._words[word]
        return re.sub(r"NAME(?=-)", RELEASE, word)

    @property
    def is_done(self) -> bool:
        return not self._left


def test_the_operators_guide_holds_under_load(tmp_path: Path) -> None:
    with cluster_in(tmp_path, nodes=2) as cluster:
        operator = Operator(cluster, tmp_path)
        operator.follow("Install")
        for role in ROLES:
            assert declared(cluster, role) <= listening(cluster, role), role
        own_file = tmp_path / "claims" / f"ssd-0-{RELEASE}-mooncake-kvstore-0"
        assert list(own_file.iterdir()), "the pool's files lie on its claim"
        with asked(cluster):
            changed = operator.follow("Upgrade")
            assert changed == {role: role == "decode" for role in ROLES}
            changed = operator.follow("Rollback")
            assert changed == {role: role == "decode" for role in ROLES}
            operator.follow("Grow and shrink")
            assert operator.follow("Replace a disk")["kvstore"]
        [head] = cluster.ready("head")
        [node] = {"node-0", "node-1"} - {head["spec"]["nodeName"]}
        with asked(cluster, may_refuse=True):  # of each role there is one pod, and it goes
            operator.follow("Empty a node, lose a node", node)
        assert operator.is_done
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")
        assert not [each for each in cluster.ended if each.killed or each.code]
