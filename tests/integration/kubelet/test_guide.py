"""The installation of the operator's guide, on the small kubelet."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.kubelet import network
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.served import GATEWAY, RELEASE, TOP, cluster_in, streamed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(network.why_not() != "", reason=network.why_not()),
    pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed"),
]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 10
NUM_TOKENS = 60
ROLES = ("head", "gateway", "prefill", "decode", "kvstore")


def listening(cluster: Cluster, role: str) -> set[int]:
    """Return the ports beyond loopback on which a pod listens."""
    [pod] = cluster.ready(role)
    init = cluster.pods[pod["metadata"]["name"]].first_process(role)
    words = ["nsenter", f"--target={init}", "--net", "ss", "-Hltn"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines]
    return {int(port) for host, _, port in places if not host.startswith(("127.", "[::1]"))}


def declared(cluster: Cluster, role: str) -> set[int]:
    [pod] = cluster.ready(role)
    return {p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}


def installing(folder: Path) -> list[str]:
    """Return the words of the guide's command of installation, with what they stand for here."""
    guide = (TOP / "docs" / "kubernetes.md").read_text()
    [command] = re.findall(r"^    (helm install .*)$", guide, re.MULTILINE)
    given = {
        "NAME": RELEASE, "charts/mooncake": str(TOP / "charts" / "mooncake"),
        "VALUES.yaml": str(folder / "values.yaml"),
    }  # fmt: skip
    return [given.get(word, word) for word in shlex.split(command)[1:]]


def test_the_guides_installation_comes_up_and_answers(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster:
        cluster.helm(*installing(tmp_path))
        cluster.wait_until_rolled_out()
        for role in ROLES:
            assert declared(cluster, role) <= listening(cluster, role), role
        assert len(streamed(cluster.url(GATEWAY), PROMPT, NUM_TOKENS)) == NUM_TOKENS
        own_file = tmp_path / "claims" / f"ssd-0-{RELEASE}-mooncake-kvstore-0"
        assert list(own_file.iterdir()), "the pool's files lie on its claim"
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")
