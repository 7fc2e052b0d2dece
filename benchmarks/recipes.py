"""Published runs of Kimi-K2 beside the same runs simulated: `python -m benchmarks recipes`.

The simulator plays the requests of a recipe on one instance of its shape, which computes prompts
and decodes both, as the published engine did, and on instances of prefill and of decode. Every
figure that the recipe does not give is a line of `ASSUMED`.
"""

from __future__ import annotations

import argparse
import math
from random import Random

import msgspec
from rich.console import Console

from benchmarks.support.servers import load, machine
from mooncake.base import Shape
from mooncake.launch.config.shipped import figures
from mooncake.sim.results.result import SimulationResult, result_of
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine, Workload
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures

MODEL, HARDWARE = "kimi-k2-thinking", "h200x8"
INPUT_TOKENS, MAX_OUTPUT_TOKENS = 8000, 4000
NUM_REQUESTS, RATE = 1000, 100.0
CHUNK_TOKENS = 8192
SOURCE = "vLLM's recipe for Kimi-K2-Thinking, 8xH200, random prompts of 8,000 and outputs to 4,000"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe says of one shape."""

    shape: Shape
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: float
    kv_tokens: int

    @property
    def output_tokens(self) -> float:
        """Mean tokens of an answer."""
        return self.output_tokens_per_s / self.requests_per_s


RUNS = (
    Published(
        shape=Shape(tp=8), requests_per_s=1.25, output_tokens_per_s=485.78,
        total_tokens_per_s=10_462.57, ttft_s=271.0, kv_tokens=715_072,
    ),
    Published(
        shape=Shape(tp=8, dcp=8), requests_per_s=1.57, output_tokens_per_s=695.13,
        total_tokens_per_s=13_290.35, ttft_s=228.0, kv_tokens=5_721_088,
    ),
)  # fmt: skip

ASSUMED = {
    "answers": "most end before 4,000 tokens: output tokens by requests, both published, are 389 "
    "and 443 of a request; lengths are drawn from an exponential distribution of that mean",
    "chunks": f"{CHUNK_TOKENS} tokens a step, of prompts and decoding sequences together: the "
    "default of the published engine",
    "step costs": f"the rooflines of configs/models/{MODEL}.json and configs/hardware/"
    f"{HARDWARE}.json, whose every figure has its source there",
    "HBM": "0.9 used, 4 GB of them a GPU for activations, buffers and graphs",
    "other costs": "none: tokenizing, HTTP and the published engine's own scheduling between two "
    "steps are not counted beyond step_overhead_s",
}
"""What the recipe leaves open -> what is assumed, and why."""


def workload(mean_output: float, num_requests: int, seed: int) -> Workload:
    """Return the recipe's requests: no prompt shares a block with another."""
    random = Random(seed)
    each = math.ceil(INPUT_TOKENS / TRACE_BLOCK_TOKENS)
    lines = [
        TraceLine(
            timestamp=1e3 * number / RATE,
            input_length=INPUT_TOKENS,
            output_length=min(MAX_OUTPUT_TOKENS, 1 + int(random.expovariate(1 / mean_output))),
            hash_ids=list(range(number * each, (number + 1) * each)),
        )
        for number in range(num_requests)
    ]
    return Workload.replay(lines)


