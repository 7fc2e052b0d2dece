"""Two hosts whose KV moves by RDMA from one to the other, by the commands of
docs/several-machines.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import ssl
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mooncake.launch.config.cluster_file import AUTHORITY
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.config.shipped import DEMO, checkpoint
from tests.rdma.host_nic import HostNic
from tests.rdma.stand_in import mooncake
from tests.support.engine.fake_runner import VOCAB_SIZE, expected_output
from tests.support.hosts import local_faults
from tests.support.hosts.described import FOLDER, DescribedCluster
from tests.support.hosts.hosts import SHARED, Host, Program, hosts
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import request
from tests.support.transfer.driving import EMULATED, WAIT_S
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not EMULATED, reason="makes RDMA devices: only on the machine 'make test-rdma' boots"
)
SETTINGS = {
    "require-transport": "rdma", "max-model-len": 1024, "num-gpu-blocks-override": 256,
    "max-num-batched-tokens": 64, "self-profile": False, "shutdown-timeout": 1,
}  # fmt: skip
TOKENIZER = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja")
NUM_PROMPT = 900
NUM_TOKENS = 12
NUM_TRIES = 5
MOVED = re.compile(r"^mooncake_transfer_bytes_total\{(.*)\} (\S+)$", re.MULTILINE)


class RdmaCluster(DescribedCluster):
    """Prefill and a gateway on the first host, decode and the pool on the second one."""

    def __init__(self, machines: Sequence[Host], nics: Sequence[HostNic], model: Path) -> None:
        self.first, self.second = machines
        self.near, self.far = nics
        self._num_asked = self._num_killed = 0
        limits = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
        self.layout = make_plan(resolve({"model": str(model), **limits}, None, {}), 2).layout
        super().__init__(machines, {
            "model": f"{SHARED}/{model.name}",
            "machines": {"a": {"gateway": 1, "prefill": 1}, "b": {"decode": 1, "kvstore": 1}},
            "settings": SETTINGS,
            "prefill": {"rdma-device": self.near.device},
            "decode": {"rdma-device": self.far.device},
            "kvstore": {"rdma-device": self.far.device, "kvstore-dram-bytes": "1MiB"},
        })  # fmt: skip
        self.here, self.there = (self.up(each) for each in machines)
        self.url = self.here.wait_for("are here: (.*)/v1", WAIT_S).group(1)

    def typed(
        self,
        host: Host,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        folder: str = FOLDER,
    ) -> Program:
        def be() -> int:
            os.chdir(folder)
            return mooncake(*words)

        return host.fork(be)

    def get(self, url: str, body: Mapping[str, Any] | None = None) -> Program:
        """Ask for what is at an URL from the second host."""
        posted = None if body is None else json.dumps(body).encode()

        def be() -> int:
            context = ssl.create_default_context(cafile=f"{FOLDER}/{AUTHORITY}")
            asked = urllib.request.Request(url, posted, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, context=context, timeout=WAIT_S) as answer:
                print(answer.read().decode())
            return 0

        return self.second.fork(be)

    def ask(self) -> Asked:
        """Ask for tokens after a prompt that no other has a block of."""
        self._num_asked += 1
        prompt = random.Random(self._num_asked).choices(range(VOCAB_SIZE), k=NUM_PROMPT)
        body = {
            "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "seed": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        expected = expected_output(self.layout, request(0, prompt, NUM_TOKENS))
        return Asked(self.get(f"{self.url}/v1/completions", body), expected)

    def metrics(self, url: str) -> str:
        return said(self.get(f"{url}/metrics"))

    def health_url(self) -> str:
        """Return where the prefill worker shows its health and metrics."""
        return re.findall(r"INFO prefill .*: health at (\S+)", self.here.output)[-1]

    def prefill_pid(self) -> str:
        """Return that of the prefill worker on its host, once it serves: decode computes prompts
        where there is none.
        """

        def later_ones() -> list[str]:
            pids = re.findall(r"prefill-\S+ \(pid (\d+)\) serves", self.here.output)
            return pids[self._num_killed :]

        return wait_until(later_ones, "prefill", WAIT_S)[0]

    def kill_prefill(self) -> None:
        self.first.check("kill", "-9", self.prefill_pid())
        self._num_killed += 1

    def num_requeued(self) -> float:
        """Return how many attempts were lost with a worker."""
        text = self.metrics(self.url)
        return sum(
            map(float, re.findall(r"^mooncake:requests_requeued_total.* (\S+)$", text, re.M))
        )

    def close(self) -> None:
        """Stop both machines; nothing of them stays at the devices."""
        for each in (self.there, self.here):
            assert each.stop(seconds=WAIT_S) == 0, each.output


class Asked(NamedTuple):
    """A request, and what an engine that computes all by itself answers."""

    program: Program
    expected: list[int]

    def check(self) -> None:
        [choice] = json.loads(said(self.program))["choices"]
        assert choice["token_ids"] == self.expected


def said(program: Program) -> str:
    assert program.process.wait(WAIT_S) == 0, program.output
    return program.output


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RdmaCluster]:
    folder = tmp_path_factory.mktemp("hosts")
    model = write_config_only(folder / "shared" / "hash-model", max_position_embeddings=1024)
    for name in TOKENIZER:
        shutil.copy(checkpoint(DEMO) / name, model)
    with contextlib.ExitStack() as opened:
        # Forks do not load it, and an emulated compiler is slow.
        opened.enter_context(pytest.MonkeyPatch.context()).setattr(
            local_faults, "_library", lambda: None
        )
        machines = opened.enter_context(hosts(2, folder / "hosts", folder / "shared"))
        nics = [opened.enter_context(contextlib.closing(HostNic(each))) for each in machines]
        before = [each.held() for each in nics]
        cluster = RdmaCluster(machines, nics, model)
        yield cluster
        cluster.close()
        assert [each.held() for each in nics] == before


def test_doctor_shows_at_which_address_peers_reach_the_device(cluster: RdmaCluster) -> None:
    found = said(cluster.typed(cluster.first, ["doctor", "k2.yaml", "--json"]))
    [line] = [each for each in json.loads(found) if each["name"] == "rdma roce_a port 1"]
    assert line["state"] == "ok"
    assert f"({cluster.near.address})" in line["found"]


def test_kv_goes_by_rdma_from_host_to_host(cluster: RdmaCluster) -> None:
    before = [each.num_packets() for each in (cluster.near, cluster.far)]
    cluster.ask().check()
    after = [each.num_packets() for each in (cluster.near, cluster.far)]
    assert all(was < now for was, now in zip(before, after, strict=True))
    moved = MOVED.findall(cluster.metrics(cluster.health_url()))
    assert {re.search(r'protocol="(.*?)"', labels)[1] for labels, _ in moved} == {"rdma"}
    num_bytes = NUM_PROMPT // cluster.layout.block_tokens * cluster.layout.block_bytes
    assert sum(float(number) for _, number in moved) >= num_bytes


def begun(cluster: RdmaCluster) -> Asked:
    """Return a request once some of its KV is on its way."""
    cluster.prefill_pid()
    before = cluster.near.num_packets()
    asked = cluster.ask()
    wait_until(lambda: cluster.near.num_packets() > before, "KV on its way", WAIT_S)
    return asked


def test_prefill_killed_in_mid_push(cluster: RdmaCluster) -> None:
    before = cluster.num_requeued()
    for _ in range(NUM_TRIES):
        asked = begun(cluster)
        cluster.kill_prefill()
        asked.check()
        if cluster.num_requeued() > before:
            return
    pytest.fail("the push has always ended before prefill was killed")
