"""Workers that share experts: `python -m benchmarks experts [balance|speed|apart]`.

`balance`: a checkpoint whose router likes experts by Zipf's law, the hottest ones all on the first
rank, served by two decode workers that share the experts and place them anew; the table shows how
even the ranks' rows were in each interval, from `/metrics`. `speed`: the same requests to two such
workers and to two that each have all experts, every worker with one thread. Both servers are up at
once and take turns, so that they meet the same load of the machine. Both go through HTTP. `apart`
computes what Kimi-K2's decode steps would give for a dollar if its experts were on GPUs of another
kind than its attention.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec
import torch
from safetensors.torch import load_file, save_file

from benchmarks.support.apart_figures import Step, best
from benchmarks.support.servers import SERVED_NAME, Layout, load, machine, ours, running
from mooncake.base import ModelSpec
from mooncake.launch.config.shipped import figures
from mooncake.model.checkpoint.files.checkpoint_files import INDEX_NAME
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures

SHARED = ("--decode-set", "data-parallel-size=2", "-ep")
APART = ("--decode", "2")
FLAGS = (
    "--device", "cpu", "--num-threads", "1", "--prefill", "0", "--kvstore", "0",
    "--kv-cache-memory-bytes", "128MiB",
)  # fmt: skip
VOCABULARY = 500
"""Words of the prompts; every preset has them."""
PROMPT_TOKENS = 32
BIAS = "e_score_correction_bias"
FITTED_ROWS, FITTED_STEPS, FITTED_RATE = 4096, 400, 0.05
MOST_SHARE = 0.95
"""The largest share of rows that the hottest expert may have."""
MEAN, MOST, ROWS, HOTTEST, MOVES = (
    f"expert_{name}"
    for name in ("rank_rows_mean", "rank_rows_most", "rows", "rows_hottest", "moves")
)
_COUNTER = re.compile(r"^mooncake:worker_events_total\{([^}]*)\} (\S+)$", re.MULTILINE)


def zipf_bias(spec: ModelSpec, exponent: float) -> torch.Tensor:
    """Return a router's bias, [experts] float32, by which a row goes to expert `e` with a chance
    that falls as `(e + 1) ** -exponent`, as far as one can be in every row once only.

    Fitted to logits of unit variance, as a random router gives them.
    """
    experts, chosen = spec.n_routed_experts, spec.num_experts_per_tok
    weights = torch.arange(1, experts + 1).pow(-exponent)
    wanted = (weights * chosen / weights.sum()).clamp_max(MOST_SHARE)
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(FITTED_ROWS, experts, generator=generator).sigmoid()
    bias = torch.zeros(experts)
    for _ in range(FITTED_STEPS):
        picked = (scores + bias).topk(chosen, dim=-1).indices
        share = torch.bincount(picked.flatten(), minlength=experts) / FITTED_ROWS
        bias += FITTED_RATE * (wanted.log() - share.clamp_min(1 / FITTED_ROWS).log())
    return bias


def skew(checkpoint: Path, exponent: float, hottest: int) -> None:
    """Have the routers of all layers of a checkpoint like experts by Zipf's law, from expert
    `hottest` on: those before it, which may have a second slot from the start, are the coldest.
    """
    spec = ModelSpec.from_config(json.loads((checkpoint / "config.json").read_text()))
    bias = zipf_bias(spec, exponent).roll(hottest)
    index = json.loads((checkpoint / INDEX_NAME).read_text())["weight_map"]
    for name in sorted({file for tensor, file in index.items() if tensor.endswith(BIAS)}):
        tensors = load_file(checkpoint / name)
        for tensor in tensors:
            if tensor.endswith(BIAS):
                tensors[tensor] = bias.clone()
        save_file(tensors, checkpoint / name, metadata={"format": "pt"})


def counters(text: str, worker: str) -> dict[str, float]:
    """Return the counters of one worker out of a gateway's `/metrics`; those it does not name are
    zero.
    """
    found = defaultdict[str, float](float)
    for labels, value in _COUNTER.findall(text):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if of["worker"] == worker:
            found[of["name"]] = float(value)
    return found


class Clients:
    """Clients that ask one server without a pause, each for one answer at a time."""

    def __init__(self, url: str, num: int, max_tokens: int, seed: int) -> None:
        self._url = url
        self._max_tokens = max_tokens
        self._num = num
        self._seed = seed

    def ask(self, num_requests: int) -> float:
        """Return the tokens per second of so many requests."""
        draw = random.Random(self._seed)
        prompts = [
            [draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)
        ]
        begin = time.perf_counter()
        with ThreadPoolExecutor(self._num) as pool:
            counts = list(pool.map(self._complete, prompts))
        return sum(counts) / (time.perf_counter() - begin)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask on for as long as the body runs."""
        ended = threading.Event()

        def one(number: int) -> None:
            draw = random.Random(f"{self._seed} {number}")
            while not ended.is_set():
                self._complete([draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)])

        with ThreadPoolExecutor(self._num) as pool:
            asked = [pool.submit(one, number) for number in range(self._num)]
            try:
                yield
            finally:
                ended.set()
        for each in asked:
            each.result()

    def _complete(self, prompt: Sequence[int]) -> int:
        body = {
            "model": SERVED_NAME, "prompt": prompt, "max_tokens": self._max_tokens,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])


