"""Small traces, and the shipped figures of models and hardware, for tests of the simulator."""

from __future__ import annotations

import json
from random import Random

from mooncake.launch.config.shipped import figures
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.simulation import Simulation, SimulationConfig
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine, Workload, parse_trace
from mooncake.sim.world.cost_model import HardwareFigures, ModelFigures


def model(name: str = "llama3-70b") -> ModelFigures:
    return figures(name, ModelFigures)


def hardware(name: str = "a800x8") -> HardwareFigures:
    return figures(name, HardwareFigures)


def line(
    timestamp: float = 0,
    input_length: int = 1000,
    output_length: int = 5,
    ids: list[int] | None = None,
) -> str:
    ids = ids if ids is not None else list(range(-(-input_length // TRACE_BLOCK_TOKENS)))
    record = {
        "timestamp": timestamp, "input_length": input_length, "output_length": output_length,
        "hash_ids": ids,
    }  # fmt: skip
    return json.dumps(record)


def sessions(num_requests: int, seed: int = 0, every_ms: float = 300.0) -> list[TraceLine]:
    """Return a trace of a few conversations whose prompts grow turn by turn."""
    random = Random(seed)
    histories: list[list[int]] = [[0] for _ in range(8)]
    next_id, lines = 1, []
    for number in range(num_requests):
        history = random.choice(histories)
        for _ in range(random.randrange(1, 6)):
            history.append(next_id)
            next_id += 1
        length = len(history) * TRACE_BLOCK_TOKENS - random.randrange(TRACE_BLOCK_TOKENS)
        lines.append(line(number * every_ms, length, random.randrange(1, 60), list(history)))
        if len(history) > 40:
            histories[histories.index(history)] = [0]
    return parse_trace(lines, "sessions")


def simulation(
    trace: list[TraceLine], num_prefill: int = 2, num_decode: int = 2, **changes: object
) -> Simulation:
    scheduler = SchedulerConfig(**changes.pop("scheduler", {}))  # type: ignore[arg-type]
    config = SimulationConfig(
        model=model(), hardware=hardware(), num_prefill=num_prefill, num_decode=num_decode,
        scheduler=scheduler, **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return Simulation(config, Workload.replay(trace))
