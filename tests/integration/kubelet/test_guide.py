"""The operator's guide, followed on the small kubelet under load: its steps work, and no accepted
request is lost. The other release, to which it updates and from which it goes back, is the commit
before this one.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path

import httpx
import pytest
import yaml

from mooncake.base.rights import CredentialRole
from mooncake.cli.main import run as run_command
from mooncake.identity.credential import cluster_keys, own_credential
from tests.support.certificates import Host, make_host
from tests.support.former_release import former_release
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
from tests.support.waiting import LONG_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(network.why_not() != "", reason=network.why_not()),
    pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed"),
]

PROMPTS = [f"{n} quick brown foxes jump over the lazy dog. " * 10 for n in range(2, 6)]
NUM_TOKENS = 40
PAUSE_S = 1.0
"""Between two requests of a client: the machine has other things to do, too."""
ROTATE = "Step by step"
GUIDE = ("kubernetes.md", "kubernetes-secrets.md")
HOST = "api.example"
"""The name that clients know the API by, in its certificate."""
COUNTS = "has been read again and is used now"
ROLES = ("gateway", "prefill", "decode", "kvstore")


class Load:
    """Two clients that ask one prompt after another; `wrong` is what they got that is not the
    answer.
    """

    def __init__(self, request: Callable[[str], Answer], expected: Mapping[str, list[int]]) -> None:
        self.wrong: list[str] = []
        self.num_refused = 0
        self._num_answered = 0
        self.answers: list[Answer] = []
        self._request = request
        self._expected = expected
        self._answered = threading.Condition()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        half = len(PROMPTS) // 2
        self._asking = [self._pool.submit(self._ask, first) for first in (0, half)]

    def wait_for(self, count: int) -> None:
        """Wait for so many more answers."""
        with self._answered:
            wanted = self._num_answered + count
            came = self._answered.wait_for(lambda: self._num_answered >= wanted, LONG_S)
        assert came, self.wrong

    def close(self) -> None:
        self._stop.set()
        with self._pool:
            for asking in self._asking:
                asking.result(LONG_S)

    def hit_rate(self, from_s: float, to_s: float) -> float:
        """Return which part of the prompts' tokens was cached, of answers that began then."""
        some = [each for each in self.answers if from_s <= each.begun_s < to_s]
        num_tokens = sum(each.num_prompt_tokens for each in some)
        return sum(each.num_cached_tokens for each in some) / max(num_tokens, 1)

    def _ask(self, number: int) -> None:
        while not self._stop.wait(PAUSE_S):
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                answer = self._request(prompt)
            except Refused:
                self.num_refused += 1
                continue
            except (ValueError, httpx.HTTPError) as error:
                self.wrong.append(repr(error))
            else:
                if answer.tokens != self._expected[prompt]:
                    self.wrong.append(str(answer.tokens))
                self.answers.append(answer)
            number += 1
            with self._answered:
                self._num_answered += 1
                self._answered.notify_all()


@contextmanager
def asked(
    what: str,
    request: Callable[[str], Answer],
    expected: Mapping[str, list[int]],
    *,
    may_refuse: bool = False,
) -> Iterator[Load]:
    """Have clients ask again and again meanwhile, and thrice each prompt afterwards; all answers
    must be those of before, and in the end as much of prompts is cached. `may_refuse`: it may also
    say that nobody can serve now.
    """
    load = Load(request, expected)
    try:
        load.wait_for(len(PROMPTS))
        begun_s = time.monotonic()
        yield load
        ended_s = time.monotonic()
        load.wait_for(3 * len(PROMPTS))
        settled_s = time.monotonic()
    finally:
        load.close()
    gaps_s = sorted(b - a for each in load.answers for a, b in pairwise(each.times_s))
    print(
        f"{what}: {ended_s - begun_s:.0f} s, {len(gaps_s)} gaps, p99 "
        f"{gaps_s[len(gaps_s) * 99 // 100]:.3f} s, longest {gaps_s[-1]:.3f} s, "
        f"{load.num_refused} refused; cached of prompts: before "
        f"{load.hit_rate(0, begun_s):.3f}, meanwhile {load.hit_rate(begun_s, ended_s):.3f}, in "
        f"the {settled_s - ended_s:.0f} s after it {load.hit_rate(ended_s, settled_s):.3f}"
    )
    assert load.wrong == []
    assert may_refuse or not load.num_refused
    last_s = min(each.begun_s for each in load.answers[-len(PROMPTS) :])
    assert load.hit_rate(last_s, settled_s) >= 0.95 * load.hit_rate(0, begun_s)


