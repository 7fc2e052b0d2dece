"""The API server alone beside vLLM's front end: `python -m benchmarks frontend`.

Both over a backend that computes nothing, with the same tokenizer, chat template and client: a
first token at once, the others 5 ms apart, slow enough for an event each. CPU time of the server's
processes gives requests and streamed tokens per second of one core: what else runs on the machine
changes it less than wall time. A last part measures the time the API server adds to TTFT with 64
streams
under way, their tokens 20 ms apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.support import vllm_environment
from benchmarks.support.servers import (
    ROOT,
    SERVED_NAME,
    VLLM_ENV,
    VLLM_SETTINGS,
    Layout,
    Server,
    load,
    machine,
    running,
)
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.bench.arrivals import Arrivals, Run
from mooncake.bench.endpoint import Output, Target
from mooncake.bench.metrics import Metrics
from mooncake.bench.samples import PromptSource, RandomShape, Sample, random_samples
from mooncake.bench.serve import benchmark, shown_errors

STREAMS = 64
STREAM_STEP_MS = 5.0
STEP_MS = 20.0
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def write_model(folder: Path) -> None:
    """Write a small checkpoint whose tokenizer both servers can read."""
    model = [sys.executable, "-m", "mooncake.cli.main", "model", "init", "--preset", "k2-nano"]
    subprocess.run([*model, "--out", str(folder)], check=True, capture_output=True)
    config = json.loads((folder / "config.json").read_text())
    for name in ("tiktoken.model", "chat_template.jinja"):
        (folder / name).unlink()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config["vocab_size"],
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(ROOT.glob("*.md"))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKS[1],
        "pad_token": MARKS[2],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def layouts(model: Path, step_ms: float) -> list[Layout]:
    """Return our API server and, where its environment was made, vLLM's."""
    program = (sys.executable, "-m", "benchmarks.support.frontend_ours", str(model))
    found = [Layout(name="mooncake", command=(*program, "--step-ms", str(step_ms)))]
    if (VLLM_ENV / ".ready").exists():
        script = str(ROOT / "benchmarks" / "support" / "frontend_vllm.py")
        vllm = (str(VLLM_ENV / "bin" / "python"), script, "serve", str(model))
        flags = ("--served-model-name", SERVED_NAME, "--max-model-len", "8192",
                 "--disable-uvicorn-access-log")  # fmt: skip
        settings = {**VLLM_SETTINGS, "DOOR_STEP_MS": str(step_ms)}
        found.append(Layout(name="vllm-cpu", command=(*vllm, *flags), environment=settings))
    return found


@dataclass(frozen=True)
class Cost:
    """What one load took."""

    cpu_s: float
    metrics: Metrics
    num_events: int


class Client:
    """Sends loads of chat requests."""

    def __init__(self, model: Path) -> None:
        tokenizer = load_tokenizer(model)
        self._prompts = PromptSource(tokenizer, tokenizer.vocab_size)

    async def _send(
        self, url: str, samples: Sequence[Sample], run: Run
    ) -> tuple[Metrics, list[Output]]:
        target = Target(
            backend="openai-chat",
            endpoint="/v1/chat/completions",
            model=SERVED_NAME,
            headers={"Content-Type": "application/json"},
            fields={"ignore_eos": True, "temperature": 0},
        )
        client = HttpClient(url)
        metrics, outputs = await benchmark(client, target, samples, run)
        client.close()
        if errors := shown_errors(outputs):
            raise RuntimeError(errors)
        return metrics, outputs

    def load(self, server: Server, shape: RandomShape, count: int, arrivals: Arrivals) -> Cost:
        """Send `count` requests, at most 64 at a time."""
        samples = [
            Sample(
                prompt=[{"role": "user", "content": str(sample.prompt)}],
                num_prompt_tokens=sample.num_prompt_tokens,
                num_output_tokens=sample.num_output_tokens,
            )
            for sample in random_samples(shape, count, self._prompts, seed=time.time_ns())
        ]
        before = server.cpu_s()
        run = Run(arrivals=arrivals, max_concurrency=STREAMS, progress=False)
        metrics, outputs = run_in_loop(self._send(server.url, samples, run))
        if metrics.num_output_tokens != count * shape.output_len:
            raise RuntimeError(f"{metrics.num_output_tokens} tokens came back")
        num_events = sum(1 + len(output.itls_s) for output in outputs)
        return Cost(server.cpu_s() - before, metrics, num_events)


def per_core(model: Path, client: Client, rounds: int) -> None:
    """Print requests and tokens per second of a core, rounds of the servers in turn."""
    streaming = RandomShape(input_len=64, output_len=256)
    asking = RandomShape(input_len=1024, output_len=1)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for layout in layouts(model, STREAM_STEP_MS):
            with running(layout) as server:
                client.load(server, RandomShape(input_len=64, output_len=8), STREAMS, Arrivals())
                stream = client.load(server, streaming, 2 * STREAMS, Arrivals())
                ask = client.load(server, asking, 4 * STREAMS, Arrivals())
            num_tokens = 2 * STREAMS * streaming.output_len
            tokens, requests = num_tokens / stream.cpu_s, 4 * STREAMS / ask.cpu_s
            found.setdefault(layout.name, []).append(
                (tokens, stream.num_events / num_tokens, requests)
            )
            print(f"{layout.name}: {tokens:,.0f} tok/s, {requests:,.0f} requests/s", flush=True)
    print(
        "| front end | streamed tok/s a core | events/token | requests/s a core (1,024 in, 1 out) "
        "| load |\n|---|---|---|---|---|"
    )
    medians = {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in found.items()
    }
    for name, (tokens, events, requests) in medians.items():
        ours = medians["mooncake"]
        ratio = "" if name == "mooncake" else " (ours: {:.2f}x)"
        print(
            f"| {name} | {tokens:,.0f}{ratio.format(ours[0] / tokens)} | {events:.2f} "
            f"| {requests:,.0f}{ratio.format(ours[2] / requests)} | {load()} |"
        )


def added_to_ttft(model: Path, client: Client) -> None:
    """Print TTFT where the backend itself adds nothing to it, with about 64 streams under way."""
    shape = RandomShape(input_len=1024, output_len=128)
    rate = 0.9 * STREAMS / (shape.output_len * STEP_MS / 1000)
    print("\n| front end | median TTFT ms at 64 streams | p99 | load |\n|---|---|---|---|")
    for layout in layouts(model, STEP_MS):
        with running(layout) as server:
            client.load(server, RandomShape(input_len=64, output_len=8), STREAMS, Arrivals())
            cost = client.load(server, shape, 6 * STREAMS, Arrivals(rate=rate))
        ttft = cost.metrics.spreads["ttft"]
        p99 = dict(ttft.percentiles)[99]
        print(f"| {layout.name} | {ttft.median:.1f} | {p99:.1f} | {load()} |", flush=True)


def main(argv: Sequence[str]) -> int:
    """See the module."""
    args = _arguments(argv)
    if args.with_vllm:
        vllm_environment.make()
    print(f"{machine()}; {STREAMS} streams, chat, no model")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(model)
        client = Client(model)
        per_core(model, client, args.rounds)
        added_to_ttft(model, client)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks frontend", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--with-vllm", action="store_true", help="make the peer's environment")
    return parser.parse_args(argv)
