"""The time to the first token of long prompts on one to four nodes, by the simulator's costs:
`python -m benchmarks long-prompts`.

Each node computes its share of every layer (tensor parallel); several nodes share a prompt by
chunked pipeline parallelism (CPP: each node has a part of the layers, chunks follow one another) or
by sequence parallelism (SP: each node has all layers and a part of the tokens of every chunk).
Mooncake (FAST'25, section 5.1) compares them by what has to cross the network, and how often.

SP is counted in its favour: tokens are dealt out so that all nodes attend to equally many; every
node keeps the KV of the whole context, so that only new tokens' KV is gathered, once a layer;
nothing else waits for the network.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mooncake.base import Shape
from mooncake.launch.config.shipped import figures
from mooncake.sim.world.cost_model import (
    ACTIVATION_BYTES,
    HardwareFigures,
    InstanceCost,
    ModelFigures,
)

CHUNK_TOKENS = 8192
"""Tokens of a step of one node."""
LENGTHS = (125_878, 131_072, 262_144, 524_288, 1_048_576)
"""The longest of the published conversation trace, then synthetic ones."""
NODES = (2, 4)


@dataclass(frozen=True)
class Setup:
    """A model on nodes, each of this shape."""

    model: str
    hardware: str
    tp: int
    dcp: int

    def cost(self, pp: int = 1) -> InstanceCost:
        """Return the costs of an instance of `pp` stages, a node each."""
        return InstanceCost(
            figures(self.model, ModelFigures),
            figures(self.hardware, HardwareFigures),
            Shape(tp=self.tp, dcp=self.dcp, pp=pp),
        )


SETUPS = (Setup("kimi-k2-thinking", "h200x8", 8, 8), Setup("llama3-70b", "a800x8", 8, 1))


def cpp_bytes(cost: InstanceCost, num_tokens: int) -> float:
    """Return what each node but the last sends: the activations of every token, once."""
    return num_tokens * cost.model.hidden_size * ACTIVATION_BYTES


def sp_bytes(cost: InstanceCost, num_tokens: int, num_nodes: int) -> float:
    """Return what each node receives: the KV of the other nodes' tokens."""
    return num_tokens * cost.model.kv_bytes_per_token * (num_nodes - 1) / num_nodes


def sp_s(cost: InstanceCost, num_tokens: int, num_nodes: int) -> float:
    """Return the seconds of a prompt on nodes that each compute a part of every chunk."""
    model, hardware = cost.model, cost.hardware
    seconds, start = 0.0, 0
    while start < num_tokens:
        new = min(num_nodes * CHUNK_TOKENS, num_tokens - start)
        mine = -(-new // num_nodes)
        pairs = (new * start + new * (new + 1) // 2) // num_nodes
        gathered = sp_bytes(cost, new, num_nodes)
        seconds += cost.step_s(mine, pairs, start + new)
        seconds += model.num_layers * hardware.transfer_latency_s
        seconds += gathered / hardware.link_bytes_per_s
        start += new
    return seconds


def row(setup: Setup, num_tokens: int) -> list[str]:
    """Return the cells of one length: one node, then CPP and SP on each number of nodes."""
    one = setup.cost()
    alone = one.prefill_s(num_tokens, 0, CHUNK_TOKENS)
    cells = [f"{num_tokens:,}", f"{alone:.1f} s"]
    for nodes in NODES:
        staged = setup.cost(nodes).prefill_s(num_tokens, 0, CHUNK_TOKENS)
        spread = sp_s(one, num_tokens, nodes)
        for seconds, num_bytes in (
            (staged, cpp_bytes(one, num_tokens)),
            (spread, sp_bytes(one, num_tokens, nodes)),
        ):
            cells.append(f"{seconds:.1f} s ({alone / seconds:.2f}x), {num_bytes / 1e9:.1f} GB")
    return cells


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks long-prompts", description=__doc__)
    parser.parse_args(argv)
    for setup in SETUPS:
        shape = setup.cost().shape
        print(f"\n{setup.model} on nodes of {setup.hardware}, {shape} each, chunks of "
              f"{CHUNK_TOKENS:,} tokens a node; seconds, speed-up, bytes a node\n")  # fmt: skip
        ways = [f"{way}, {nodes} nodes" for nodes in NODES for way in ("CPP", "SP")]
        print(f"| prompt | one node | {' | '.join(ways)} |\n|{'---|' * (2 + len(ways))}")
        for num_tokens in LENGTHS:
            print(f"| {' | '.join(row(setup, num_tokens))} |")
        print(f"\n{setup.cost().hardware.remark}")
    return 0
