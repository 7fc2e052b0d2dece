"""The commands of docs/several-machines.md and of configs/cluster, typed on two machines."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import mooncake
from tests.support.hosts.described import MOONCAKE, DescribedCluster
from tests.support.hosts.hosts import SHARED, Host, Program, hosts
from tests.support.serve.server_process import nano_checkpoint
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOP = Path(__file__).parents[3]
PAGE = TOP / "docs" / "several-machines.md"
EXAMPLES = TOP / "configs" / "cluster"
STAND_IN = {
    "max-model-len": 1024, "tensor-parallel-size": 2, "decode-context-parallel-size": 2,
    "pipeline-parallel-size": 2, "kvstore-dram-bytes": "32MiB",
}  # fmt: skip
"""What a small model on CPUs has in place of what the examples give Kimi-K2."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 24
DAY_S = 86400.0
CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
answer = client.completions.create(
    model=client.models.list().data[0].id, prompt=sys.argv[2], max_tokens=int(sys.argv[3]),
    temperature=0, extra_body={"ignore_eos": True},
)
print(repr(answer.choices[0].text))
"""


def typed(beginning: str, text: str) -> list[str]:
    """Return the words of the command in a page, or in a file's comments, that begins so."""
    [line] = re.findall(rf"^(?:#|   ) +({re.escape(beginning)}.*)$", text, re.MULTILINE)
    return str(line).split()[1:]