def show_balance(model: Path, args: argparse.Namespace) -> None:
    """Print a row for each interval."""
    eplb = {
        "window_size": args.interval, "step_interval": args.interval,
        "num_redundant_experts": args.redundant,
    }  # fmt: skip
    flags = (*FLAGS, *SHARED, "--enable-eplb", "--eplb-config", json.dumps(eplb))
    print(f"\n{args.preset}, Zipf {args.zipf}, {args.redundant} redundant experts, intervals of "
          f"{args.interval} steps, {args.clients} clients\n")  # fmt: skip
    print("| interval | balance | hottest expert | moves so far |\n|---|---|---|---|")
    with running(ours("experts-balance", model, *flags)) as server:
        clients = Clients(server.url, args.clients, args.max_tokens, seed=1)
        before: Mapping[str, float] = dict.fromkeys((MEAN, MOST, ROWS, HOTTEST, MOVES), 0.0)
        with clients.asking():
            for number in range(args.intervals):
                while True:
                    text = httpx.get(f"{server.url}/metrics", timeout=60).text
                    now = counters(text, "decode-0")
                    if now[ROWS] > before[ROWS]:
                        break
                    time.sleep(0.1)
                mean, most, rows, hottest = (
                    now[name] - before[name] for name in (MEAN, MOST, ROWS, HOTTEST)
                )
                print(f"| {number} | {mean / most:.3f} | {hottest / rows:.0%} "
                      f"| {now[MOVES]:.0f} |", flush=True)  # fmt: skip
                before = now


def show_speed(model: Path, args: argparse.Namespace) -> None:
    """Print tokens per second of each round, and what shared experts make of them."""
    print(f"\n{args.preset}, {args.clients} clients, {args.requests} requests of "
          f"{PROMPT_TOKENS} + {args.max_tokens} tokens a round\n")  # fmt: skip
    layouts: list[Layout] = [
        ours("experts-apart", model, *FLAGS, *APART),
        ours("experts-shared", model, *FLAGS, *SHARED),
    ]
    with running(layouts[0]) as apart, running(layouts[1]) as shared:
        servers = {"apart": apart, "shared": shared}
        for server in servers.values():
            Clients(server.url, args.clients, args.max_tokens, seed=0).ask(args.clients)
        print("| round | two engines tok/s | sharing experts tok/s | ratio | CPU s |")
        print("|---|---|---|---|---|")
        ratios = []
        for number in range(args.rounds):
            found, cpu_s = {}, {}
            for name in list(servers)[:: 1 if number % 2 else -1]:
                server, began_s = servers[name], servers[name].cpu_s()
                clients = Clients(server.url, args.clients, args.max_tokens, seed=number + 1)
                found[name] = clients.ask(args.requests)
                cpu_s[name] = server.cpu_s() - began_s
            ratios.append(found["shared"] / found["apart"])
            print(f"| {number} | {found['apart']:.1f} | {found['shared']:.1f} | {ratios[-1]:.2f}x "
                  f"| {cpu_s['apart']:.1f}, {cpu_s['shared']:.1f} |", flush=True)  # fmt: skip
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"\nsharing / apart: {middle:.2f}x ({low:.2f} to {high:.2f})")


