"""Settings of `mooncake bench`. Its flags are those of `vllm bench`; its defaults come from the
fields of `mooncake.bench` that they set.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mooncake.bench.arrivals import TITLES, Arrivals, Run
from mooncake.bench.samples import RandomShape, RepetitionShape
from mooncake.engine.config import SpeculativeConfig
from mooncake.launch.config.options import (
    OneOf,
    SomeOf,
    count,
    json_object,
    number,
    owned,
    pairs,
    percentiles,
    same_as,
    setting,
    text,
    texts,
    truth,
)
from mooncake.launch.config.settings import ServeConfig

DATASETS = ("random", "sharegpt", "prefix_repetition", "custom", "timed_trace", "mooncake_trace")
"""The last two are one format: JSON lines of timestamp, input_length, output_length, hash_ids."""
ENDPOINT, DATASET, LOAD, SAMPLE, RESULTS = "endpoint", "dataset", "load", "sampling", "results"
ENGINE = "engine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchServe:
    # fmt: off
    backend: str = setting("openai", OneOf("openai", "openai-chat", "vllm"), ENDPOINT, "NAME",
        "kind of API to call")
    label: str | None = setting(None, text, ENDPOINT, "NAME",
        "name in the results (default: the backend)")
    base_url: str | None = setting(None, text, ENDPOINT, "URL",
        "URL of the server, instead of --host and --port",
        short="--url")
    host: str = setting("127.0.0.1", text, ENDPOINT, "HOST", "host of the server")
    port: int = setting(8000, count(1, 65535), ENDPOINT, "PORT", "port of the server")
    endpoint: str | None = setting(None, text, ENDPOINT, "PATH",
        "path of the API (default: the backend's)")
    header: tuple[tuple[str, str], ...] = setting((), pairs, ENDPOINT, "NAME=VALUE",
        "header to send with every request; may be repeated", repeat=True)
    api_key: str | None = setting(None, text, ENDPOINT, "KEY",
        "API key, if the server asks for one",
        env="OPENAI_API_KEY", other_env="MOONCAKE_API_KEY", secret=True)
    insecure: bool = setting(False, truth, ENDPOINT, "", "accept any TLS certificate")
    model: str | None = setting(None, text, ENDPOINT, "NAME",
        "name of the model (default: the server's first)")
    served_model_name: str | None = setting(None, text, ENDPOINT, "NAME",
        "name of the model in requests, if it differs from --model")
    tokenizer: str | None = setting(None, text, ENDPOINT, "DIR",
        "directory of a checkpoint with the tokenizer (default: the model)")
    tokenizer_mode: str = setting("auto", text, ENDPOINT, "NAME", "")
    trust_remote_code: bool = setting(False, truth, ENDPOINT, "", "")
    skip_tokenizer_init: bool = setting(False, truth, ENDPOINT, "", "send prompts as token ids")
    request_id_prefix: str = setting("", text, ENDPOINT, "TEXT",
        "beginning of the id of every request")
    ready_check_timeout_sec: float = owned(Run, "ready_timeout_s", number, ENDPOINT, "S",
        "seconds to wait for the server's first answer; 0: do not check")
    dataset_name: str = setting("random", OneOf(*DATASETS), DATASET, "NAME",
        "source of the prompts")
    dataset_path: str | None = setting(None, text, DATASET, "FILE",
        "file of the dataset; random and prefix_repetition need none")
    num_prompts: int = setting(1000, count(1), DATASET, "N", "number of requests")
    seed: int = owned(Run, "seed", count(0), DATASET, "N", "seed of prompts and times")
    input_len: int | None = setting(None, count(0), DATASET, "N",
        "length of prompts of the datasets that are drawn at random")
    output_len: int | None = setting(None, count(0), DATASET, "N", "length of all answers")
    random_input_len: int = owned(RandomShape, "input_len", count(0), DATASET, "N",
        "length of random prompts")
    random_output_len: int = owned(RandomShape, "output_len", count(0), DATASET, "N",
        "length of the answers to random prompts")
    random_range_ratio: float = owned(RandomShape, "range_ratio", number, DATASET, "R",
        "share by which these lengths vary")
    random_prefix_len: int = owned(RandomShape, "prefix_len", count(0), DATASET, "N",
        "number of first tokens that all random prompts share")
    sharegpt_output_len: int | None = setting(None, count(0), DATASET, "N",
        "length of answers (default: of the recorded answer)")
    custom_output_len: int | None = setting(None, count(0), DATASET, "N",
        "length of answers (default: as in the file)")
    prefix_repetition_prefix_len: int = owned(RepetitionShape, "prefix_len", count(0), DATASET, "N",
        "tokens of each repeated prefix")
    prefix_repetition_suffix_len: int = owned(RepetitionShape, "suffix_len", count(0), DATASET, "N",
        "tokens after the prefix")
    prefix_repetition_num_prefixes: int = owned(RepetitionShape, "num_prefixes", count(0), DATASET,
        "N", "number of prefixes")
    prefix_repetition_output_len: int = owned(RepetitionShape, "output_len", count(0), DATASET, "N",
        "length of answers")
    request_rate: float = owned(Arrivals, "rate", number, LOAD, "RPS",
        "requests a second; inf: send all at once")
    burstiness: float = owned(Arrivals, "burstiness", number, LOAD, "X",
        "1: a Poisson process; more: more even arrivals")
    ramp_up_strategy: str | None = setting(None, OneOf("linear", "exponential"), LOAD, "NAME",
        "let the request rate grow in this way")
    ramp_up_start_rps: float | None = setting(None, number, LOAD, "RPS",
        "first rate of --ramp-up-strategy")
    ramp_up_end_rps: float | None = setting(None, number, LOAD, "RPS",
        "last rate of --ramp-up-strategy")
    max_concurrency: int | None = owned(Run, "max_concurrency", count(1), LOAD, "N",
        "most requests at a time (default: no limit)")
    num_warmups: int = owned(Run, "num_warmups", count(0), LOAD, "N",
        "number of requests sent first and not counted")
    self_timed: bool = owned(Run, "self_timed", truth, LOAD, "",
        "send requests at the trace's own times")
    top_p: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    top_k: int | None = setting(None, count(-1), SAMPLE, "X", "as in the API")
    min_p: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    temperature: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    frequency_penalty: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    presence_penalty: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    repetition_penalty: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    logprobs: int | None = setting(None, count(0), SAMPLE, "N",
        "number of logprobs to ask for with each token")
    ignore_eos: bool = setting(False, truth, SAMPLE, "",
        "go on after the end of the text; always on for random prompts")
    chat_template_kwargs: dict[str, Any] | None = setting(None, json_object, SAMPLE, "JSON",
        "variables for the chat template")
    extra_body: dict[str, Any] | None = setting(None, json_object, SAMPLE, "JSON",
        "further fields for every request")
    percentile_metrics: tuple[str, ...] = setting(("ttft", "tpot", "itl"), SomeOf(*TITLES),
        RESULTS, "LIST", "metrics of which percentiles are shown")
    metric_percentiles: tuple[float, ...] = setting((99,), percentiles, RESULTS, "LIST",
        "percentiles to show")
    goodput: tuple[str, ...] = setting((), texts, RESULTS, "NAME:MS",
        "limits that a good request must keep", many="+")
    disable_tqdm: bool = setting(False, truth, RESULTS, "", "show no progress bar")
    save_result: bool = setting(False, truth, RESULTS, "",
        "write the results to a JSON file")
    save_detailed: bool = setting(False, truth, RESULTS, "",
        "write the figures of every request too")
    append_result: bool = setting(False, truth, RESULTS, "", "append to the file if it exists")
    metadata: tuple[tuple[str, str], ...] = setting((), pairs, RESULTS, "NAME=VALUE",
        "values to write into the file",
        many="*")
    result_dir: str | None = setting(None, text, RESULTS, "DIR",
        "directory of the file (default: the current one)")
    result_filename: str | None = setting(None, text, RESULTS, "NAME",
        "name of the file (default: made of label, rate, model and date)")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchEngine:
    """Settings of both benchmarks of an engine alone."""

    model: str = setting("", text, ENGINE, "DIR", "directory of a checkpoint", required=True)
    output_len: int = setting(128, count(0), LOAD, "N", "tokens of each answer")
    max_model_len: int | None = same_as(ServeConfig, "max_model_len", ENGINE)
    max_num_seqs: int = same_as(ServeConfig, "max_num_seqs", ENGINE)
    dtype: str = same_as(ServeConfig, "dtype", ENGINE)
    num_threads: int | None = same_as(ServeConfig, "num_threads", ENGINE)
    device: str = same_as(ServeConfig, "device", ENGINE)
    attention_backend: str = same_as(ServeConfig, "attention_backend", ENGINE)
    moe_backend: str = same_as(ServeConfig, "moe_backend", ENGINE)
    kv_cache_dtype: str = same_as(ServeConfig, "kv_cache_dtype", ENGINE)
    gpu_memory_utilization: float = same_as(ServeConfig, "gpu_memory_utilization", ENGINE)
    speculative_config: SpeculativeConfig | None = same_as(
        ServeConfig, "speculative_config", ENGINE
    )
    deterministic: bool = same_as(ServeConfig, "deterministic", ENGINE)
    enforce_eager: bool = same_as(ServeConfig, "enforce_eager", ENGINE)
    seed: int = setting(0, count(0), LOAD, "N", "seed of the prompts")
    output_json: str | None = setting(None, text, RESULTS, "FILE", "write the figures to this file")
    disable_tqdm: bool = setting(False, truth, RESULTS, "", "show no progress bar")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchThroughput(BenchEngine):
    input_len: int = setting(1024, count(0), LOAD, "N", "tokens of each prompt")
    num_prompts: int = setting(1000, count(0), LOAD, "N", "number of prompts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchLatency(BenchEngine):
    input_len: int = setting(32, count(0), LOAD, "N", "tokens of each prompt")
    batch_size: int = setting(8, count(0), LOAD, "N", "prompts in a batch")
    n: int = setting(1, count(0), LOAD, "N", "answers to each prompt")
    num_iters_warmup: int = setting(
        10, count(0), LOAD, "N", "batches that run first and are not counted"
    )
    num_iters: int = setting(30, count(1), LOAD, "N", "batches that are measured")
