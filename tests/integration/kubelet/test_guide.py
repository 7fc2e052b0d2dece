"""The operator's guide, followed on the small kubelet under load: its steps work, and no accepted
request is lost. The other release, to which it updates and from which it goes back, is the commit
before this one.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from mooncake.base.messages import OWN_RELEASE, Release
from tests.support.kubelet import network
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.served import (
    FORMER_IMAGE,
    GATEWAY,
    IMAGE,
    RELEASE,
    TOP,
    Answer,
    Refused,
    cluster_in,
    image,
    streamed,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(network.why_not() != "", reason=network.why_not()),
    pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed"),
]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 10
NUM_TOKENS = 120
PAUSE_S = 0.5
"""Between two requests of a client: the machine has other things to do, too."""
ROLES = ("head", "gateway", "prefill", "decode", "kvstore")


class Load:
    """Two clients that ask again and again; `wrong` is what they got that is not the answer."""

    def __init__(self, url: str, expected: list[int]) -> None:
        self.wrong: list[str] = []
        self.num_refused = 0
        self.gaps_s: list[float] = []
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
        while not self._stop.wait(PAUSE_S):
            try:
                answer = streamed(self._url, PROMPT, NUM_TOKENS)
            except Refused:
                self.num_refused += 1
                continue
            except (ValueError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
            else:
                if answer.tokens != self._expected:
                    self.wrong.append(str(answer.tokens))
                self.gaps_s += [after - before for before, after in pairwise(answer.times_s)]
            self._answered.release()


@contextmanager
def asked(
    cluster: Cluster, what: str, expected: Answer, *, may_refuse: bool = False
) -> Iterator[None]:
    """Have clients ask the Service meanwhile; all their answers must be right. `may_refuse`: it may
    also say that nobody can serve now.
    """
    begun_s = time.monotonic()
    load = Load(cluster.url(GATEWAY), expected.tokens)
    try:
        load.wait_for(1)
        yield
        load.wait_for(2)
    finally:
        load.close()
    gaps_s = sorted(load.gaps_s)
    print(
        f"{what}: {time.monotonic() - begun_s:.0f} s, {len(gaps_s)} gaps, p99 "
        f"{gaps_s[len(gaps_s) * 99 // 100]:.3f} s, longest {gaps_s[-1]:.3f} s, "
        f"{load.num_refused} refused"
    )
    assert load.wrong == []
    assert may_refuse or not load.num_refused


def assert_ports_are_as_declared(cluster: Cluster) -> None:
    """Each pod listens on the ports that its container names, and beyond loopback on no port that
    its role's network policy does not open to this release.
    """
    policies = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each
        for each in cluster.api.listed("networkpolicies")
    }
    assert set(policies) == set(ROLES)
    for role in ROLES:
        pods = cluster.ready(role)
        assert pods, role
        inside, *_ = policies[role]["spec"]["ingress"]
        opened = {
            number
            for port in inside["ports"]
            for number in range(port["port"], port.get("endPort", port["port"]) + 1)
        }
        for pod in pods:
            name = pod["metadata"]["name"]
            init = cluster.pods[name].first_process(role)
            assert init is not None, name
            listening = network.listening(init)
            named = {each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
            assert named <= listening, name
            assert listening <= opened, name


def num_restarts(cluster: Cluster) -> dict[str, int]:
    """Return how often containers of the present pods were started again, of those that were."""
    pods = [pod for role in ROLES for pod in cluster.ready(role)]
    counts = {p["metadata"]["name"]: p["status"]["containerStatuses"][0] for p in pods}
    return {name: each["restartCount"] for name, each in counts.items() if each["restartCount"]}


def commands() -> dict[str, list[list[str]]]:
    """Return the commands of each section of the operator's guide."""
    found: dict[str, list[list[str]]] = {}
    section = ""
    for line in (TOP / "docs" / "kubernetes.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("    "):
            found.setdefault(section, []).append(shlex.split(line))
    return found


class Operator:
    """Follows the guide, section after section."""

    def __init__(self, cluster: Cluster, words: dict[str, str]) -> None:
        self.cluster = cluster
        self.words = words
        self.left = commands()

    def follow(self, section: str) -> dict[str, bool]:
        """Run a section's commands and wait; return which roles have another pod afterwards."""
        before = self._uids()
        for tool, *words in self.left.pop(section):
            if words[0] == "test":
                self.cluster.wait_until_rolled_out()
            getattr(self.cluster, tool)(*[self._given(word) for word in words])
        self.cluster.wait_until_rolled_out()
        after = self._uids()
        return {role: after[role] != before[role] for role in ROLES}

    def _uids(self) -> dict[str, set[str]]:
        ready = {role: self.cluster.ready(role) for role in ROLES}
        return {role: {pod["metadata"]["uid"] for pod in pods} for role, pods in ready.items()}

    def _given(self, word: str) -> str:
        for name, value in self.words.items():
            word = re.sub(rf"(?<![\w/-]){name}(?![\w.])", value, word)
        return word


def former_release(folder: Path) -> Path:
    """Return where the package and the chart of the commit before this one are; of this one, where
    the two speak no common version of the protocol: then no update is a rolling one.
    """
    folder.mkdir()
    words = ["git", "-C", str(TOP), "archive", "HEAD~1", "mooncake", "kernels", "charts"]
    archive = subprocess.run(words, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], check=True, cwd=folder, input=archive.stdout)
    source = (folder / "mooncake" / "base" / "messages.py").read_text()
    said = dict(re.findall(r"^(\w*PROTOCOL_VERSION) = (\d+)$", source, re.MULTILINE))
    version = int(said["PROTOCOL_VERSION"])
    oldest = int(said.get("OLDEST_PROTOCOL_VERSION", version))
    return folder if OWN_RELEASE.speaks_with(Release("former", version, oldest)) else TOP


