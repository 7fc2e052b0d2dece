"""`mooncake bench serve|throughput|latency`: words of the command line, files, the engine.

Flags are those of `vllm bench`, so that scripts need not be changed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mooncake.base import ConfigError

ENGINE_SETTINGS = (
    "max_model_len", "max_num_seqs", "dtype", "num_threads", "device", "attention_backend",
    "moe_backend", "kv_cache_dtype", "gpu_memory_utilization", "deterministic", "enforce_eager",
)  # fmt: skip
"""Of `mooncake serve`, that the benchmarks of an engine take too."""

EXAMPLES = """examples:
  mooncake bench serve --dataset-name random --num-prompts 32 --max-concurrency 8
  mooncake bench serve --base-url http://10.0.0.7:8000 --tokenizer checkpoints/k2-small \\
      --dataset-name sharegpt --dataset-path ShareGPT.json --request-rate 2 --goodput ttft:500
  mooncake bench serve --dataset-name timed_trace --dataset-path trace.jsonl --self-timed
  mooncake bench throughput --model checkpoints/k2-small --input-len 512 --output-len 64
  mooncake bench latency --model checkpoints/k2-small --batch-size 8
"""
DATASETS = ("random", "sharegpt", "prefix_repetition", "custom", "timed_trace", "mooncake_trace")
"""The last two are one format: JSON lines of timestamp, input_length, output_length, hash_ids."""
BLIND_VOCAB = 256
"""Ids that every vocabulary has, for prompts of ids where no checkpoint says how many there are."""
SAMPLING = (
    "top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip


class AddCommand(Protocol):
    """`cli._command`: adds a subcommand."""

    def __call__(
        self,
        commands: Any,
        name: str,
        text: str,
        act: Callable[[argparse.Namespace], int] | None,
        examples: str,
    ) -> argparse.ArgumentParser: ...


def add(commands: Any, command: AddCommand) -> None:
    """Add `bench` and its subcommands to the command line."""
    bench = command(commands, "bench", "measure a server or an engine", None, EXAMPLES)
    kinds = bench.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = command(kinds, "serve", "measure an OpenAI endpoint under load", _serve, EXAMPLES)
    _add_endpoint(serve.add_argument_group("endpoint"))
    _add_dataset(serve.add_argument_group("dataset"))
    _add_load(serve.add_argument_group("load"))
    _add_sampling(serve.add_argument_group("sampling"))
    _add_results(serve.add_argument_group("results"))
    throughput = command(
        kinds, "throughput", "time an engine on one large batch", _throughput, EXAMPLES
    )
    _add_engine(throughput, input_len=1024, output_len=128)
    throughput.add_argument("--num-prompts", type=int, default=1000, metavar="N")
    latency = command(kinds, "latency", "time an engine on equal batches", _latency, EXAMPLES)
    _add_engine(latency, input_len=32, output_len=128)
    latency.add_argument("--batch-size", type=int, default=8, metavar="N")
    latency.add_argument("--n", type=int, default=1, metavar="N", help="answers a prompt")
    latency.add_argument("--num-iters-warmup", type=int, default=10, metavar="N")
    latency.add_argument("--num-iters", type=int, default=30, metavar="N")


def _add_endpoint(group: Any) -> None:
    group.add_argument("--backend", default="openai", choices=("openai", "openai-chat", "vllm"))
    group.add_argument("--label", metavar="NAME", help="in results instead of the backend")
    group.add_argument("--base-url", metavar="URL", help="instead of host and port")
    group.add_argument("--host", default="127.0.0.1", metavar="HOST")
    group.add_argument("--port", type=int, default=8000, metavar="PORT")
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE")
    group.add_argument("--insecure", action="store_true", help="take any TLS certificate")
    group.add_argument("--model", metavar="NAME", help="default: the server's first")
    group.add_argument("--served-model-name", metavar="NAME", help="as requests say it")
    group.add_argument("--tokenizer", metavar="DIR", help="of a checkpoint (default: the model)")
    group.add_argument("--tokenizer-mode", default="auto", help=argparse.SUPPRESS)
    group.add_argument("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", help="send prompts as token ids"
    )
    group.add_argument("--request-id-prefix", default="", metavar="TEXT")
    group.add_argument("--ready-check-timeout-sec", type=float, default=0, metavar="S")


def _add_dataset(group: Any) -> None:
    group.add_argument("--dataset-name", default="random", choices=DATASETS)
    group.add_argument("--dataset-path", metavar="FILE")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N")
    group.add_argument("--seed", type=int, default=0, metavar="N")
    group.add_argument("--input-len", type=int, metavar="N", help="of random and its relatives")
    group.add_argument("--output-len", type=int, metavar="N", help="of all answers")
    group.add_argument("--random-input-len", type=int, default=1024, metavar="N")
    group.add_argument("--random-output-len", type=int, default=128, metavar="N")
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R")
    group.add_argument("--random-prefix-len", type=int, default=0, metavar="N")
    group.add_argument("--sharegpt-output-len", type=int, metavar="N")
    group.add_argument("--custom-output-len", type=int, metavar="N")
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256, metavar="N")
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256, metavar="N")
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N")
    group.add_argument("--prefix-repetition-output-len", type=int, default=128, metavar="N")


def _add_load(group: Any) -> None:
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="RPS")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="X")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    group.add_argument("--ramp-up-start-rps", type=float, metavar="RPS")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="RPS")
    group.add_argument("--max-concurrency", type=int, metavar="N")
    group.add_argument("--num-warmups", type=int, default=0, metavar="N")
    group.add_argument("--self-timed", action="store_true", help="send at the trace's own times")


def _add_sampling(group: Any) -> None:
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    group.add_argument("--logprobs", type=int, metavar="N")
    group.add_argument("--ignore-eos", action="store_true", help="always so for random")
    group.add_argument("--chat-template-kwargs", metavar="JSON")
    group.add_argument("--extra-body", metavar="JSON", help="more fields of every request")


def _add_results(group: Any) -> None:
    group.add_argument("--percentile-metrics", metavar="LIST", help='default: "ttft,tpot,itl"')
    group.add_argument("--metric-percentiles", default="99", metavar="LIST")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--save-result", action="store_true")
    group.add_argument("--save-detailed", action="store_true")
    group.add_argument("--append-result", action="store_true")
    group.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE")
    group.add_argument("--result-dir", metavar="DIR")
    group.add_argument("--result-filename", metavar="NAME")


def _add_engine(command: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    command.add_argument("--model", required=True, metavar="DIR", help="of a checkpoint")
    command.add_argument("--input-len", type=int, default=input_len, metavar="N")
    command.add_argument("--output-len", type=int, default=output_len, metavar="N")
    command.add_argument("--max-model-len", metavar="TOKENS")
    command.add_argument("--max-num-seqs", metavar="N")
    command.add_argument("--dtype", metavar="TYPE")
    command.add_argument("--num-threads", metavar="N")
    for name in ("device", "attention-backend", "moe-backend", "kv-cache-dtype"):
        command.add_argument(f"--{name}", metavar="NAME")
    command.add_argument("--gpu-memory-utilization", metavar="SHARE")
    for name in ("deterministic", "enforce-eager"):
        command.add_argument(f"--{name}", action="store_true", default=None)
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument("--output-json", metavar="FILE")
    command.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


# ---------------------------------------------------------------- serve


def _serve(arguments: argparse.Namespace) -> int:
    from mooncake.api.event_loop import run_in_loop
    from mooncake.bench.http_client import HttpClient
    from mooncake.bench.report import TITLES

    shown = _listed(arguments.percentile_metrics or "ttft,tpot,itl", "percentile-metrics", TITLES)
    _pairs(arguments.metadata, "metadata")  # a mistake in it must not cost the run
    url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    client = HttpClient(url, insecure=arguments.insecure)
    return run_in_loop(_serve_async(arguments, client, shown))


async def _serve_async(arguments: argparse.Namespace, client: Any, shown: list[str]) -> int:
    from mooncake.bench import report
    from mooncake.bench.endpoint import DEFAULT_ENDPOINTS, Target
    from mooncake.bench.serve import benchmark, first_model, shown_errors

    headers = {"Content-Type": "application/json", **_pairs(arguments.header, "header")}
    key = os.environ.get("OPENAI_API_KEY")
    if key and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {key}"
    model = arguments.model or await first_model(client, headers)
    target = Target(
        backend=arguments.backend,
        endpoint=arguments.endpoint or DEFAULT_ENDPOINTS[arguments.backend],
        model=arguments.served_model_name or model,
        headers=headers,
        fields=_fields(arguments),
        request_id_prefix=arguments.request_id_prefix,
    )
    run = _run_of(arguments)
    samples = _samples(arguments, model)
    try:
        metrics, outputs = await benchmark(client, target, samples, run)
    finally:
        client.close()
    print(report.table(metrics, shown, max_concurrency=run.max_concurrency, rate=run.arrivals.rate))
    if errors := shown_errors(outputs):
        print(errors, file=sys.stderr)
    if arguments.save_result or arguments.append_result:
        _save(arguments, model, report.document(metrics, outputs, shown))
    return 0 if metrics.num_completed else 1


def _run_of(arguments: argparse.Namespace) -> Any:
    from mooncake.bench.arrivals import Arrivals, Ramp
    from mooncake.bench.metrics import parse_goodput
    from mooncake.bench.serve import Run

    ramp = None
    if arguments.ramp_up_strategy:
        if arguments.ramp_up_start_rps is None or arguments.ramp_up_end_rps is None:
            raise ConfigError("ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps")
        ramp = Ramp(
            strategy=arguments.ramp_up_strategy,
            start_rps=arguments.ramp_up_start_rps,
            end_rps=arguments.ramp_up_end_rps,
        )
    for name in ("max_concurrency", "num_prompts"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name.replace('_', '-')}: must be at least 1, not {value}")
    return Run(
        arrivals=Arrivals(rate=arguments.request_rate, burstiness=arguments.burstiness, ramp=ramp),
        max_concurrency=arguments.max_concurrency,
        num_warmups=arguments.num_warmups,
        ready_timeout_s=arguments.ready_check_timeout_sec,
        self_timed=arguments.self_timed,
        progress=not arguments.disable_tqdm,
        seed=arguments.seed,
        percentiles=_percentiles(arguments.metric_percentiles),
        goodput_ms=parse_goodput(arguments.goodput),
    )


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that all requests carry besides prompt and length."""
    fields: dict[str, Any] = {
        name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None
    }
    if arguments.ignore_eos or arguments.dataset_name == "random":
        fields["ignore_eos"] = True
    if arguments.logprobs is not None:
        if arguments.backend == "openai-chat":
            fields |= {"logprobs": True, "top_logprobs": arguments.logprobs}
        else:
            fields["logprobs"] = arguments.logprobs
    if arguments.chat_template_kwargs:
        fields["chat_template_kwargs"] = _json_object(
            arguments.chat_template_kwargs, "chat-template-kwargs"
        )
    if arguments.extra_body:
        fields |= _json_object(arguments.extra_body, "extra-body")
    return fields


