"""`mooncake eval` counts how many answers of an OpenAI endpoint are right. The work is done by
`bench.evaluate`; here are the table and the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from mooncake.base import ConfigError
from mooncake.cli.command import Command
from mooncake.cli.results import check_writable, write
from mooncake.launch.config.bench_settings import BenchServe
from mooncake.launch.config.options import SomeOf, count, same_as, setting, text
from mooncake.launch.config.train_settings import weights
from mooncake.tasks.mix import TASKS, evaluation_samples
from mooncake.telemetry.terminal import progress, show_rows

if TYPE_CHECKING:
    from mooncake.api.http.client import HttpClient
    from mooncake.bench.evaluate import Score
    from mooncake.bench.tool_calls import ToolCalls

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


def run(wanted: Eval) -> int:
    """Evaluate. Return 1 if a request failed, or if a task is below its required share."""
    from mooncake.api.http.client import HttpClient
    from mooncake.api.http.event_loop import run_in_loop

    for task, _ in wanted.at_least:
        if task not in wanted.tasks:
            raise ConfigError(
                f"at-least: {task} is not among the tasks that are sent; add it to --tasks"
            )
    check_writable(wanted.json)
    return run_in_loop(_run(wanted, HttpClient(wanted.base_url, insecure=wanted.insecure)))


async def _run(wanted: Eval, client: HttpClient) -> int:
    from mooncake.bench.evaluate import Endpoint, evaluate
    from mooncake.bench.serve import first_model
    from mooncake.bench.tool_calls import ToolCalls

    headers = {"Authorization": f"Bearer {wanted.api_key}"} if wanted.api_key else {}
    console = Console(stderr=True)
    try:
        model = wanted.model or await first_model(client, headers)
        samples = {
            task: evaluation_samples(task, wanted.num_samples, wanted.seed) for task in wanted.tasks
        }
        whole, done = sum(map(len, samples.values())), itertools.count(1)
        with progress("answers", whole, console) as show:
            scores = await evaluate(
                Endpoint(client, headers, model, wanted.max_tokens),
                samples,
                wanted.max_concurrency,
                lambda: show(next(done), whole),
            )
    finally:
        client.close()
    tools = ToolCalls.total(score.tool_calls for score in scores)
    _show(model, scores, tools)
    document = {
        "model": model, "seed": wanted.seed, "tool_calls": tools.document(),
        "tasks": {score.task: score.document() for score in scores},
    }  # fmt: skip
    write(wanted.json, json.dumps(document, indent=1) + "\n")
    failures = [why for score in scores for why in score.failures]
    for why in failures[:3]:
        console.print(f"failed: {why}", highlight=False, markup=False)
    found = {score.task: score.accuracy for score in scores}
    below = [(task, share) for task, share in wanted.at_least if found[task] < share]
    for task, share in below:
        console.print(f"{task}: {found[task]:.1%} are right, fewer than {share:.1%}")
    return 1 if failures or below else 0


def _show(model: str, scores: Sequence[Score], tools: ToolCalls) -> None:
    rows = [["task", "samples", "right", "standard error", "failed"]]
    rows += [
        [
            score.task, str(score.num_samples), f"{score.accuracy:.1%}",
            f"{score.standard_error:.1%}", str(len(score.failures)),
        ]
        for score in scores
    ]  # fmt: skip
    show_rows(f"{model}: answers that are right", rows, Console())
    if tools.num_answers:
        print(
            f"{tools.num_answers} answers to requests with tools: trigger similarity "
            f"{_share(tools.trigger_similarity)}, schema accuracy {_share(tools.schema_accuracy)} "
            f"of {tools.num_called} that call"
        )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


COMMANDS = (
    Command(
        words="eval", settings=Eval, run=run, takes_file=True,
        examples="mooncake eval --num-samples 200 --json scores.json\n"
        "mooncake eval --base-url http://10.0.0.7:8000 --tasks sum,call "
        "--at-least sum=0.95",
        notes="Samples are generated; `mooncake train` trains on none of them. Answers are "
        "greedy. An answer\nabout the project is right if it is the one that k2-demo learns, "
        "word for word. For requests with\ntools the command also prints the measures of "
        "Moonshot's K2 Vendor Verifier: trigger similarity\n(F1 of calling at all) and schema "
        "accuracy (answers whose calls fit what was declared).",
    ),
)  # fmt: skip
