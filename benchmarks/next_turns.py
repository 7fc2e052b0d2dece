"""First tokens of agents' next turns, and how much of what was said before is found in the cache:
`python -m benchmarks next-turns`.

Agents ask, use a tool for a while, and ask again with all that was said before, the answers
included. Meanwhile another tenant's prompts, which share nothing, go through the pools. Simulated
on Kimi-K2: with requests that keep nothing, with kept prompts, and with kept answers, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from rich.console import Console
from rich.table import Table

from mooncake.base import GenerateRequest, SamplingParams, pack_tokens
from mooncake.base.request import FinalEvent, OutputEvent
from mooncake.launch.config.shipped import figures
from mooncake.sim.simulation import START_S, Simulation, SimulationConfig
from mooncake.sim.workload import STOP_TOKEN, Arrival, TraceLine, Workload
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures
from mooncake.sim.world.runner import VOCAB_SIZE

BLOCK_TOKENS = 64
KEEP_S = 300.0
HBM_TOKENS = 24_000
TOOLS_TOKENS = 1_024
"""Tokens of the description of tools with which all agents begin."""
FIRST_TOKENS, TOOL_TOKENS = (1_000, 2_000), (300, 600)
TURNS = (6, 6)
OTHER_TOKENS, OTHER_ANSWER = (4_000, 8_000), 4
CLUSTERS = {"2P2D": (2, 2), "2 colocated": (0, 2)}
ASKED: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "the prompt": {"keeps_answer": False},
    "prompt and answer": {"keeps_answer": True},
}
"""What the agents' requests ask the pool to keep."""


def words(name: str, count: int) -> list[int]:
    """Return the same tokens for the same name; others share none of their blocks."""
    return random.Random(name).choices(range(1, VOCAB_SIZE), k=count)


@dataclass(frozen=True)
class Turn:
    """One request: what it adds to the conversation, and the pause before it."""

    index: int
    num_fresh: int
    num_answer: int
    pause_s: float
    begins: bool = False
    """Whether it begins with the description of tools."""

    def fresh(self) -> list[int]:
        """Return the tokens that it adds."""
        tools = words("tools", TOOLS_TOKENS) if self.begins else []
        return tools + words(str(self.index), self.num_fresh - len(tools))


@dataclass(frozen=True)
class Load:
    """All requests, and when conversations begin. A request's index names its answer."""

    sessions: list[tuple[float, list[Turn]]]
    others: list[tuple[float, Turn]]

    def workload(self) -> Workload:
        """Return what the simulator has to know: how long answers and contexts are."""
        turns = sorted(
            [
                *(turn for _, each in self.sessions for turn in each),
                *(one for _, one in self.others),
            ],
            key=lambda turn: turn.index,
        )
        longest = max(
            sum(turn.num_fresh + turn.num_answer for turn in each) for _, each in self.sessions
        )
        longest = max(longest, OTHER_TOKENS[1])
        line = TraceLine(timestamp=0.0, input_length=longest, output_length=1, hash_ids=[])
        return Workload(arrivals=[
            Arrival(index=turn.index, at_s=0.0, line=line, num_output_tokens=turn.num_answer)
            for turn in turns
        ])  # fmt: skip


def load_of(
    num_agents: int,
    answer_tokens: tuple[int, int],
    pause_s: tuple[float, float],
    others_per_s: float,
    seed: int,
) -> Load:
    """Return agents that begin within a pause of one another, and others as long as these run."""
    draw, indexes = random.Random(seed), count()
    sessions = []
    for _ in range(num_agents):
        first = TOOLS_TOKENS + draw.randint(*FIRST_TOKENS)
        turns = [Turn(next(indexes), first, draw.randint(*answer_tokens), 0.0, begins=True)]
        turns += [
            Turn(
                next(indexes), draw.randint(*TOOL_TOKENS), draw.randint(*answer_tokens),
                draw.uniform(*pause_s),
            )
            for _ in range(draw.randint(*TURNS) - 1)
        ]  # fmt: skip
        sessions.append((draw.uniform(0, pause_s[1]), turns))
    end_s = max(at_s + sum(turn.pause_s for turn in turns) for at_s, turns in sessions)
    others, at_s = [], draw.expovariate(others_per_s)
    while at_s < end_s:
        others.append((at_s, Turn(next(indexes), draw.randint(*OTHER_TOKENS), OTHER_ANSWER, 0.0)))
        at_s += draw.expovariate(others_per_s)
    return Load(sessions, others)


@dataclass
class Seen:
    """What became of the turns after the first of each agent. Counts are of tokens."""

    ttft_s: list[float] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    """Said before each of these turns, answers included."""
    missed: list[int] = field(default_factory=list)
    """How many of these were not found in a cache."""
    in_last_block: list[int] = field(default_factory=list)
    """How many of these lie in the last block, which was not full when the turn before ended."""