def _samples(arguments: argparse.Namespace, model: str) -> Any:
    from mooncake.bench import samples
    from mooncake.bench.dataset_files import read_samples

    words = _words(arguments.tokenizer or model, skip=arguments.skip_tokenizer_init)
    count = arguments.num_prompts + arguments.num_warmups
    name, seed = arguments.dataset_name, arguments.seed
    if name == "random":
        shape = samples.RandomShape(
            input_len=_or(arguments.input_len, arguments.random_input_len),
            output_len=_or(arguments.output_len, arguments.random_output_len),
            range_ratio=arguments.random_range_ratio,
            prefix_len=arguments.random_prefix_len,
        )
        return samples.random_samples(shape, count, words, seed)
    if name == "prefix_repetition":
        repetition = samples.RepetitionShape(
            prefix_len=arguments.prefix_repetition_prefix_len,
            suffix_len=_or(arguments.input_len, arguments.prefix_repetition_suffix_len),
            num_prefixes=arguments.prefix_repetition_num_prefixes,
            output_len=_or(arguments.output_len, arguments.prefix_repetition_output_len),
        )
        return samples.repetition_samples(repetition, count, words, seed)
    own = {"sharegpt": arguments.sharegpt_output_len, "custom": arguments.custom_output_len}
    return read_samples(
        name, arguments.dataset_path, count, words,
        seed=seed, output_len=_or(arguments.output_len, own.get(name)),
    )  # fmt: skip