def play(
    run: Published, num_requests: int, *, num_prefill: int = 0, seed: int = 0
) -> tuple[SimulationResult, float]:
    """Return the result on one instance that does both, or on `num_prefill` and one of decode, and
    output tokens a second.
    """
    requests = workload(run.output_tokens, num_requests, seed)
    simulation = Simulation(
        SimulationConfig(
            model=figures(MODEL, ModelFigures),
            hardware=figures(HARDWARE, HardwareFigures),
            shape=run.shape,
            num_prefill=num_prefill,
            num_decode=1,
            engine="mooncake" if num_prefill else "coupled-chunked",
            coupled_chunk_tokens=CHUNK_TOKENS,
            prefill_chunk_tokens=CHUNK_TOKENS,
            ttft_slo_s=math.inf,
            tbt_slo_s=math.inf,
            seed=seed,
        ),
        requests,
    )
    simulation.run()
    result = result_of(simulation)
    return result, sum(requests.output_lengths) / result.duration_s


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One half of the published run on 128 GPUs whose experts are shared out over nodes."""

    role: str
    num_nodes: int
    tokens_per_gpu: int
    """Of a step."""
    context: int
    """Tokens that each attends to, on average."""
    reads_context: bool
    """Each token its own, from memory."""
    published: int
    """Tokens a second and node."""


GOAL_MODEL = "kimi-k2-instruct"
GOAL_SOURCE = "LMSYS, 07/2025: K2-Instruct FP8, prompts of 2,000, answers of 100, 128 H200"
GOALS = (
    Goal(role="prefill", num_nodes=4, tokens_per_gpu=CHUNK_TOKENS, context=1000,
         reads_context=False, published=56_000),
    Goal(role="decode", num_nodes=12, tokens_per_gpu=480, context=2050, reads_context=True,
         published=24_000),
)  # fmt: skip
DISPATCH_BYTES, COMBINE_BYTES = 1, 2
"""Of a value on its way to experts (FP8) and back (bfloat16)."""
GOAL_ASSUMED = {
    "batch": "480 sequences a GPU in decode (the published size of its graphs), 8,192 tokens a GPU "
    "in prefill",
    "attention": "each GPU has sequences of its own (data parallel), and reads all weights but the "
    "routed experts; of these a node holds its share",
    "network": "a token's 7,168 values go in FP8 once to each other node that has one of its 8 "
    "experts, and come back in bfloat16; experts are chosen evenly; link_bytes_per_s of the node",
    "missing here": "ranks on several hosts, GPUs, and shapes with -ep in the simulator, so "
    "nothing of this is simulated step by step: these are the two bounds that its figures set",
}


def goal_seconds(goal: Goal) -> tuple[float, float, int]:
    """Return the seconds of a step on the GPUs of one node, and on its network, and its tokens."""
    model, hardware = figures(GOAL_MODEL, ModelFigures), figures(HARDWARE, HardwareFigures)
    assert model.experts is not None

    def reached(precision: str) -> float:
        return hardware.flops[precision] * hardware.flops_efficiency[precision]

    tokens, hbm = goal.tokens_per_gpu, hardware.hbm_bytes_per_s * hardware.hbm_efficiency
    experts = model.experts.bytes_total / goal.num_nodes / hardware.num_gpus
    products_s = max(
        tokens * model.flops_per_token / reached(model.precision),
        (model.dense_bytes + experts) / hbm,
    )
    kv_bytes = tokens * goal.context * model.kv_bytes_per_token if goal.reads_context else 0
    pairs = tokens * goal.context
    attention_s = max(pairs * model.flops_per_pair / reached("bf16"), kv_bytes / hbm)
    chosen, others = model.experts.num_per_token, goal.num_nodes - 1
    away = others * (1 - (others / goal.num_nodes) ** chosen)
    each = (model.num_layers - 1) * model.hidden_size * (DISPATCH_BYTES + COMBINE_BYTES)
    of_node = tokens * hardware.num_gpus
    network_s = of_node * away * each / hardware.link_bytes_per_s
    return hardware.step_overhead_s + products_s + attention_s, network_s, of_node


def print_goals(console: Console) -> None:
    """Print what figures of the simulator say of the published run on 128 GPUs."""
    console.print(f"\n{GOAL_SOURCE}; tokens a second and node, by the simulator's figures\n")
    console.print("| part | nodes | published | GPUs alone | network alone | both in turn |")
    console.print("|---|---|---|---|---|---|")
    for goal in GOALS:
        gpus_s, network_s, tokens = goal_seconds(goal)
        rates = (tokens / each for each in (gpus_s, network_s, gpus_s + network_s))
        cells = " | ".join(f"{rate:,.0f}" for rate in (goal.published, *rates))
        console.print(f"| {goal.role} | {goal.num_nodes} | {cells} |")
    console.print()
    for what, why in GOAL_ASSUMED.items():
        console.print(f"- {what}: {why}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recipes", description=__doc__)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    args = parser.parse_args(argv)
    console = Console(width=200)
    console.print(f"{machine()}, load {load()}\n{SOURCE}; here simulated, seed 0\n")
    console.print("| shape | run | KV tokens | requests/s | output tok/s | mean TTFT |")
    console.print("|---|---|---|---|---|---|")
    for run in RUNS:
        console.print(
            f"| {run.shape} | published | {run.kv_tokens:,} | {run.requests_per_s} | "
            f"{run.output_tokens_per_s:.0f} | {run.ttft_s:.0f} s |"
        )
        for num_prefill in (0, 1, 2):
            result, output_rate = play(run, args.requests, num_prefill=num_prefill)
            rate, num_nodes = args.requests / result.duration_s, result.num_nodes
            where = f"{num_prefill}P1D, a node" if num_prefill else "here"
            tokens = result.instance.split(", ")[-1].split(" ")[0]
            console.print(
                f"| | {where} | {tokens} | {rate / num_nodes:.2f} | "
                f"{output_rate / num_nodes:.0f} | {result.ttft_s.mean:.0f} s |"
            )
    console.print()
    for what, why in ASSUMED.items():
        console.print(f"- {what}: {why}")
    print_goals(console)
    return 0
