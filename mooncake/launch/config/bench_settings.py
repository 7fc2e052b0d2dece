"""Settings of `mooncake bench`. Its flags are those of `vllm bench`; its defaults come from the
fields of `mooncake.bench` that they set.
"""

from __future__ import annotations

import dataclasses

from mooncake.bench.arrivals import Arrivals
from mooncake.bench.run import Run
from mooncake.bench.samples import RandomShape, RepetitionShape
from mooncake.engine.drafts.drafters import SpeculativeConfig
from mooncake.launch.config.options import (
    OneOf,
    count,
    number,
    owned,
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
    """Settings of `mooncake bench serve`."""

    # fmt: off
    backend: str = setting("openai", OneOf("openai", "openai-chat", "vllm"), ENDPOINT, "NAME",
        "kind of API")
    label: str | None = setting(None, text, ENDPOINT, "NAME", "in results instead of the backend")
    base_url: str | None = setting(None, text, ENDPOINT, "URL", "instead of host and port",
        short="--url")
    host: str = same_as(ServeConfig, "host", ENDPOINT)
    port: int = same_as(ServeConfig, "port", ENDPOINT)
    endpoint: str | None = setting(None, text, ENDPOINT, "PATH", "default: the backend's")
    header: tuple[str, ...] = setting((), texts, ENDPOINT, "NAME=VALUE",
        "sent with every request, may be repeated", repeat=True)
    api_key: str | None = setting(None, text, ENDPOINT, "KEY", "if the server asks for one",
        env="OPENAI_API_KEY", other_env="MOONCAKE_API_KEY", secret=True)
    insecure: bool = setting(False, truth, ENDPOINT, "", "take any TLS certificate", switch=True)
    model: str | None = setting(None, text, ENDPOINT, "NAME", "default: the server's first")
    served_model_name: str | None = setting(None, text, ENDPOINT, "NAME",
        "in requests, where it differs")
    tokenizer: str | None = setting(None, text, ENDPOINT, "DIR",
        "of a checkpoint (default: the model)")
    tokenizer_mode: str = setting("auto", text, ENDPOINT, "NAME", "")
    trust_remote_code: bool = setting(False, truth, ENDPOINT, "", "", switch=True)
    skip_tokenizer_init: bool = setting(False, truth, ENDPOINT, "", "send prompts as token ids",
        switch=True)
    request_id_prefix: str = setting("", text, ENDPOINT, "TEXT", "of the id of every request")
    ready_check_timeout_sec: float = owned(Run, "ready_timeout_s", number, ENDPOINT, "S",
        "wait so long for the first answer; 0: do not look")
    dataset_name: str = setting("random", OneOf(*DATASETS), DATASET, "NAME",
        "what prompts are made of")
    dataset_path: str | None = setting(None, text, DATASET, "FILE",
        "of all datasets but the random ones")
    num_prompts: int = setting(1000, count(1), DATASET, "N", "requests")
    seed: int = owned(Run, "seed", count(0), DATASET, "N", "of prompts and times")
    input_len: int | None = setting(None, count(0), DATASET, "N", "of random and its relatives")
    output_len: int | None = setting(None, count(0), DATASET, "N", "of all answers")
    random_input_len: int = owned(RandomShape, "input_len", count(0), DATASET, "N",
        "of random prompts")
    random_output_len: int = owned(RandomShape, "output_len", count(0), DATASET, "N",
        "of their answers")
    random_range_ratio: float = owned(RandomShape, "range_ratio", number, DATASET, "R",
        "lengths vary by this share")
    random_prefix_len: int = owned(RandomShape, "prefix_len", count(0), DATASET, "N",
        "tokens that all have in common")
    sharegpt_output_len: int | None = setting(None, count(0), DATASET, "N",
        "default: the recorded answer's")
    custom_output_len: int | None = setting(None, count(0), DATASET, "N", "default: the file's")
    prefix_repetition_prefix_len: int = owned(RepetitionShape, "prefix_len", count(0), DATASET, "N",
        "tokens of a prefix")
    prefix_repetition_suffix_len: int = owned(RepetitionShape, "suffix_len", count(0), DATASET, "N",
        "tokens after it")
    prefix_repetition_num_prefixes: int = owned(RepetitionShape, "num_prefixes", count(0), DATASET,
        "N", "prefixes")
    prefix_repetition_output_len: int = owned(RepetitionShape, "output_len", count(0), DATASET, "N",
        "of answers")
    request_rate: float = owned(Arrivals, "rate", number, LOAD, "RPS",
        "requests a second; inf: all at once")
    burstiness: float = owned(Arrivals, "burstiness", number, LOAD, "X",
        "1: a Poisson process; more: more even")
    ramp_up_strategy: str | None = setting(None, OneOf("linear", "exponential"), LOAD, "NAME",
        "a rate that grows")
    ramp_up_start_rps: float | None = setting(None, number, LOAD, "RPS", "its first rate")
    ramp_up_end_rps: float | None = setting(None, number, LOAD, "RPS", "its last rate")
    max_concurrency: int | None = owned(Run, "max_concurrency", count(1), LOAD, "N",
        "requests at a time (default: no limit)")
    num_warmups: int = owned(Run, "num_warmups", count(0), LOAD, "N",
        "requests sent before, not counted")
    self_timed: bool = owned(Run, "self_timed", truth, LOAD, "", "send at the trace's own times",
        switch=True)
    top_p: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    top_k: int | None = setting(None, count(-1), SAMPLE, "X", "as in the API")
    min_p: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    temperature: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    frequency_penalty: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    presence_penalty: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    repetition_penalty: float | None = setting(None, number, SAMPLE, "X", "as in the API")
    logprobs: int | None = setting(None, count(0), SAMPLE, "N", "ask for so many a token")
    ignore_eos: bool = setting(False, truth, SAMPLE, "", "always so for random", switch=True)
    chat_template_kwargs: str | None = setting(None, text, SAMPLE, "JSON", "for the chat template")
    extra_body: str | None = setting(None, text, SAMPLE, "JSON", "more fields of every request")
    percentile_metrics: str = setting("ttft,tpot,itl", text, RESULTS, "LIST",
        "what percentiles are shown of")
    metric_percentiles: str = setting("99", text, RESULTS, "LIST", "which percentiles")
    goodput: tuple[str, ...] = setting((), texts, RESULTS, "NAME:MS",
        "limits that a good request keeps", many="+")
    disable_tqdm: bool = setting(False, truth, RESULTS, "", "no progress bar", switch=True)
    save_result: bool = setting(False, truth, RESULTS, "", "write a JSON file", switch=True)
    save_detailed: bool = setting(False, truth, RESULTS, "", "with the figures of every request",
        switch=True)
    append_result: bool = setting(False, truth, RESULTS, "", "add to the file that is there",
        switch=True)
    metadata: tuple[str, ...] = setting((), texts, RESULTS, "NAME=VALUE", "written into the file",
        many="*")
    result_dir: str | None = setting(None, text, RESULTS, "DIR",
        "of the file (default: the current one)")
    result_filename: str | None = setting(None, text, RESULTS, "NAME",
        "default: of label, rate, model and date")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchEngine:
    """Settings of both benchmarks of an engine alone."""

    model: str = setting("", text, ENGINE, "DIR", "of a checkpoint", required=True)
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
    seed: int = setting(0, count(0), LOAD, "N", "of the prompts")
    output_json: str | None = setting(None, text, RESULTS, "FILE", "write the figures there")
    disable_tqdm: bool = setting(False, truth, RESULTS, "", "no progress bar", switch=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchThroughput(BenchEngine):
    """Settings of `mooncake bench throughput`."""

    input_len: int = setting(1024, count(0), LOAD, "N", "tokens of each prompt")
    num_prompts: int = setting(1000, count(0), LOAD, "N", "prompts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchLatency(BenchEngine):
    """Settings of `mooncake bench latency`."""

    input_len: int = setting(32, count(0), LOAD, "N", "tokens of each prompt")
    batch_size: int = setting(8, count(0), LOAD, "N", "prompts of a batch")
    n: int = setting(1, count(0), LOAD, "N", "answers a prompt")
    num_iters_warmup: int = setting(10, count(0), LOAD, "N", "batches before, not counted")
    num_iters: int = setting(30, count(1), LOAD, "N", "batches")