def assert_ports_are_as_declared(cluster: Cluster) -> None:
    """Each pod listens on the ports that its container names, and beyond loopback on no port that
    its role's network policy does not open to this release.
    """
    policies = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each
        for each in cluster.api.listed("networkpolicies")
    }
    assert set(policies) == {*ROLES, "signer"}
    for role in (*ROLES, "signer"):
        pods = cluster.present(role)
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
    names = [pod["metadata"]["name"] for role in ROLES for pod in cluster.present(role)]
    counts = {name: sum(cluster.num_restarts(name)) for name in names}
    return {name: count for name, count in counts.items() if count}


def commands() -> dict[str, list[list[str]]]:
    """Return the commands of each section of the operator's guide."""
    found: dict[str, list[list[str]]] = {}
    section = ""
    for line in "\n".join((TOP / "docs" / page).read_text() for page in GUIDE).splitlines():
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

    def follow(self, section: str, settled: Sequence[Callable[[], object]] = ()) -> dict[str, bool]:
        """Run a section's commands and wait; return which roles have another pod afterwards.
        `settled`: for each command what is done before the next one.
        """
        before = self._uids()
        for (tool, *words), settle in zip_longest(self.left.pop(section), settled):
            if words[0] == "test":
                self.cluster.wait_until_rolled_out()
            getattr(self.cluster, tool)(*[self._given(word) for word in words])
            if settle is not None:
                settle()
        self.cluster.wait_until_rolled_out()
        after = self._uids()
        return {role: after[role] != before[role] for role in ROLES}

    def _uids(self) -> dict[str, set[str]]:
        present = {role: self.cluster.present(role) for role in ROLES}
        return {role: {pod["metadata"]["uid"] for pod in pods} for role, pods in present.items()}

    def _given(self, word: str) -> str:
        for name, value in self.words.items():
            word = re.sub(rf"(?<![\w-]){name}(?![\w.])", value, word)
        return word


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
        request = partial(streamed, cluster.url(GATEWAY), num_tokens=NUM_TOKENS)
        expected = {prompt: request(prompt).tokens for prompt in PROMPTS}
        words["charts/mooncake"] = str(former / "charts" / "mooncake")
        with asked("upgrade", request, expected):
            changed = operator.follow("Upgrade")
        assert changed == dict.fromkeys(ROLES, True)
        with asked("rollback", request, expected):
            changed = operator.follow("Rollback")
        assert changed == dict.fromkeys(ROLES, True)
        assert_ports_are_as_declared(cluster)
        words["charts/mooncake"] = str(TOP / "charts" / "mooncake")
        with asked("grow, shrink, replace a disk", request, expected):
            operator.follow("Grow and shrink")
            assert operator.follow("Replace a disk")["kvstore"]
        [gateway] = cluster.present("gateway")
        words["NODE"] = gateway["spec"]["nodeName"]
        with asked("drain", request, expected, may_refuse=True):
            operator.follow("Empty a node, lose a node")
        assert num_restarts(cluster) == {}
        assert set(operator.left) == {ROTATE}
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")
        assert not [each for each in cluster.ended if each.killed or each.code]


def write_small(model: Path, folder: Path) -> None:
    """Write what pods without engines need of a checkpoint, which is no weights."""
    assert run_command(["model", "digests", str(model), "--out", str(folder)]) == 0
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def write_secret_file(file: Path, **changed: str) -> str:
    """Write what `kubectl patch secret` is given; returns its name."""
    file.write_text(yaml.safe_dump({"stringData": changed}))
    return str(file)


def keys_file(*keys: str) -> str:
    """Return a file of API keys of one tenant: blocks and answers are the same for all."""
    return yaml.safe_dump({"keys": [{"name": k, "key": k, "tenant": "one"} for k in keys]})


