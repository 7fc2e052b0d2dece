"""Whether k2-demo answers as well in every form and layout: `python -m benchmarks accuracy`.

Each row is a server of its own, asked the same held-out samples of every task as `mooncake eval`
does, greedily. Rows are compared with the first, bfloat16 weights in one process: a row is lower
where it loses more than one standard error of the difference of the two accuracies. Before it is
asked, a server has to show that it is what its row says: workers, ranks, bytes of a token's KV,
stored experts; afterwards it has to show that drafts were accepted, in the row of drafts alone.
Where weights or KV are quantized, the likelihoods of a text have to differ from the first row's,
too. `--json` keeps each task's figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.support.servers import SERVED_NAME, Server, load, machine, ours, running
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.evaluate import Endpoint, Score, evaluate
from mooncake.launch.config.shipped import DEMO, checkpoint
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.tasks.sample import Sample

MAX_TOKENS = 512
AT_ONCE = 16
KV_BYTES = 64 * 2**20
KV = ("--kv-cache-memory-bytes", str(KV_BYTES))
ONE_PROCESS = ("--colocated", *KV)
RANKS = (*ONE_PROCESS, "--tensor-parallel-size", "2")
EXPERT = "model.layers.1.mlp.experts.0.down_proj."
STORED = {"bf16": "weight BF16", "fp8": "weight F8_E4M3", "int4": "weight_packed I32"}
"""What a checkpoint stores of an expert, by form of weights."""
ACCEPTED = "mooncake:spec_decode_num_accepted_tokens_total"
PROBE = "What is Mooncake? Mooncake is a serving engine for Kimi K2. The code of Ada is 4821. " * 3


@dataclass(frozen=True)
class Form:
    """One row: how weights and KV lie, and how the server is laid out."""

    name: str
    flags: Sequence[str]
    weights: str = "bf16"
    """bf16, or what `mooncake model convert --to` makes."""
    ranks: str = ""
    """What `serve` calls the ranks of its engine; none: it has one."""
    roles: frozenset[str] = frozenset({"decode"})
    drafts: bool = False

    @property
    def quantized_kv(self) -> bool:
        return "--kv-cache-dtype" in self.flags

    @property
    def quantized(self) -> bool:
        return self.weights != "bf16" or self.quantized_kv


FP8_KV = ("--kv-cache-dtype", "fp8")
TWO, POOLED = frozenset({"prefill", "decode"}), frozenset({"prefill", "decode", "kvstore"})
PLAIN = Form("bf16, one process", ONE_PROCESS)
DCP = Form(
    "TP2 + DCP2", (*RANKS, "--decode-context-parallel-size", "2"), ranks="2 ranks (tp2-dcp2)"
)
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
FORMS = (
    PLAIN,
    Form("FP8 weights", ONE_PROCESS, "fp8"),
    Form("INT4 weights", ONE_PROCESS, "int4"),
    Form("FP8 KV", (*ONE_PROCESS, *FP8_KV)),
    Form("1 prefill + 1 decode", ("--kvstore", "0", *KV), roles=TWO),
    Form("1 prefill + 1 decode + pool", KV, roles=POOLED),
    Form("TP2", RANKS, ranks="2 ranks (tp2)"),
    DCP,
    Form("TP2 + EP2", (*RANKS, "--enable-expert-parallel"), ranks="2 ranks (tp2-ep2)"),
    Form("PP2", (*ONE_PROCESS, "--pipeline-parallel-size", "2"), ranks="2 ranks (tp1-pp2)"),
    Form("drafts from the prompt", (*ONE_PROCESS, *DRAFTS), drafts=True),
)
TOGETHER = (
    Form("FP8 weights and KV", (*ONE_PROCESS, *FP8_KV), "fp8"),
    Form("INT4 weights, 1 prefill + 1 decode + pool", KV, "int4", roles=POOLED),
    DCP,
)
"""All of them in fewer servers, for tests."""


@dataclass(frozen=True)
class Row:
    """What a form answered."""

    form: Form
    scores: Sequence[Score]
    likelihoods: Sequence[float]
    """The likelihood of each token of a text."""

    @property
    def num_samples(self) -> int:
        return sum(score.num_samples for score in self.scores)

    @property
    def accuracy(self) -> float:
        return sum(score.num_right for score in self.scores) / self.num_samples

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.num_samples)

    def keeps(self, first: Row) -> bool:
        """Whether the accuracy is at most one standard error of the difference below `first`'s."""
        error = math.hypot(self.standard_error, first.standard_error)
        return self.accuracy >= first.accuracy - error

    def unlike(self, first: Row) -> bool:
        """Whether what is quantized here had an effect."""
        return not self.form.quantized or list(self.likelihoods) != list(first.likelihoods)

    def failures(self) -> list[str]:
        return [why for score in self.scores for why in score.failures]