class Agents:
    """Plays the conversations of a load on a simulated cluster."""

    def __init__(self, simulation: Simulation, load: Load, asked: Mapping[str, Any]) -> None:
        self.seen = Seen()
        self._world = simulation.world
        self._block_tokens = simulation.config.block_tokens
        self._asked = asked
        self._num_open = len(load.sessions)
        heap = self._world.heap
        for at_s, turns in load.sessions:
            heap.at(START_S + at_s, partial(self._send, [], turns, 0))
        for at_s, one in load.others:
            heap.at(START_S + at_s, partial(self._send_other, one))

    def run(self) -> None:
        """Let time pass until all conversations have ended."""
        heap = self._world.heap
        while self._num_open:
            heap.run_until(heap.now() + 1.0)

    def _request(self, turn: Turn, prompt: list[int], tenant: str, **more: Any) -> GenerateRequest:
        sampling = SamplingParams(
            max_tokens=turn.num_answer, seed=turn.index, stop_token_ids=frozenset({STOP_TOKEN})
        )
        return GenerateRequest(
            request_id=f"r{turn.index}", prompt=pack_tokens(prompt), sampling=sampling,
            tenant=tenant, **more,
        )  # fmt: skip

    def _send(self, said: list[int], turns: list[Turn], number: int) -> None:
        turn, heap = turns[number], self._world.heap
        prompt = said + turn.fresh()
        more = dict(self._asked)
        if more:
            more["num_kept_tokens"] = len(prompt)
        answer: list[int] = []
        sent_s, first_s = heap.now(), list[float]()

        def receive(event: OutputEvent) -> None:
            if not isinstance(event, FinalEvent):
                first_s.append(heap.now())
                answer.extend(event.tokens)
                return
            if len(answer) != turn.num_answer:
                raise RuntimeError(f"turn {turn.index} ended with {event.reason}")
            if said:
                self._note(len(said), event.num_cached_tokens, first_s[0] - sent_s)
            self._num_open -= number + 1 == len(turns)
            if number + 1 < len(turns):
                go_on = partial(self._send, prompt + answer, turns, number + 1)
                heap.after(turns[number + 1].pause_s, go_on)

        self._world.send(self._request(turn, prompt, "agents", **more), receive)

    def _note(self, num_said: int, num_cached: int, ttft_s: float) -> None:
        # The answer's last token was sampled, not computed.
        in_last_block = num_said - (num_said - 1) // self._block_tokens * self._block_tokens
        self.seen.ttft_s.append(ttft_s)
        self.seen.said.append(num_said)
        self.seen.missed.append(max(0, num_said - num_cached))
        self.seen.in_last_block.append(in_last_block)

    def _send_other(self, one: Turn) -> None:
        if self._num_open:
            self._world.send(self._request(one, one.fresh(), "others"), lambda _event: None)


def play(
    load: Load,
    cluster: str,
    asked: str,
    pool_tokens: int,
    ssd_bytes_per_s: float = 0.0,
    block_tokens: int = BLOCK_TOKENS,
    keep_s: float = KEEP_S,
) -> Seen:
    """Play a load on one of `CLUSTERS`, whose requests ask for one of `ASKED`, for so long."""
    num_prefill, num_decode = CLUSTERS[cluster]
    config = SimulationConfig(
        model=figures("kimi-k2-thinking", ModelFigures),
        hardware=figures("h200x8", HardwareFigures),
        num_prefill=num_prefill,
        num_decode=num_decode,
        block_tokens=block_tokens,
        hbm_tokens=HBM_TOKENS,
        pool_tokens=pool_tokens,
        decode_pools=True,
        ssd_tokens=16 * pool_tokens if ssd_bytes_per_s else 0,
        ssd_bytes_per_s=ssd_bytes_per_s or 3e9,
    )
    wanted = dict(ASKED[asked])
    if wanted:
        wanted["keep_s"] = keep_s
    agents = Agents(Simulation(config, load.workload()), load, wanted)
    agents.run()
    return agents.seen


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every cluster and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks next-turns", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--answer", type=int, nargs=2, default=[500, 700], metavar="TOKENS")
    parser.add_argument("--pause-s", type=float, nargs=2, default=[60.0, 90.0], metavar="S")
    parser.add_argument(
        "--others-per-s", type=float, default=0.8, help="other tenants' prompts a second"
    )
    parser.add_argument(
        "--pool-tokens", type=int, default=80_000, help="DRAM of each instance's pool"
    )
    parser.add_argument("--ssd-bytes-per-s", type=float, default=0.0, help="0: there is no SSD")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS)
    parser.add_argument(
        "--keep-s", type=float, default=KEEP_S, help="how long what is kept is kept"
    )
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args(argv)
    load = load_of(
        args.agents, (args.answer[0], args.answer[1]), (args.pause_s[0], args.pause_s[1]),
        args.others_per_s, args.seed,
    )  # fmt: skip
    table = Table(
        "cluster", "kept", "turns", "said before", "missed", "in the last block", "mean TTFT", "p90"
    )
    for cluster in args.clusters:
        for asked in ASKED:
            seen = play(
                load, cluster, asked, args.pool_tokens, args.ssd_bytes_per_s, args.block_tokens,
                args.keep_s,
            )  # fmt: skip
            p90 = statistics.quantiles(seen.ttft_s, n=10)[-1]
            table.add_row(
                cluster, asked, str(len(seen.said)), f"{statistics.mean(seen.said):,.0f}",
                f"{statistics.mean(seen.missed):,.0f}",
                f"{statistics.mean(seen.in_last_block):.0f}",
                f"{1e3 * statistics.mean(seen.ttft_s):.0f} ms", f"{1e3 * p90:.0f} ms",
            )  # fmt: skip
    Console().print(table)
    return 0
