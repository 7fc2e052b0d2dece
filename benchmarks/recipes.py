"""Published runs of Kimi-K2 beside the same runs simulated: `python -m benchmarks recipes`.

The simulator plays the requests of a recipe on one engine of its shape, which computes prompts
and decodes both, as the published engine did, and on engines of prefill and of decode. Every
figure that a recipe does not give is a line of what is assumed.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from random import Random

import msgspec
from rich.console import Console

from benchmarks.support.servers import load, machine
from mooncake.base import Shape
from mooncake.base.request import OutputEvent, RequestOutput
from mooncake.launch.config.shipped import figures
from mooncake.sim.results.result import SimulationResult, result_of
from mooncake.sim.simulation import START_S, Simulation, SimulationConfig
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, Arrival, TraceLine, Workload
from mooncake.sim.world.cost_model import ExpertSends, HardwareFigures, ModelFigures

CHUNK_TOKENS = 8192


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe says of one shape."""

    shape: Shape
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: float
    gap_ms: float | None = None
    """Mean, between two tokens."""
    kv_tokens: int | None = None

    @property
    def output_tokens(self) -> float:
        """Mean tokens of an answer."""
        return self.output_tokens_per_s / self.requests_per_s


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, what they were sent to, and what came out."""

    source: str
    model: str
    hardware: str
    input_tokens: int
    output_tokens: int
    """Tokens of every answer, or of the longest one if many end before."""
    all_full: bool
    """Every answer has so many."""
    num_requests: int
    rate: float
    """Requests a second; infinite: all at once."""
    max_num_seqs: int = 512
    chunk_tokens: int = CHUNK_TOKENS
    runs: tuple[Published, ...]
    prefill_engines: tuple[int, ...] = (1, 2)
    """Numbers of prefill engines that are also played, beside one decode engine."""
    assumed: Mapping[str, str]
    """What the recipe leaves open -> what is assumed, and why."""


CHUNKS = (
    f"{CHUNK_TOKENS} tokens a step, of prompts and decoding sequences together: the default of the "
    "published engine"
)
HBM = "0.9 used, 4 GB of them a GPU for activations, buffers and graphs"
OTHERS = (
    "none: tokenizing, HTTP and the published engine's own scheduling between two steps are not "
    "counted beyond step_overhead_s"
)
VLLM_K2 = "vLLM's recipe for Kimi-K2-Instruct (vllm-project/recipes, moonshotai/Kimi-K2.md)"


def _costs(model: str, hardware: str) -> str:
    return (
        f"the rooflines of configs/models/{model}.json and configs/hardware/{hardware}.json, whose "
        f"every figure has its source there. {figures(hardware, HardwareFigures).remark}"
    )


THINKING = Recipe(
    source="vLLM's recipe for Kimi-K2-Thinking, 8xH200, random prompts of 8,000 and outputs to "
    "4,000, 1,000 of them at 100/s",
    model="kimi-k2-thinking", hardware="h200x8", input_tokens=8000, output_tokens=4000,
    all_full=False, num_requests=1000, rate=100.0,
    runs=(
        Published(
            shape=Shape(tp=8), requests_per_s=1.25, output_tokens_per_s=485.78,
            total_tokens_per_s=10_462.57, ttft_s=271.0, kv_tokens=715_072,
        ),
        Published(
            shape=Shape(tp=8, dcp=8), requests_per_s=1.57, output_tokens_per_s=695.13,
            total_tokens_per_s=13_290.35, ttft_s=228.0, kv_tokens=5_721_088,
        ),
    ),
    assumed={
        "answers": "most end before 4,000 tokens: output tokens by requests, both published, are "
        "389 and 443 of a request; lengths are drawn from an exponential distribution of that mean",
        "chunks": CHUNKS,
        "step costs": _costs("kimi-k2-thinking", "h200x8"),
        "HBM": HBM,
        "other costs": OTHERS,
    },
)  # fmt: skip
H200X16 = Recipe(
    source=f"{VLLM_K2}, FP8 on 16xH200, 16 random prompts of 8,000 at once, outputs of 1,000",
    model="kimi-k2-instruct", hardware="h200x8", input_tokens=8000, output_tokens=1000,
    all_full=True, num_requests=16, rate=math.inf,
    runs=(
        Published(
            shape=Shape(tp=8, pp=2), requests_per_s=16 / 62.75, output_tokens_per_s=254.99,
            total_tokens_per_s=2294.88, ttft_s=4.28, gap_ms=58.15,
        ),
        Published(
            shape=Shape(tp=8, pp=2, dcp=8), requests_per_s=16 / 47.14, output_tokens_per_s=339.38,
            total_tokens_per_s=3054.46, ttft_s=2.01, gap_ms=45.01,
        ),
    ),
    prefill_engines=(1,),
    assumed={
        "shape": "the page gives no command for 16xH200; tp8-pp2 is that of its command for 16 "
        "GPUs of 80 GB, to which it adds -dcp 8 in the same change",
        "chunks": CHUNKS,
        "stages": "a decode step takes half of the running sequences, so that both stages have "
        "one: as our engine does",
        "step costs": _costs("kimi-k2-instruct", "h200x8"),
        "other costs": OTHERS,
    },
)  # fmt: skip
H800X16 = Recipe(
    source=f"{VLLM_K2}, FP8 on 16xH800, 8 random prompts of 1,000 at 1/s, outputs of 512, one "
    "sequence at a time (--max-num-seqs 1)",
    model="kimi-k2-instruct", hardware="h800x8", input_tokens=1000, output_tokens=512,
    all_full=True, num_requests=8, rate=1.0, max_num_seqs=1, chunk_tokens=1024,
    runs=(
        Published(
            shape=Shape(tp=8, pp=2), requests_per_s=8 / 132.79, output_tokens_per_s=30.84,
            total_tokens_per_s=91.09, ttft_s=58.28, gap_ms=30.78,
        ),
    ),
    prefill_engines=(),
    assumed={
        "KV": "bfloat16; the published run had FP8, which matters little at contexts of 1,500",
        "shape": "today's page has -dcp 8 in the command; the figures are older than that",
        "chunks": "1,024 tokens a step, as in the published command",
        "step costs": _costs("kimi-k2-instruct", "h800x8"),
        "other costs": OTHERS,
    },
)  # fmt: skip
RECIPES = (THINKING, H200X16, H800X16)

BATCHES = (1, 16, 32, 64, 128, 256, 512)
"""How many prompts the last recipe sends at once."""
BATCH_SHAPES = (
    (Shape(tp=8, pp=2), 0),
    (Shape(tp=8, pp=2, dcp=8), 0),
    (Shape(tp=8, dcp=8, dp=2, ep=16), 0),
    (Shape(tp=8, pp=2, dcp=8), 1),
)
"""(shape, engines of prefill beside one of decode)."""
BATCH_ASSUMED = {
    "requests": "all at once; the page names the sizes, and gives figures of the run above alone",
    "sequences": "up to 512 together in an engine, in chunks of 8,192 tokens",
    "experts in common": "each rank gets the rows of the other node's instance in bfloat16, and "
    "gives the sums back, over its own card (--all2all-backend allgather_reducescatter): what "
    "this engine does, before any DeepEP",
    "network": "a small exchange between nodes takes 30 us, large ones the rate of a card in "
    "configs/hardware",
}


def workload(recipe: Recipe, mean_output: float, num_requests: int, seed: int) -> Workload:
    """Return the recipe's requests: no prompt shares a block with another."""
    random = Random(seed)
    each = math.ceil(recipe.input_tokens / TRACE_BLOCK_TOKENS)
    most = recipe.output_tokens
    lines = [
        TraceLine(
            timestamp=1e3 * number / recipe.rate,
            input_length=recipe.input_tokens,
            output_length=most
            if recipe.all_full
            else min(most, 1 + int(random.expovariate(1 / mean_output))),
            hash_ids=list(range(number * each, (number + 1) * each)),
        )
        for number in range(num_requests)
    ]
    return Workload.replay(lines)