def _words(path: str, *, skip: bool) -> Any:
    """Return what prompts are made of: the tokenizer at `path`, or ids where there is none."""
    from mooncake.bench.samples import Words

    directory = Path(path)
    if not skip and directory.is_dir():
        from mooncake.api import load_tokenizer

        return Words(load_tokenizer(directory), 0)
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
    return Words(None, vocab)


def _save(arguments: argparse.Namespace, model: str, fields: dict[str, Any]) -> None:
    from mooncake.bench.report import DETAILS
    from mooncake.bench.serve import file_name, rate_word, rendered

    date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    label = arguments.label or arguments.backend
    if not arguments.save_detailed:
        fields = {name: value for name, value in fields.items() if name not in DETAILS}
    whole = {
        "date": date,
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": model,
        "tokenizer_id": arguments.tokenizer or model,
        "num_prompts": arguments.num_prompts,
        **_pairs(arguments.metadata, "metadata"),
        "request_rate": rate_word(arguments.request_rate),
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **{
            name: getattr(arguments, name)
            for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
            if arguments.ramp_up_strategy
        },
        **fields,
    }
    name = arguments.result_filename or file_name(
        label, model, arguments.request_rate, arguments.max_concurrency, date
    )
    path = Path(arguments.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text() if arguments.append_result and path.exists() else None
        path.write_text(rendered(whole, old))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


# ---------------------------------------------------------------- engine


def _throughput(arguments: argparse.Namespace) -> int:
    from mooncake.bench.offline import throughput

    with _Engine(arguments) as engine:
        result = throughput(engine.generate, engine.samples(arguments.num_prompts))
    _show_engine_result(arguments, result)
    return 0


def _latency(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from mooncake.bench.offline import latency

    total = arguments.num_iters_warmup + arguments.num_iters
    if arguments.num_iters < 1 or arguments.num_iters_warmup < 0:
        raise ConfigError("num-iters: at least one iteration is needed")
    with (
        _Engine(arguments) as engine,
        Progress(console=Console(stderr=True), disable=arguments.disable_tqdm) as progress,
    ):
        task = progress.add_task("iterations", total=total)
        batch = engine.samples(arguments.batch_size)
        result = latency(
            engine.generate,
            [batch] * total,
            arguments.num_iters_warmup,
            lambda: progress.advance(task),
        )
    _show_engine_result(arguments, result)
    return 0


class _Engine:
    """The engine alone, without a prefix cache, so that equal batches cost the same."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from mooncake.launch import environment

        environment.restart_with(os.environ)
        from mooncake.launch.direct import DirectEngine

        given = {
            name: value
            for name in ENGINE_SETTINGS
            if (value := getattr(arguments, name)) is not None
        }
        self._arguments = arguments
        self._words = _words(arguments.model, skip=True)
        self._num_answers = getattr(arguments, "n", 1)
        self._engine = DirectEngine.open(arguments.model, enable_prefix_caching=False, **given)

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def samples(self, count: int) -> Any:
        """Return random prompts of the lengths that were asked for."""
        from mooncake.bench.samples import RandomShape, random_samples

        arguments = self._arguments
        if count < 1 or self._num_answers < 1:
            raise ConfigError("the number of prompts and answers must be at least 1")
        shape = RandomShape(input_len=arguments.input_len, output_len=arguments.output_len)
        return random_samples(shape, count, self._words, arguments.seed)

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


def _show_engine_result(arguments: argparse.Namespace, result: Any) -> None:
    print("\n".join(result.lines()))
    if arguments.output_json:
        try:
            Path(arguments.output_json).write_text(json.dumps(result.document(), indent=4))
        except OSError as error:
            raise ConfigError(f"output-json: {error}") from error


# ---------------------------------------------------------------- words


def _or(value: int | None, default: Any) -> Any:
    return default if value is None else value


def _pairs(words: Sequence[str], name: str) -> dict[str, str]:
    pairs = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not (sign and key.strip()):
            raise ConfigError(f"{name}: {word!r} is not NAME=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be a JSON object")
    return value


def _listed(text: str, name: str, known: Any) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ConfigError(f"{name}: {word!r} is not one of {', '.join(known)}")
    return words


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"metric-percentiles: {text!r} is not like 50,99") from error
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError("metric-percentiles: must be from 0 to 100")
    return values
