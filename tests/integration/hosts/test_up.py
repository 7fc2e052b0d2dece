"""The commands of docs/several-machines.md, typed on two machines."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import mooncake
from tests.support.hosts.hosts import HOME, SHARED, Host, hosts
from tests.support.serve.server_process import nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[3] / "docs" / "several-machines.md"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 24
MOONCAKE = str(Path(sys.executable).parent / "mooncake")
CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
answer = client.completions.create(
    model=client.models.list().data[0].id, prompt=sys.argv[2], max_tokens=int(sys.argv[3]),
    temperature=0, extra_body={"ignore_eos": True},
)
print(repr(answer.choices[0].text))
"""


def typed(beginning: str) -> list[str]:
    """Return the words of the command of the page that begins so."""
    [line] = re.findall(rf"^    ({re.escape(beginning)}.*)$", PAGE.read_text(), re.MULTILINE)
    return str(line).split()[1:]


def file_of_the_page(machines: list[Host], model: str) -> str:
    """Return the page's file for these machines and a small model."""
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    told = yaml.safe_load(text)
    assert [*told["machines"]] == [each.name for each in machines]
    for each in machines:
        told["machines"][each.name]["address"] = each.address
    told["model"] = model
    told["settings"] = {"dtype": "float32", "kv-cache-memory-bytes": "32MiB"}
    told["kvstore"]["kvstore-dram-bytes"] = "32MiB"
    return str(yaml.safe_dump(told, sort_keys=False))


def test_one_file_and_one_line_a_machine(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        [sampled] = llm.generate([PROMPT], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        first, second = machines
        first.path(f"{HOME}/k2.yaml").write_text(
            file_of_the_page(list(machines), f"{SHARED}/{model.name}")
        )
        made = first.check(MOONCAKE, *typed("mooncake cluster init"))
        for each in machines:
            assert f"scp -r k2/{each.name} {each.address}:k2" in made
            shutil.copytree(
                first.path(f"{HOME}/k2/{each.name}"), each.path(f"{HOME}/here"), dirs_exist_ok=True
            )
        up = f"cd here && exec {MOONCAKE} {' '.join(typed('mooncake up'))}"

        strange = second.run("sh", "-c", f"cd here && {MOONCAKE} up k2.yaml --machine a")
        assert strange.process.wait(60) == 2
        assert f"cert.pem: it is of {second.address}" in strange.output

        here = first.run("sh", "-c", up)
        here.wait_for(rf"waiting for b \({second.address}\): decode, kvstore\n")
        there = second.run("sh", "-c", up)
        url = here.wait_for("are here: (.*)/v1").group(1)
        there.wait_for("are here")
        assert url == f"https://{first.address}:8000"

        def ask(host: Host) -> str:
            trusting = f"SSL_CERT_FILE=here/ca.pem exec {sys.executable} -c"
            words = ("sh", "-c", f'{trusting} "$@"', "sh", CLIENT, f"{url}/v1", PROMPT)
            return host.check(*words, str(NUM_TOKENS)).strip()

        assert ask(first) == ask(second) == repr(sampled.outputs[0].text)
        status = first.check(
            "sh", "-c", f"SSL_CERT_FILE=here/ca.pem {MOONCAKE} status --url {url} --json"
        )
        assert status.count('"role": "kvstore"') == 2

        second.check("sh", "-c", "kill -9 $(pgrep -f [r]ole=decode)")
        there.wait_for(r"decode-0 has ended \(signal 9\) and starts again")
        here.wait_for(r"are here(.|\n)*waiting for b \(.*\): decode\n(.|\n)*are here")
        assert ask(first) == repr(sampled.outputs[0].text)
        for program in (there, here):
            assert program.stop() == 0, program.output
