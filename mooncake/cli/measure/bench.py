"""`mooncake bench serve|throughput|latency`: puts load on a server, or measures an engine alone.

Flags are those of `vllm bench`, so that scripts need not be changed.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mooncake.base import ConfigError
from mooncake.bench.arrivals import Arrivals, Ramp, Run
from mooncake.bench.samples import RandomShape, RepetitionShape
from mooncake.cli.command import Command
from mooncake.cli.results import write
from mooncake.launch.config.bench_settings import (
    BenchEngine,
    BenchLatency,
    BenchServe,
    BenchThroughput,
)
from mooncake.launch.config.options import shared_values, values_of
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment

BLIND_VOCAB = 256
"""Number of ids that every vocabulary has, for prompts of ids if no checkpoint says how many there
are.
"""
SAMPLING = (
    "top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip
SERVE_EXAMPLES = """\
mooncake bench serve --dataset-name random --num-prompts 32 --max-concurrency 8
mooncake bench serve --base-url http://10.0.0.7:8000 --tokenizer checkpoints/k2-small \\
    --dataset-name sharegpt --dataset-path ShareGPT.json --request-rate 2 --goodput ttft:500
mooncake bench serve --dataset-name timed_trace --dataset-path trace.jsonl --self-timed
"""

# ---------------------------------------------------------------- serve


def _serve(wanted: BenchServe) -> int:
    from mooncake.api.http.client import HttpClient
    from mooncake.api.http.event_loop import run_in_loop

    url = wanted.base_url or f"http://{wanted.host}:{wanted.port}"
    client = HttpClient(url, insecure=wanted.insecure)
    return run_in_loop(_serve_async(wanted, client))


async def _serve_async(wanted: BenchServe, client: Any) -> int:
    from mooncake.bench import report
    from mooncake.bench.endpoint import DEFAULT_ENDPOINTS, Target
    from mooncake.bench.serve import benchmark, first_model, shown_errors

    headers, shown = dict(wanted.header), wanted.percentile_metrics
    if wanted.api_key and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {wanted.api_key}"
    model = wanted.model or await first_model(client, headers)
    target = Target(
        backend=cast(Any, wanted.backend),
        endpoint=wanted.endpoint or DEFAULT_ENDPOINTS[wanted.backend],
        model=wanted.served_model_name or model,
        headers=headers,
        fields=_fields(wanted),
        request_id_prefix=wanted.request_id_prefix,
    )
    run = _run_of(wanted)
    samples = _samples(wanted, model)
    try:
        metrics, outputs = await benchmark(client, target, samples, run)
    finally:
        client.close()
    print(report.table(metrics, shown, max_concurrency=run.max_concurrency, rate=run.arrivals.rate))
    if errors := shown_errors(outputs):
        print(errors, file=sys.stderr)
    if wanted.save_result or wanted.append_result:
        _save(wanted, model, report.document(metrics, outputs, shown))
    return 0 if metrics.num_completed else 1


def _run_of(wanted: BenchServe) -> Run:
    from mooncake.bench.metrics import parse_goodput

    ramp = None
    if wanted.ramp_up_strategy:
        if wanted.ramp_up_start_rps is None or wanted.ramp_up_end_rps is None:
            raise ConfigError("ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps")
        ramp = Ramp(
            strategy=cast(Any, wanted.ramp_up_strategy),
            start_rps=wanted.ramp_up_start_rps,
            end_rps=wanted.ramp_up_end_rps,
        )
    return Run(
        arrivals=Arrivals(ramp=ramp, **values_of(wanted, Arrivals)),
        progress=not wanted.disable_tqdm,
        percentiles=wanted.metric_percentiles,
        goodput_ms=parse_goodput(wanted.goodput),
        **values_of(wanted, Run),
    )


def _fields(wanted: BenchServe) -> dict[str, Any]:
    """Return the fields that all requests carry besides prompt and length."""
    fields: dict[str, Any] = {
        name: value for name in SAMPLING if (value := getattr(wanted, name)) is not None
    }
    if wanted.ignore_eos or wanted.dataset_name == "random":
        fields["ignore_eos"] = True
    if wanted.logprobs is not None:
        if wanted.backend == "openai-chat":
            fields |= {"logprobs": True, "top_logprobs": wanted.logprobs}
        else:
            fields["logprobs"] = wanted.logprobs
    if wanted.chat_template_kwargs:
        fields["chat_template_kwargs"] = wanted.chat_template_kwargs
    return fields | (wanted.extra_body or {})


def _samples(wanted: BenchServe, model: str) -> Any:
    from mooncake.bench import samples
    from mooncake.bench.dataset_files import read_samples

    words = _words(wanted.tokenizer or model, skip=wanted.skip_tokenizer_init)
    count = wanted.num_prompts + wanted.num_warmups
    name, seed = wanted.dataset_name, wanted.seed
    lengths = {
        field: value
        for field in ("input_len", "output_len")
        if (value := getattr(wanted, field)) is not None
    }
    if name == "random":
        shape = RandomShape(**values_of(wanted, RandomShape) | lengths)
        return samples.random_samples(shape, count, words, seed)
    if name == "prefix_repetition":
        if "input_len" in lengths:
            lengths["suffix_len"] = lengths.pop("input_len")
        repetition = RepetitionShape(**values_of(wanted, RepetitionShape) | lengths)
        return samples.repetition_samples(repetition, count, words, seed)
    own = {"sharegpt": wanted.sharegpt_output_len, "custom": wanted.custom_output_len}
    return read_samples(
        name, wanted.dataset_path, count, words,
        seed=seed, output_len=lengths.get("output_len", own.get(name)),
    )  # fmt: skip


def _words(path: str, *, skip: bool) -> Any:
    """Return the source of prompts: the tokenizer at `path`, or token ids if there is none."""
    from mooncake.bench.samples import PromptSource

    directory = Path(path)
    if not skip and directory.is_dir():
        from mooncake.api.text.tokenizer import load_tokenizer

        return PromptSource(load_tokenizer(directory), 0)
    vocab = BLIND_VOCAB
    try:
        config = json.loads((directory / "config.json").read_text())
        vocab = int(config["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        if not skip:
            print(
                f"{path} is no directory with a tokenizer: prompts go as token ids below {vocab}; "
                "--tokenizer DIR sends text",
                file=sys.stderr,
            )
    return PromptSource(None, vocab)


def _save(wanted: BenchServe, model: str, fields: dict[str, Any]) -> None:
    from mooncake.bench.report import DETAILS
    from mooncake.bench.serve import file_name, rate_word, rendered

    date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    label = wanted.label or wanted.backend
    if not wanted.save_detailed:
        fields = {name: value for name, value in fields.items() if name not in DETAILS}
    whole = {
        "date": date,
        "endpoint_type": wanted.backend,
        "backend": wanted.backend,
        "label": wanted.label,
        "model_id": model,
        "tokenizer_id": wanted.tokenizer or model,
        "num_prompts": wanted.num_prompts,
        **dict(wanted.metadata),
        "request_rate": rate_word(wanted.request_rate),
        "burstiness": wanted.burstiness,
        "max_concurrency": wanted.max_concurrency,
        **{
            name: getattr(wanted, name)
            for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
            if wanted.ramp_up_strategy
        },
        **fields,
    }
    name = wanted.result_filename or file_name(
        label, model, wanted.request_rate, wanted.max_concurrency, date
    )
    path = Path(wanted.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text() if wanted.append_result and path.exists() else None
        path.write_text(rendered(whole, old))
    except OSError as error:
        raise ConfigError(
            f"{path}: the result cannot be written: {error.strerror}; name another file"
        ) from error


# ---------------------------------------------------------------- engine


def _throughput(wanted: BenchThroughput) -> int:
    from mooncake.bench.offline import throughput

    with _OpenEngine(wanted) as engine:
        result = throughput(engine.generate, engine.samples(wanted.num_prompts))
    _show_engine_result(wanted, result)
    return 0


def _latency(wanted: BenchLatency) -> int:
    from rich.console import Console

    from mooncake.bench.offline import latency
    from mooncake.telemetry.terminal import progress

    done, total = itertools.count(1), wanted.num_iters_warmup + wanted.num_iters
    with (
        _OpenEngine(wanted) as engine,
        progress("iterations", total, Console(stderr=True), hidden=wanted.disable_tqdm) as show,
    ):
        batch = engine.samples(wanted.batch_size)
        result = latency(
            engine.generate,
            [batch] * total,
            wanted.num_iters_warmup,
            lambda: show(next(done), total),
        )
    _show_engine_result(wanted, result)
    return 0


class _OpenEngine:
    """The engine alone, without a prefix cache, so that equal batches cost the same."""

    def __init__(self, wanted: BenchThroughput | BenchLatency) -> None:
        environment.restart_with(environment.variables())
        from mooncake.launch.worker.direct import DirectEngine

        self._wanted = wanted
        self._prompts = _words(wanted.model, skip=True)
        self._num_answers = wanted.n if isinstance(wanted, BenchLatency) else 1
        self._engine = DirectEngine.open(
            enable_prefix_caching=False, **shared_values(wanted, ServeConfig)
        )

    def __enter__(self) -> _OpenEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def samples(self, count: int) -> Any:
        """Return random prompts of the lengths that were asked for."""
        from mooncake.bench.samples import random_samples

        wanted = self._wanted
        if count < 1 or self._num_answers < 1:
            raise ConfigError("the number of prompts and answers must be at least 1")
        shape = RandomShape(input_len=wanted.input_len, output_len=wanted.output_len)
        return random_samples(shape, count, self._prompts, wanted.seed)

    def generate(self, samples: Sequence[Any]) -> int:
        """Run `samples` to their full length and return how many tokens were made."""
        from mooncake.base import SamplingParams

        answers = [
            (sample.prompt, SamplingParams(max_tokens=sample.num_output_tokens, seed=seed))
            for sample in samples
            for seed in range(self._num_answers)
        ]
        made = self._engine.generate(*zip(*answers, strict=True))
        return sum(len(tokens) for tokens in made)


def _show_engine_result(wanted: BenchEngine, result: Any) -> None:
    print("\n".join(result.lines()))
    write(wanted.output_json, json.dumps(result.document(), indent=4))


COMMANDS = (
    Command(
        words="bench serve", summary="measure an OpenAI endpoint under load", settings=BenchServe,
        run=_serve, examples=SERVE_EXAMPLES, takes_file=True,
    ),
    Command(
        words="bench throughput", summary="time an engine on one large batch",
        settings=BenchThroughput, run=_throughput, takes_file=True,
        examples="mooncake bench throughput --model checkpoints/k2-small --input-len 512",
    ),
    Command(
        words="bench latency", summary="time an engine on equal batches", settings=BenchLatency,
        run=_latency, takes_file=True,
        examples="mooncake bench latency --model checkpoints/k2-small --batch-size 8",
    ),
)  # fmt: skip
