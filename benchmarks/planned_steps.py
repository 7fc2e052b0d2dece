"""What the targets of an engine do, without a model: `python -m benchmarks planned-steps --trace
FILE`. The shipped engine plans steps that take as long as those of k2-small on two cores of an EPYC
(Zen 4), with a scatter of 10 %, and nothing else takes time.

Printed are the share of good requests of an open load of conversations, and the tokens a second of
clients that send the next request as soon as they have their answer; without targets and with.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.support.goodput_figures import Limits, Outcome
from benchmarks.support.sessions import Session, Turn, conversations, shorter
from mooncake.base import CostSample, GenerateRequest, SamplingParams, pack_tokens
from mooncake.base.request import Grammar
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import StepPlan, StepResult
from mooncake.engine.sequence import Sequence as EngineSequence
from mooncake.launch.worker.profile import DECODE_SHAPES
from mooncake.sim.files import read_trace
from mooncake.telemetry.stats import slow_gap_mean

MAX_MODEL_LEN = 8192
LIMITS = Limits(ttft_s=5.0, tbt_s=0.15)
WITHOUT = EngineConfig(
    num_blocks=600, max_num_seqs=16, max_batched_tokens=2048, max_chunk_tokens=2048,
    max_model_len=MAX_MODEL_LEN, max_waiting=1024,
)  # fmt: skip
WITH = dataclasses.replace(WITHOUT, max_gap_s=0.12, max_gap_is_target=True, first_token_s=4.0)
PREFILL_PACE = 1.8
"""A prefill worker that shares the machine has one core."""
CLOSED = (
    (8, 1024, 64), (16, 1024, 64), (8, 512, 256), (8, 2000, 256), (4, 512, 200), (2, 1024, 64)
)  # fmt: skip
REQUESTS_EACH = 15
NOISE = 0.1


def step_s(slots: Sequence[tuple[int, int]], prefill_pace: float = 1.0) -> float:
    """Return the seconds of a step of (new tokens, tokens before) each, fitted to measured ones."""
    streams = [before for new, before in slots if new == 1]
    chunks = [(new, before) for new, before in slots if new > 1]
    seconds = 0.0163 + 0.0028 * len(streams) + 4.2e-6 * sum(streams)
    if chunks:
        chunks_s = sum(1.28e-3 * n + 6.1e-7 * n * before + 6.6e-5 * before for n, before in chunks)
        seconds += prefill_pace * (0.022 + chunks_s)
    return seconds


class _Runner:
    """Keeps the step that the engine submits."""

    plan: StepPlan

    def prepare(self, grammar: Grammar) -> None:
        del grammar

    def submit(self, plan: StepPlan) -> None:
        self.plan = plan


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A request under way."""

    turn: Turn
    sent_s: float
    times_s: list[float] = dataclasses.field(default_factory=list)


class _Machine:
    """One engine, whose steps take simulated time."""

    def __init__(self, config: EngineConfig, seed: int, prefill_pace: float) -> None:
        self._runner = _Runner()
        self._engine = Engine(config, "planned", self._runner)
        self._random = random.Random(seed)
        self._pace = prefill_pace
        self._engine.calibrate(map(self._profiled, DECODE_SHAPES))
        self._live: dict[int, _Live] = {}
        self._due: list[tuple[float, int, Turn]] = []
        self._count = itertools.count(1)

    def send(self, at_s: float, turn: Turn) -> None:
        heapq.heappush(self._due, (at_s, next(self._count), turn))

    def run(self, on_end: Callable[[float, Turn, Outcome], None]) -> None:
        """Run until all requests have ended."""
        now, ends_s, began_s = 0.0, None, 0.0
        while self._due or self._live:
            if ends_s is None:
                self._engine.tick(now)
                if not self._engine.idle and self._live:
                    began_s, ends_s = now, now + self._seconds(self._runner.plan)
            if ends_s is None or (self._due and self._due[0][0] < ends_s):
                now, number, turn = heapq.heappop(self._due)
                self._add(now, number, turn)
                continue
            now, ends_s = ends_s, None
            self._end(now, now - began_s, on_end)

    def _seconds(self, plan: StepPlan) -> float:
        slots = [(len(slot.tokens), slot.start) for slot in plan.slots]
        return step_s(slots, self._pace) * self._random.lognormvariate(0, NOISE)

    def _profiled(self, shape: tuple[int, int, int]) -> CostSample:
        sequences, new, before = shape
        seconds = step_s([(new, before)] * sequences, self._pace)
        sample = CostSample(sequences * new, sequences * before, sequences, seconds)
        return sample.of_streams() if new == 1 else sample

    def _add(self, now: float, number: int, turn: Turn) -> None:
        request = GenerateRequest(
            request_id=str(number),
            prompt=pack_tokens(turn.fresh),
            sampling=SamplingParams(max_tokens=turn.output_len, temperature=0.0, ignore_eos=True),
        )
        self._live[number] = _Live(turn=turn, sent_s=now)
        self._engine.add(EngineSequence(number, request), now)

    def _end(
        self, now: float, seconds: float, on_end: Callable[[float, Turn, Outcome], None]
    ) -> None:
        plan = self._runner.plan
        tokens = {slot.sequence_id: [1] for slot in plan.slots if slot.sample}
        result = StepResult(step_id=plan.step_id, seconds=seconds, tokens=tokens)
        for sequence, output in self._engine.on_step(result, now):
            live = self._live[sequence.sequence_id]
            live.times_s.append(now)
            if output.finish is not None:
                self._engine.release(sequence)
                del self._live[sequence.sequence_id]
                gaps_s = [after - before for before, after in itertools.pairwise(live.times_s)]
                ttft_s = live.times_s[0] - live.sent_s
                outcome = Outcome(end="whole", ttft_s=ttft_s, tbt_s=slow_gap_mean(gaps_s))
                on_end(now, live.turn, outcome)