def test_the_operators_guide_holds_under_load(tmp_path: Path) -> None:
    former = former_release(tmp_path / "former")
    images = {IMAGE: image(), FORMER_IMAGE: image(former)}
    with cluster_in(tmp_path, images, nodes=2) as cluster:
        words = {"VALUES.yaml": f"{tmp_path}/values.yaml", "NAME": RELEASE, "TAG": "former"}
        words["charts/mooncake"] = str(TOP / "charts" / "mooncake")
        operator = Operator(cluster, words)
        operator.follow("Install")
        assert_ports_are_as_declared(cluster)
        own_file = tmp_path / "claims" / f"ssd-0-{RELEASE}-mooncake-kvstore-0"
        assert list(own_file.iterdir()), "the pool's files lie on its claim"
        expected = streamed(cluster.url(GATEWAY), PROMPT, NUM_TOKENS)
        words["charts/mooncake"] = str(former / "charts" / "mooncake")
        with asked(cluster, "upgrade", expected):
            changed = operator.follow("Upgrade")
        assert changed == {role: role != "head" for role in ROLES}
        with asked(cluster, "rollback", expected):
            changed = operator.follow("Rollback")
        assert changed == {role: role != "head" for role in ROLES}
        assert_ports_are_as_declared(cluster)
        words["charts/mooncake"] = str(TOP / "charts" / "mooncake")
        with asked(cluster, "grow, shrink, replace a disk", expected):
            operator.follow("Grow and shrink")
            assert operator.follow("Replace a disk")["kvstore"]
        [head] = cluster.ready("head")
        [words["NODE"]] = {"node-0", "node-1"} - {head["spec"]["nodeName"]}
        with asked(cluster, "drain", expected, may_refuse=True):
            operator.follow("Empty a node, lose a node")
        assert num_restarts(cluster) == {}
        assert operator.left == {}
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")
        assert not [each for each in cluster.ended if each.killed or each.code]