def play(
    recipe: Recipe, shape: Shape, requests: Workload, *, num_prefill: int = 0, seed: int = 0
) -> tuple[SimulationResult, float]:
    """Return the result on one engine that does both, or on `num_prefill` and one of decode, and
    output tokens a second.
    """
    simulation = Simulation(
        SimulationConfig(
            model=figures(recipe.model, ModelFigures),
            hardware=figures(recipe.hardware, HardwareFigures),
            shape=shape,
            num_prefill=num_prefill,
            num_decode=1,
            engine="mooncake" if num_prefill else "coupled-chunked",
            coupled_chunk_tokens=recipe.chunk_tokens,
            prefill_chunk_tokens=recipe.chunk_tokens,
            max_num_seqs=recipe.max_num_seqs,
            ttft_slo_s=math.inf,
            tbt_slo_s=math.inf,
            seed=seed,
        ),
        requests,
    )
    simulation.run()
    result = result_of(simulation)
    return result, sum(requests.output_lengths) / result.duration_s


def kv_tokens(result: SimulationResult) -> str:
    """Return the tokens of KV that an instance holds, for people."""
    return result.instance.split(", ")[-1].split(" ")[0]


def print_recipe(recipe: Recipe, num_requests: int, console: Console) -> None:
    """Print what is published of each shape, and the same simulated."""
    console.print(f"\n{recipe.source}; here simulated, seed 0\n")
    console.print("| shape | run | KV tokens | requests/s | output tok/s | mean TTFT | mean gap |")
    console.print("|---|---|---|---|---|---|---|")
    for run in recipe.runs:
        held = f"{run.kv_tokens:,}" if run.kv_tokens is not None else ""
        gap = f"{run.gap_ms:.1f} ms" if run.gap_ms is not None else ""
        console.print(
            f"| {run.shape} | published | {held} | {run.requests_per_s:.2f} | "
            f"{run.output_tokens_per_s:.0f} | {run.ttft_s:.1f} s | {gap} |"
        )
        requests = workload(recipe, run.output_tokens, num_requests, seed=0)
        for num_prefill in (0, *recipe.prefill_engines):
            result, output_rate = play(recipe, run.shape, requests, num_prefill=num_prefill)
            parts = 1 + num_prefill
            where = f"{num_prefill}P1D, an engine" if num_prefill else "here"
            console.print(
                f"| | {where} | {kv_tokens(result)} | "
                f"{num_requests / result.duration_s / parts:.2f} | {output_rate / parts:.0f} | "
                f"{result.ttft_s.mean:.1f} s | {result.tbt_ms.mean:.1f} ms |"
            )
    print_assumed(recipe.assumed, console)


