"""Settings of `mooncake eval`."""

from __future__ import annotations

import dataclasses

from mooncake.launch.config.bench_settings import BenchServe
from mooncake.launch.config.options import SomeOf, count, same_as, setting, text
from mooncake.launch.config.train_settings import weights
from mooncake.tasks.mix import TASKS

ENDPOINT, TASK, RESULT = "endpoint", "tasks", "result"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    # fmt: off
    base_url: str = setting("http://127.0.0.1:8000", text, ENDPOINT, "URL", "URL of the server",
        short="--url")
    api_key: str | None = same_as(BenchServe, "api_key", ENDPOINT)
    insecure: bool = same_as(BenchServe, "insecure", ENDPOINT)
    model: str | None = same_as(BenchServe, "model", ENDPOINT)
    tasks: tuple[str, ...] = setting(tuple(TASKS), SomeOf(*TASKS), TASK, "TASK,…",
        "tasks to send")
    num_samples: int = setting(100, count(1), TASK, "N", "number of samples of each task")
    seed: int = setting(0, count(0), TASK, "N", "seed of the samples")
    max_tokens: int = setting(512, count(1), TASK, "N", "most tokens of an answer")
    max_concurrency: int = setting(8, count(1), TASK, "N", "most requests at a time")
    at_least: tuple[tuple[str, float], ...] = setting((), weights, RESULT, "TASK=SHARE",
        "exit with 1 if the accuracy of a task is lower; may be repeated", repeat=True)
    json: str | None = setting(None, text, RESULT, "OUT", "write all figures here")
    # fmt: on