def certificate_of(host: Host) -> dict[str, bytes]:
    """Return the files of a Secret of type kubernetes.io/tls."""
    return {"tls.crt": Path(host.cert).read_bytes(), "tls.key": Path(host.key).read_bytes()}


def shown(url: str) -> str:
    """Return the certificate that whoever connects is shown."""
    address = httpx.URL(url)
    assert address.port is not None
    return ssl.get_server_certificate((address.host, address.port), timeout=LONG_S)


def assert_pods_signed_their_certificates(cluster: Cluster, authority: Host) -> None:
    """Health and admin ports show certificates of the authority for their pod."""
    trusted = authority.trusting(proven=True)
    trusted.set_alpn_protocols(["h2", "http/1.1"])
    shown_by: dict[str, set[str]] = {}
    for role in set(ROLES) - {"gateway"}:
        for pod in cluster.present(role):
            address = pod["status"]["podIP"]
            for port in pod["spec"]["containers"][0]["ports"]:
                place = address, port["containerPort"]
                with (
                    socket.create_connection(place, LONG_S) as plain,
                    trusted.wrap_socket(plain, server_hostname=address) as secure,
                ):
                    own = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
                shown_by.setdefault(own, set()).add(pod["metadata"]["name"])
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://{address}:{place[1]}/health/live", timeout=LONG_S)
    assert len(shown_by) == len(ROLES) - 1, "each pod has one of its own"