def text_of_all(model: Path) -> str:
    """Return what a model says to the prompt in one process."""
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        [sampled] = llm.generate([PROMPT], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return str(sampled.outputs[0].text)


def small(text: str, model: Path) -> dict[str, Any]:
    """Return the cluster of a page, with a small model."""
    return yaml.safe_load(text) | {  # type: ignore[no-any-return]
        "model": f"{SHARED}/{model.name}",
        "settings": {"dtype": "float32", "kv-cache-memory-bytes": "32MiB"},
        "kvstore": {"kvstore-dram-bytes": "32MiB"},
    }


class Cluster(DescribedCluster):
    """Machines of a cluster that is described by a page or a file, with the commands there."""

    def __init__(self, machines: Sequence[Host], source: Path, told: dict[str, Any]) -> None:
        text = source.read_text()
        init, up = typed("mooncake cluster init", text), typed("mooncake up", text)
        super().__init__(machines, told, init, up)
        self.first, self.second = machines
        for each in machines:
            name = Path(init[-1]).stem
            assert f"scp {name}/{each.name}/* {each.address}:{name}\n" in self.said

    def ask(self, host: Host, url: str) -> str:
        """Return what a gateway answers to the prompt."""
        trusting = f"SSL_CERT_FILE=here/ca.pem exec {sys.executable} -c"
        words = ("sh", "-c", f'{trusting} "$@"', "sh", CLIENT, f"{url}/v1", PROMPT)
        return str(ast.literal_eval(host.check(*words, str(NUM_TOKENS)).strip()))

    def status(self, url: str) -> str:
        trusting = "SSL_CERT_FILE=here/ca.pem"
        return self.first.check(
            "sh", "-c", f"{trusting} {MOONCAKE} status --url {url} --json || true"
        )


@dataclasses.dataclass(frozen=True)
class Typed:
    """The cluster of the page: both machines have typed the line, the second one with a clock that
    was a day late.
    """

    cluster: Cluster
    here: Program
    there: Program
    url: str
    alone: str
    """What one process answers."""


@pytest.fixture(scope="class")
def typed_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    folder = tmp_path_factory.mktemp("page")
    model = nano_checkpoint(folder / "shared")
    alone = text_of_all(model)
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    told = small(text, model)
    with hosts(2, folder / "hosts", folder / "shared") as machines:
        first, second = machines
        cluster = Cluster(machines, PAGE, told)
        second.skew_clock(-DAY_S)
        here = cluster.up(first)
        here.wait_for(rf"waiting for b \({second.address}\): decode, kvstore\n")
        there = cluster.up(second)
        url = here.wait_for("are here: (.*)/v1").group(1)
        there.wait_for("are here")
        assert cluster.ask(first, url) == alone
        second.skew_clock(0.0)  # whose clock is late trusts no certificate of today
        yield Typed(cluster, here, there, url, alone)
        for program in (there, here):
            assert program.stop() == 0, program.output


class TestThePage:
    """Both tests use one cluster, which ends before others start: hosts have one name a process."""

    def test_one_file_and_one_line_a_machine(self, typed_page: Typed) -> None:
        cluster, here, alone = typed_page.cluster, typed_page.here, typed_page.alone
        first, second, url = cluster.first, cluster.second, typed_page.url
        strange = second.run("sh", "-c", f"cd here && {MOONCAKE} up k2.yaml --machine a")
        assert strange.process.wait(LONG_S) == 2
        assert f"cert.pem: it belongs to {second.address}" in strange.output

        assert url == f"https://{first.address}:8000"
        assert cluster.ask(first, url) == cluster.ask(second, url) == alone
        assert cluster.status(url).count('"role": "kvstore"') == 2

        second.check("sh", "-c", "kill -9 $(pgrep -f [r]ole=decode)")
        typed_page.there.wait_for(r"decode-0 has ended \(signal 9\) and starts again")
        here.wait_for(r"are here(.|\n)*waiting for b \(.*\): decode\n(.|\n)*are here")
        assert cluster.ask(first, url) == alone

    def test_a_machine_that_had_no_network_keeps_its_engines(self, typed_page: Typed) -> None:
        """Nobody hears them for so long that they are given up. They are the same processes when
        the machine is back, so no weights are loaded.
        """
        cluster, url, alone = typed_page.cluster, typed_page.url, typed_page.alone
        first, second = cluster.first, cluster.second

        def decodes() -> set[int]:
            workers = json.loads(cluster.status(url))["workers"]
            return {each["pid"] for each in workers if each["role"] == "decode"}

        before = decodes()
        second.unplug()
        try:
            wait_until(lambda: not decodes(), "the engine is given up")
        finally:
            second.plug()
        assert before == wait_until(decodes, "the engine is back")
        typed_page.there.wait_for("comes back with its weights")
        typed_page.here.wait_for(r"waiting for b \(.*\): decode(.|\n)*are here")
        assert cluster.ask(first, url) == cluster.ask(second, url) == alone

    def test_a_machine_whose_clock_is_wrong_serves_as_others_do(self, typed_page: Typed) -> None:
        """Its clock was a day late while it started, and jumps ahead by a month while it works."""
        cluster, url, alone = typed_page.cluster, typed_page.url, typed_page.alone
        first, second = cluster.first, cluster.second
        for machine, ahead_s in ((second, 30 * DAY_S), (second, -DAY_S), (first, 30 * DAY_S)):
            machine.skew_clock(ahead_s)
            assert cluster.ask(first, url) == alone


@pytest.mark.parametrize("name", ["k2-thinking", "k2-instruct-pp"])
def test_the_examples_of_kimi_k2(tmp_path: Path, name: str) -> None:
    """Two ranks of a small model stand in for eight of Kimi-K2; all else is as in the file."""
    example = EXAMPLES / f"{name}.yaml"
    model = nano_checkpoint(tmp_path / "shared")
    alone = text_of_all(model)
    told = yaml.safe_load(example.read_text()) | {"model": f"{SHARED}/{model.name}"}
    for role in told.keys() & {"settings", "prefill", "decode", "kvstore"}:
        told[role] = {name: STAND_IN[name] for name in told[role]}
    told["settings"] |= {"dtype": "float32", "kv-cache-memory-bytes": "32MiB", "device": "cpu"}
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        cluster = Cluster(machines, example, told)
        running = [cluster.up(each) for each in machines]
        url = running[0].wait_for("are here: (.*)/v1").group(1)
        assert [cluster.ask(each, url) for each in machines] == [alone, alone]
        num_pools = sum("kvstore" in each for each in told["machines"].values())
        assert cluster.status(url).count('"role": "kvstore"') == num_pools
        stages = machines[1].check("sh", "-c", "pgrep -fc [f]ollower_program || true")
        assert int(stages) == (2 if "stage" in told["machines"]["b"] else 1)
        for program in reversed(running):
            assert program.stop() == 0, program.output