def scores_of(url: str, model: str, samples: Mapping[str, Sequence[Sample]]) -> list[Score]:
    """Return the scores of the server at `url`."""

    async def ask() -> list[Score]:
        client = HttpClient(url)
        try:
            return await evaluate(Endpoint(client, {}, model, MAX_TOKENS), samples, AT_ONCE)
        finally:
            client.close()

    return run_in_loop(ask())


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown: all tasks together, then each."""
    shown = [score.task for score in rows[0].scores]
    lines = [
        f"| form | right | standard error | {' | '.join(shown)} |",
        f"|---|---|---|{'---|' * len(shown)}",
    ]
    for row in rows:
        by_task = {score.task: score for score in row.scores}
        shares = " | ".join(f"{by_task[task].accuracy:.0%}" for task in shown)
        mark = "" if row.keeps(rows[0]) else " (lower)"
        lines.append(
            f"| {row.form.name} | {row.accuracy:.1%}{mark} | {row.standard_error:.1%} | {shares} |"
        )
    return "\n".join(lines)


THRESHOLDS: Mapping[str, float] = {
    "sum": 0.95, "copy": 0.95, "object": 0.85, "code": 0.9, "code_4k": 0.9, "memory": 0.9,
    "question": 0.9, "call": 0.6, "result": 0.9, "calls": 0.4, "turns": 0.7,
}  # fmt: skip
"""Shares of right answers below which the gate of the tests fails (`tests/integration/serve`)."""


def asked(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return what a GET, or the POST of a body, answers in JSON."""
    headers = {"Content-Type": "application/json"}
    sent = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, sent, headers)) as answer:
        return json.load(answer)


def check_in_use(form: Form, directory: Path, server: Server) -> None:
    """Raise RuntimeError where what is served is not `form`."""
    stored = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(EXPERT)]  # noqa: SIM118
            stored |= {f"{n.removeprefix(EXPERT)} {file.get_slice(n).get_dtype()}" for n in names}
    status = asked(server.url + "/v1/cluster/status")
    workers = {worker["role"]: worker for worker in status["workers"]}
    blocks = workers["decode"]["load"]["num_total_blocks"]
    spec = Checkpoint.open(directory).spec
    width = spec.num_hidden_layers * spec.kv_width * (1 if form.quantized_kv else 2)
    found = {
        "stored experts": (STORED[form.weights] in stored, True),
        "roles": (set(workers), set(form.roles)),
        "KV bytes a token": (round(KV_BYTES / blocks / 64), width),
        "ranks": (form.ranks in server.log.read_text(), True),
        "one rank": ("2 ranks" in server.log.read_text(), bool(form.ranks)),
    }
    for what, (given, wanted) in found.items():
        if given != wanted:
            raise RuntimeError(f"{form.name}: {what}: {given}, where it should be {wanted}")


def check_drafts(form: Form, server: Server) -> None:
    """Raise RuntimeError where accepted drafts were expected and there is none, or the reverse."""
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    counted = [line for line in lines if line.startswith(ACCEPTED)]
    if (sum(float(line.rsplit(" ", 1)[1]) for line in counted) > 0) != form.drafts:
        raise RuntimeError(f"{form.name}: accepted drafts: {counted}")


def likelihoods_of(url: str) -> list[float]:
    """Return the log probabilities of the tokens of a text."""
    body = {"model": SERVED_NAME, "prompt": PROBE, "max_tokens": 1, "echo": True, "logprobs": 0}
    [choice] = asked(url + "/v1/completions", body)["choices"]
    return [value for value in choice["logprobs"]["token_logprobs"] if value is not None]


def measure(
    model: Path, forms: Sequence[Form], samples: Mapping[str, Sequence[Sample]]
) -> list[Row]:
    """Serve each form in turn and return what it answered."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for form in forms:
            directory = model
            if form.weights != "bf16":
                directory = Path(place, form.weights)
                convert_checkpoint(model, directory, form.weights)
            with running(ours(form.name, directory, *form.flags)) as server:
                check_in_use(form, directory, server)
                likelihoods = likelihoods_of(server.url)
                scores = scores_of(server.url, SERVED_NAME, samples)
                check_drafts(form, server)
                rows.append(Row(form, scores, likelihoods))
            print(table([rows[0], rows[-1]]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks accuracy", description=__doc__)
    parser.add_argument("--model", type=Path, default=checkpoint(DEMO))
    parser.add_argument("--num-samples", type=int, default=100, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--forms", nargs="+", choices=[form.name for form in FORMS])
    parser.add_argument("--json", type=Path, help="write each task's figures there")
    args = parser.parse_args(argv)
    samples = {t: evaluation_samples(t, args.num_samples, args.seed) for t in args.tasks}
    forms = [form for form in FORMS if not args.forms or form.name in args.forms]
    rows = measure(args.model, forms, samples)
    print(
        f"{args.num_samples} samples of each of {len(samples)} tasks; {machine()}; load {load()}\n"
    )
    print(table(rows))
    if args.json is not None:
        document = {row.form.name: {s.task: s.document() for s in row.scores} for row in rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    failures = [why for row in rows for why in row.failures()]
    for why in failures[:3]:
        print(f"failed: {why}", file=sys.stderr)
    without = [row.form.name for row in rows if not row.unlike(rows[0])]
    for name in without:
        print(f"{name}: likelihoods are those of the first row", file=sys.stderr)
    return 1 if failures or without or not all(row.keeps(rows[0]) for row in rows) else 0