def open_loop(
    config: EngineConfig, sessions: Sequence[Session], seed: int, *, only_first: bool = False
) -> list[Outcome]:
    """Return what becomes of the first turn of each session. only_first: on a prefill worker."""
    outcomes: list[Outcome] = []
    machine = _Machine(config, seed, PREFILL_PACE if only_first else 1.0)
    for session in sessions:
        turn = session.turns[0]
        machine.send(session.at_s, dataclasses.replace(turn, output_len=1) if only_first else turn)
    machine.run(lambda _now, _turn, outcome: outcomes.append(outcome))
    return outcomes


def closed_loop(config: EngineConfig, num_streams: int, num_in: int, num_out: int) -> float:
    """Return the tokens a second of clients that each send the next request at once."""
    source, left, ended_s = random.Random(1), REQUESTS_EACH * num_streams, 0.0
    machine = _Machine(config, 1, 1.0)

    def send(now: float) -> None:
        nonlocal left
        if left:
            left -= 1
            machine.send(now, Turn(fresh=draw(source, num_in), output_len=num_out))

    def on_end(now: float, _turn: Turn, _outcome: Outcome) -> None:
        nonlocal ended_s
        ended_s = now
        send(now)

    for _ in range(num_streams):
        send(0.0)
    machine.run(on_end)
    return REQUESTS_EACH * num_streams * num_out / ended_s


def draw(source: random.Random, count: int) -> list[int]:
    """Return random tokens."""
    return source.choices(range(1, 30_000), k=count)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks planned-steps", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, required=True, help="of conversations, JSONL")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.3, 0.5])
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=40, help="of each seed (40)")
    args = parser.parse_args(argv)
    lines = shorter(read_trace(str(args.trace)), MAX_MODEL_LEN)
    print("| requests/s | colocated, without | with | prefill, without | with |")
    print("|---|---|---|---|---|")
    for rate in args.rates:
        cells = []
        for only_first, config in itertools.product((False, True), (WITHOUT, WITH)):
            outcomes = [
                outcome
                for seed in range(1, args.seeds + 1)
                for outcome in open_loop(
                    config,
                    conversations(lines, args.requests, rate, draw, seed, recorded=False),
                    seed,
                    only_first=only_first,
                )
            ]
            cells.append(f"{sum(map(LIMITS.are_met, outcomes)) / len(outcomes):.0%}")
        print(f"| {rate:g} | {' | '.join(cells)} |", flush=True)
    print("\n| streams, tokens in, out | without | with |\n|---|---|---|")
    for shape in CLOSED:
        without, with_targets = (closed_loop(config, *shape) for config in (WITHOUT, WITH))
        print(
            f"| {', '.join(map(str, shape))} | {without:.1f} | {with_targets:.1f} "
            f"({with_targets / without - 1:+.0%}) |",
            flush=True,
        )
    return 0