def show_apart(args: argparse.Namespace) -> None:
    """Print the best split of each layout, and from which price on experts apart gain nothing."""
    model = figures("kimi-k2-instruct", ModelFigures)
    h800, h20 = (figures(name, HardwareFigures) for name in ("h800x8", "h20x8"))
    print(f"\n{model.name}, sequences of {args.context} tokens, steps of at most "
          f"{args.tbt_ms:g} ms, best split of up to 192 GPUs of each kind\n")  # fmt: skip
    print("| attention + experts | GPUs | sequences a GPU | micro-batches | step ms "
          "| attention, experts, there, back ms | tokens/s | tokens for a dollar |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    of = partial(best, model, context=args.context, limit_s=args.tbt_ms / 1e3)
    found: dict[str, Step | None] = {
        "H800, both (DP+EP)": of(h800, None, most_batches=2),
        "H20, both (DP+EP)": of(h20, None, most_batches=2),
        "H800 + H20": of(h800, h20),
        "H800 + H20, one batch": of(h800, h20, most_batches=1),
        "H800 + H20, one batch, rows to all": of(h800, h20, most_batches=1, gathers=True),
        "H800 + H800": of(h800, h800),
        "H20 + H800": of(h20, h800),
    }
    for name, step in found.items():
        if step is None:
            print(f"| {name} | none keeps the limit | | | | | | |")
            continue
        split = step.split
        parts = (step.attention_s, step.experts_s, step.there_s, step.back_s)
        shown = ", ".join(f"{1e3 * part:.1f}" for part in parts)
        print(f"| {name} | {split} | {split.batch} | {split.num_batches} "
              f"| {1e3 * step.seconds:.1f} | {shown} | {step.tokens_per_s:,.0f} "
              f"| {step.tokens_per_dollar:,.0f} |")  # fmt: skip
    together = found["H800, both (DP+EP)"]
    if together is not None:
        dollars = break_even(partial(of, h800), h20, together.tokens_per_dollar)
        print(f"\nH800 + H20 gains nothing over H800 from {dollars:.2f} dollars an hour on "
              f"for an H20; {h20.gpu_hour_dollars:.2f} are assumed")  # fmt: skip
    print()
    for each in (model, h800, h20):
        print("\n".join(f"- {each.name}, {name}: {why}" for name, why in each.sources.items()))
    print(f"- {h800.remark}\n- {h20.remark}")


def break_even(
    of: Callable[[HardwareFigures], Step | None], experts: HardwareFigures, wanted: float
) -> float:
    """Return the price of a GPU with experts, to a cent, from which on the best split gives no more
    than the `wanted` tokens for a dollar.
    """
    low, high = 0, 10_000
    while low < high:
        cents = (low + high) // 2
        step = of(msgspec.structs.replace(experts, gpu_hour_dollars=cents / 100))
        if step is not None and step.tokens_per_dollar > wanted:
            low = cents + 1
        else:
            high = cents
    return low / 100


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("balance", "speed", "both", "apart"), default="both"
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence (apart)")
    parser.add_argument("--tbt-ms", type=float, default=50.0, help="the longest step (apart)")
    parser.add_argument("--preset", default="k2-tiny")
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent")
    parser.add_argument("--redundant", type=int, default=4)
    parser.add_argument("--interval", type=int, default=200, help="steps, all of them counted")
    parser.add_argument("--intervals", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if args.what == "apart":
        show_apart(args)
        return 0
    print(f"{machine()}, load {load()}")
    with tempfile.TemporaryDirectory() as home:
        if args.what != "speed":
            skewed = init_checkpoint(args.preset, seed=0, out=Path(home) / "skewed")
            skew(skewed, args.zipf, args.redundant)
            show_balance(skewed, args)
        if args.what != "balance":
            plain = init_checkpoint(args.preset, seed=0, out=Path(home) / "plain")
            show_speed(plain, args)
    print(f"\nload {load()}")
    return 0