def test_https_serves_and_secrets_are_rotated_under_load(tmp_path: Path) -> None:
    outside, later, inside = (
        make_host(tmp_path / name, HOST) for name in ("outside", "later", "inside")
    )
    more = {
        "gateway": {"tlsSecret": "certificate", "allowKeyless": False},
        "tls": {"authority": "authority"},
        "secret": {"existing": "own", "signer": "signs", "apiKeys": True},
        "signer": {"renewSeconds": 5},
        "model": {"smallVolume": {"hostPath": {"path": f"{tmp_path}/small"}}},
    }
    with cluster_in(tmp_path, {IMAGE: image()}, nodes=2, more=more) as cluster:
        write_small(tmp_path / "models" / "k2-nano", tmp_path / "small" / "k2-nano")
        cluster.api.put_secret("signs", {"cluster-secret": b"old secret"})
        secrets: dict[str, bytes] = {}
        secrets |= {f"token-{role}": f"of {role}".ljust(40, "t").encode() for role in ROLES}
        cluster.api.put_secret("own", {**secrets, "keys.yaml": keys_file("sk-old").encode()})
        cluster.api.put_secret("certificate", certificate_of(outside))
        files = {"tls.crt": "ca.pem", "tls.key": "ca-key.pem"}
        authority = tmp_path / "inside" / "ca"
        signing = {key: (authority / name).read_bytes() for key, name in files.items()}
        cluster.api.put_secret("authority", signing)
        words = {"VALUES.yaml": f"{tmp_path}/values.yaml", "NAME": RELEASE}
        words |= {"SECRET": "own", "TLS-SECRET": "certificate", "SIGNER-SECRET": "signs"}
        words["charts/mooncake"] = str(TOP / "charts" / "mooncake")
        for name, changed in {
            "BOTH-KEYS": {"keys.yaml": keys_file("sk-old", "sk-new")},
            "NEW-KEYS": {"keys.yaml": keys_file("sk-new")},
            "CERTIFICATE": {k: v.decode() for k, v in certificate_of(later).items()},
            "OLD-NEW": {"cluster-secret": "old secret\nnew secret\n"},
            "NEW-OLD": {"cluster-secret": "new secret\nold secret\n"},
            "NEW": {"cluster-secret": "new secret\n"},
        }.items():
            words[f"{name}.yaml"] = write_secret_file(tmp_path / f"{name}.yaml", **changed)
        operator = Operator(cluster, words)
        operator.follow("Install")
        assert_ports_are_as_declared(cluster)
        assert_pods_signed_their_certificates(cluster, inside)
        said = {file.name: file.read_text() for file in (tmp_path / "logs").iterdir()}
        assert {file.partition(".")[0].split("-")[2] for file in said} == {*ROLES, "signer", "test"}
        assert not [name for name, text in said.items() if "may read or change" in text]

        url = cluster.url(GATEWAY, "https")
        ask = partial(streamed, url, num_tokens=NUM_TOKENS)
        first = outside.trusting()
        with pytest.raises(Refused, match="unable to get local issuer"):
            ask(PROMPTS[0], key="sk-old", name=HOST)
        with pytest.raises(Refused, match="Hostname mismatch"):
            ask(PROMPTS[0], key="sk-old", name="other.example", trusted=first)
        with pytest.raises(Refused, match="disconnected"):
            streamed(cluster.url(GATEWAY), PROMPTS[0], NUM_TOKENS, key="sk-old")
        with pytest.raises(ValueError, match="401"):
            ask(PROMPTS[0], name=HOST, trusted=first)
        with pytest.raises(ValueError, match="401"):
            ask(PROMPTS[0], key="sk-new", name=HOST, trusted=first)

        used = ["sk-old"]
        both = outside.trusting()
        both.load_verify_locations(later.ca)

        def request(prompt: str) -> Answer:
            return ask(prompt, key=used[-1], name=HOST, trusted=both)

        expected = {prompt: request(prompt).tokens for prompt in PROMPTS}

        def status(key: str) -> int:
            header = {"Authorization": f"Bearer {key}"}
            with httpx.Client(verify=both, headers=header, timeout=LONG_S) as client:
                return client.get(f"{url}/v1/models", extensions={"sni_hostname": HOST}).status_code

        def new_key_counts() -> None:
            cluster.wait_for(lambda: status("sk-new") == 200, "the new key")
            used.append("sk-new")
            load.wait_for(4)  # one of each client has then begun with it

        def certificate_counts() -> None:
            new = Path(later.cert).read_text()
            cluster.wait_for(lambda: shown(url).strip() == new.strip(), "the certificate")

        def num_read() -> dict[str, int]:
            return {
                role: (tmp_path / "logs" / f"{pod['metadata']['name']}.{role}.log")
                .read_text()
                .count(COUNTS)
                for role in ROLES
                for pod in cluster.present(role)
            }

        def secret_counts(*secrets: str) -> None:
            """Wait until each pod has a credential that trusts these, and its process has read one
            that is at least as new.
            """
            trusted = [cluster_keys(secret) for secret in secrets]

            def is_given() -> bool:
                given = [
                    own_credential(file.read_text().strip(), *CredentialRole).clusters
                    for role in ROLES
                    for pod in cluster.present(role)
                    for file in [cluster.volume(pod, "own") / "credential"]
                ]
                return all(list(clusters) == trusted for clusters in given)

            cluster.wait_for(is_given, f"credentials of {secrets}")
            before = num_read()

            def is_read() -> bool:
                # What was read next may still have been the one before.
                return all(count >= before[role] + 2 for role, count in num_read().items())

            cluster.wait_for(is_read, f"all processes to have read credentials of {secrets}")
            load.wait_for(2)

        with asked("secrets and certificates", request, expected) as load:
            changed_roles = operator.follow(
                ROTATE,
                [
                    new_key_counts,
                    lambda: cluster.wait_for(lambda: status("sk-old") == 401, "the old key's end"),
                    certificate_counts,
                    lambda: secret_counts("old secret", "new secret"),
                    lambda: secret_counts("new secret", "old secret"),
                    lambda: secret_counts("new secret"),
                ],
            )
        assert changed_roles == dict.fromkeys(ROLES, False), "no pod is replaced"
        [pod] = cluster.present("kvstore")  # who knows the new secret alone joins
        cluster.crash(pod["metadata"]["name"])
        cluster.wait_until_rolled_out()
        assert num_restarts(cluster) == {pod["metadata"]["name"]: 1}, "the one that was killed"
        with pytest.raises(Refused, match="unable to get local issuer"):
            ask(PROMPTS[0], key="sk-new", name=HOST, trusted=first)
        cluster.helm("uninstall", RELEASE)
        cluster.wait_for(lambda: not cluster.pods, "no pods")
        assert not [each for each in cluster.ended if each.killed or each.code]