def print_batches(console: Console) -> None:
    """Print output tokens a second of two nodes for each batch and shape of the last recipe."""
    recipe = msgspec.structs.replace(
        H800X16, rate=math.inf, max_num_seqs=512, chunk_tokens=CHUNK_TOKENS
    )
    names = [f"{shape}{f', {num}P1D' if num else ''}" for shape, num in BATCH_SHAPES]
    console.print("\n16xH800, 1,000 in, 512 out; output tok/s of two nodes, mean gap, TTFT\n")
    console.print(f"| batch | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for batch in BATCHES:
        cells = []
        for shape, num_prefill in BATCH_SHAPES:
            requests = workload(recipe, recipe.output_tokens, batch, seed=0)
            result, output_rate = play(recipe, shape, requests, num_prefill=num_prefill)
            cells.append(
                f"{2 * output_rate / result.num_nodes:,.0f}, {result.tbt_ms.mean:.1f} ms, "
                f"{result.ttft_s.mean:.1f} s"
            )
        console.print(f"| {batch} | {' | '.join(cells)} |")
    print_assumed(BATCH_ASSUMED, console)


def print_assumed(assumed: Mapping[str, str], console: Console) -> None:
    """Print what was assumed, a line each."""
    console.print()
    for what, why in assumed.items():
        console.print(f"- {what}: {why}")


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One half of the published run on 128 GPUs whose experts are shared out over nodes."""

    role: str
    num_nodes: int
    engine: str
    """Engine of the simulator: each GPU is an instance, which computes whole chunks of prompts, or
    finds all but the last token of its prompts in its cache, as after a hand-over."""
    input_tokens: int
    output_tokens: int
    num_each: int
    """Requests of a GPU."""
    num_played: int | None
    """GPUs, if not all."""
    published: int
    """Tokens a second and node."""


GOAL_MODEL, GOAL_HARDWARE = "kimi-k2-instruct", "h200x8"
GOAL_SOURCE = "LMSYS, 07/2025: K2-Instruct FP8, prompts of 2,000, answers of 100, 128 H200"
GOALS = (
    Goal(role="prefill", num_nodes=4, engine="coupled-chunked", input_tokens=2000,
         output_tokens=1, num_each=41, num_played=None, published=56_000),
    Goal(role="decode", num_nodes=12, engine="coupled-prefix", input_tokens=2049,
         output_tokens=100, num_each=480, num_played=8, published=24_000),
)  # fmt: skip
DEEPEP_LINK = 8 * 45e9
"""Bytes a second of a node's eight cards, by DeepEP's own measure."""
BALANCE = 0.9
GOAL_WAYS = (
    ("in turn, cards as in configs/hardware", ExpertSends(balance=BALANCE), None),
    ("hidden, cards as in configs/hardware", ExpertSends(balance=BALANCE, hidden=True), None),
    ("in turn, cards as DeepEP's", ExpertSends(balance=BALANCE), DEEPEP_LINK),
    ("hidden, cards as DeepEP's", ExpertSends(balance=BALANCE, hidden=True), DEEPEP_LINK),
)
"""(sends, how they are counted, bytes a second of a node instead of the hardware's)."""
GOAL_ASSUMED = {
    "attention": "each GPU is an instance with sequences of its own, and reads all weights but the "
    "routed experts, which all GPUs of the part share (data and expert parallel, as published)",
    "prefill": "41 prompts of 2,000 a GPU at once, in chunks of 8,192 tokens, answers of a token: "
    "pushing KV on is not counted (4 GB/s a node at the published rate, of 190)",
    "decode": "480 sequences a GPU (the published size of its graphs), all at once; prompts are 4 "
    "blocks of 512 tokens that are cached after the first, and a token of their own, in place of a "
    "hand-over; tokens are counted from the last first token to the first last one",
    "instances": "prefill plays all 32, which step together; decode plays 8 of 96, each as if all "
    "others had as many rows, since all are alike; the Conductor places requests",
    "sends": "a row goes in FP8 once to each other node that has one of its 8 experts, on from "
    "there over NVLink, and comes back in bfloat16 (DeepEP's kernels for prefill; those of low "
    "latency, which send a row to each expert, would send more)",
    "experts": "chosen evenly but for the ranks' rows, whose mean is 0.9 of the most: what our "
    "placement of experts is held to (`benchmarks experts` measures 0.98); no redundant experts",
    "in turn, hidden": "products wait for sends, or a step is computed as two halves, each of "
    "which reads the weights, and takes as long as its products or its sends, whichever is more",
    "cards": "190 GB/s a node (Mooncake, FAST'25), or 45 a card: DeepEP's README has 61 GB/s for 4 "
    "nodes of H800 with 400 Gbit/s, of which a quarter stays in the node",
    "step costs": _costs(GOAL_MODEL, GOAL_HARDWARE) + " That is the run of this "
    "table, sends included: prefill is not independent of it",
    "missing for it on machines": "GPUs that serve with -ep, ranks of one group on several hosts, "
    "rows sent to their experts' ranks alone, FP8 on the way, two half batches in turn, and 128 "
    "GPUs",
}


def play_goal(goal: Goal, sends: ExpertSends, link: float | None, num_nodes: int) -> float:
    """Return the tokens a second and node of one half of the run, simulated on `num_nodes`."""
    hardware = figures(GOAL_HARDWARE, HardwareFigures)
    if link is not None:
        hardware = msgspec.structs.replace(hardware, link_bytes_per_s=link)
    gpus = num_nodes * hardware.num_gpus
    played = goal.num_played or gpus
    own, prompts = math.ceil(goal.input_tokens / TRACE_BLOCK_TOKENS), goal.num_each * played
    decodes = goal.role == "decode"
    shared = own - 1 if decodes else 0
    lines = [
        TraceLine(
            timestamp=0.0,
            input_length=goal.input_tokens,
            output_length=goal.output_tokens,
            hash_ids=[*range(shared), *(own * number + place for place in range(shared, own))],
        )
        for number in range(1, prompts + 1)
    ]
    starts: list[float] = []
    ends: list[float] = []
    times: Counter[float] = Counter()

    def receive(_: Arrival, event: OutputEvent) -> None:
        now = simulation.world.heap.now()
        if isinstance(event, RequestOutput):
            if event.start == 0:
                starts.append(now)
            times[now] += len(event.tokens)
        else:
            ends.append(now)

    simulation = Simulation(
        SimulationConfig(
            model=figures(GOAL_MODEL, ModelFigures),
            hardware=hardware,
            shape=Shape(dp=gpus, ep=gpus),
            expert_sends=sends,
            num_played=goal.num_played,
            num_prefill=0,
            num_decode=1,
            engine=goal.engine,
            coupled_chunk_tokens=CHUNK_TOKENS,
            max_num_seqs=goal.num_each,
            ttft_slo_s=math.inf,
            tbt_slo_s=math.inf,
        ),
        Workload.replay(lines),
        on_output=receive,
    )
    simulation.run()
    if not decodes:
        tokens, seconds = prompts * goal.input_tokens, max(ends) - START_S
        return tokens / seconds / played * hardware.num_gpus
    first, last = max(starts), min(ends)
    counted = sum(num for at_s, num in times.items() if first < at_s <= last)
    return counted / (last - first) / played * hardware.num_gpus


def print_goals(console: Console) -> None:
    """Print the published run on 128 GPUs and the same simulated."""
    console.print(f"\n{GOAL_SOURCE}; tokens a second and node\n")
    nodes = " | ".join(f"{goal.role}, {goal.num_nodes} nodes" for goal in GOALS)
    console.print(f"| sends | {nodes} |\n|---{'|---' * len(GOALS)}|")
    console.print(f"| published | {' | '.join(f'{goal.published:,}' for goal in GOALS)} |")
    for name, sends, link in GOAL_WAYS:
        rates = (play_goal(goal, sends, link, goal.num_nodes) for goal in GOALS)
        console.print(f"| {name} | {' | '.join(f'{rate:,.0f}' for rate in rates)} |")
    print_assumed(GOAL_ASSUMED, console)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recipes", description=__doc__)
    parser.add_argument("--requests", type=int, help="of the first recipe, instead of all")
    args = parser.parse_args(argv)
    console = Console(width=200)
    console.print(f"{machine()}, load {load()}")
    for recipe in RECIPES:
        most = args.requests or recipe.num_requests
        print_recipe(recipe, min(most, recipe.num_requests), console)
    print_batches(console)
    print_goals(console)
    return 0
