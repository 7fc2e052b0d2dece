"""The one place that reads settings: flags over a YAML file over the environment over defaults.

Nothing below `launch` reads a file of settings or the environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mooncake.base import ConfigError
from mooncake.launch.config import options
from mooncake.launch.config.options import flag, nearest
from mooncake.launch.config.settings import API, ENGINES, LIMITS, ServeConfig
from mooncake.launch.config.shipped import DEMO, checkpoint, shape_of
from mooncake.launch.host.environment import is_loopback
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.model.options import FROM_ENGINES
from mooncake.scheduler.engines.fleet import POLICIES as ENGINE_POLICIES

Settings = TypeVar("Settings")

WILDCARDS = ("0.0.0.0", "::", "*")
"""Addresses that one can listen at but not connect to."""

NODES = "start a process on each machine: `mooncake serve --role decode --join HOST:PORT`"
REFUSED = {
    "trust-remote-code": "no code is ever loaded from a checkpoint; leave the flag out",
    "kv-transfer-config": "prefill and decode are built in: use --prefill N --decode N",
    "distributed-executor-backend": "workers are processes of this machine, or of a Ray cluster at "
    "--ray-address HOST:PORT",
    "enable-chunked-prefill": "long prompts always come in chunks: --max-num-batched-tokens",
    "load-format": "weights are read from safetensors only",
    "download-dir": "nothing is downloaded; give the directory of a checkpoint",
    "tokenizer-mode": "the tokenizer files of the checkpoint decide",
    "quantization": "config.json says how a checkpoint is quantized; `mooncake model convert` "
    "writes a quantized copy",
    "tool-call-parser": "tool calls are always read as the model writes them; leave the flag out",
    "enable-auto-tool-choice": "tool_choice=auto always works; leave the flag out",
    "reasoning-parser": "reasoning is always told from answers; leave the flag out",
    "chat-template": "the chat template of the checkpoint decides",
    "seed": "requests have seeds of their own (`seed`); without one each draws its own",
    "pool-port": "it is called --join-port",
    "swap-space": "preempted sequences are kept in the pool: --kvstore-dram-bytes",
    "cpu-offload-gb": "weights stay in the memory of their device; use more ranks: "
    "--tensor-parallel-size, --pipeline-parallel-size",
    "enable-log-requests": "requests are written to the access log: --access-log",
    "disable-log-requests": "prompts are never logged, and requests only with --access-log",
    "api-server-count": "start more gateways: --role gateway --join tcp://HOST:PORT",
    "compilation-config": "--enforce-eager captures no CUDA graphs; there is nothing else to set",
    "hf-overrides": "the checkpoint's config.json decides",
    "tokenizer": "the checkpoint's own tokenizer is used",
    "nnodes": NODES,
    "node-rank": NODES,
    "master-addr": NODES,
    "dist-init-addr": NODES,
    "model-path": "give the checkpoint without a flag: `mooncake serve DIR`",
    "context-length": "it is called --max-model-len",
    "tp": "it is called --tensor-parallel-size",
    "tp-size": "it is called --tensor-parallel-size",
    "dp": "it is called --data-parallel-size",
    "page-size": "it is called --block-size",
    "disable-radix-cache": "it is called --no-enable-prefix-caching",
    "disable-cuda-graph": "it is called --enforce-eager",
    "log-requests": "requests are written to the access log: --access-log",
    "collect-detailed-traces": "traces always have all spans: --otlp-traces-endpoint",
    "enable-trace": "it is called --otlp-traces-endpoint",
    "enable-metrics": "GET /metrics is always there; leave the flag out",
    "watchdog-timeout": "it is called --step-timeout",
    "disaggregation-transfer-backend": "it is called --transport",
    "nccl-init-addr": NODES,
    "data-parallel-address": NODES,
    "pp-size": "it is called --pipeline-parallel-size",
    "dp-size": "it is called --data-parallel-size",
    "ep-size": "use --enable-expert-parallel: all ranks of an engine share its experts",
    "mem-fraction-static": "it is called --gpu-memory-utilization",
    "max-running-requests": "it is called --max-num-seqs",
    "chunked-prefill-size": "it is called --max-num-batched-tokens",
    "disaggregation-mode": "prefill and decode are built in: use --prefill N --decode N",
    "enable-hierarchical-cache": "the pool is built in: --kvstore N, --kvstore-dram-bytes, --ssd",
}
"""Flags of vLLM and SGLang that do not exist here, each with what to use instead."""


HEALTH = tuple(name for name in options.options_of(ServeConfig) if name.startswith("health_"))
"""Settings of health ports."""


def resolve(
    given: Mapping[str, object], file: str | None, environ: Mapping[str, str]
) -> ServeConfig:
    """Return the configuration of `mooncake serve`: see `read_settings`.

    Without a model and without a role, the model is the one in the package. A dry run needs no
    checkpoint of a model in `configs/models`.

    Raises:
        ConfigError: unknown key, unreadable value, or settings that exclude each other.
    """
    written = _written(ServeConfig, given, file, environ)
    config = _read(ServeConfig, written)
    if config.role is None and not config.model:
        config = dataclasses.replace(config, model=DEMO)
    if not config.check:
        _check_together(config, written)
    if config.model:
        shape = shape_of(config.model) if config.dry_run else None
        config = dataclasses.replace(config, model=str(shape or checkpoint(config.model)))
    return config


def read_settings(
    kind: type[Settings], given: Mapping[str, object], file: str | None, environ: Mapping[str, str]
) -> Settings:
    """Return the settings of a command: flags over file over environment over defaults.

    Args:
        kind: a dataclass of `options.setting` fields.
        given: settings from the command line, by field name, as written.
        file: path of a YAML file, or None.
        environ: the environment.

    Raises:
        ConfigError: unknown key, unreadable value, or a setting that is missing.
    """
    return _read(kind, _written(kind, given, file, environ))


def _written(
    kind: type, given: Mapping[str, object], file: str | None, environ: Mapping[str, str]
) -> dict[str, object]:
    """Return all settings that are given anywhere, as written."""
    from_environment: dict[str, object] = {}
    for name, (option, _) in options.options_of(kind).items():
        found = next((environ[each] for each in option.variables if environ.get(each)), None)
        if found is not None:
            from_environment[name] = found
    settings = from_environment, read_file(file, kind) if file is not None else {}, given
    written: dict[str, object] = {}
    for each in settings:
        written.update(each)
        secret_file = each.get("cluster_secret_file")
        if secret_file and "cluster_secret" in options.options_of(kind):
            if "cluster_secret" in each:
                raise ConfigError("cluster-secret and cluster-secret-file exclude each other")
            written["cluster_secret"] = read_secret(Path(str(secret_file)))
    return written


def _read(kind: type[Settings], written: Mapping[str, object]) -> Settings:
    known = options.options_of(kind)
    for name, (option, _) in known.items():
        if option.required and name not in written:
            raise ConfigError(f"--{flag(name)} is missing", param=name)
    for name in written:
        if name not in known:
            raise ConfigError(unknown_setting(name, kind), param=name)
    return kind(**{name: known[name][0].read(name, value) for name, value in written.items()})


def read_file(path: str, kind: type = ServeConfig) -> dict[str, object]:
    """Return the settings in a YAML file by field name, unread; keys are flags with - or _.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or given twice.
    """
    loaded = read_yaml(path, "config")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config: {path} must hold `name: value` lines, not a {type(loaded).__name__}"
        )
    known = options.options_of(kind)
    settings: dict[str, object] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {unknown_setting(str(key), kind)}", param=name)
        if name in settings:
            raise ConfigError(f"{path}: {flag(name)} is given twice")
        if value is None:
            raise ConfigError(
                f"{path}: {flag(name)} has no value; leave the line out for the default"
            )
        settings[name] = value
    return settings


def read_yaml(path: str, flag_name: str) -> Any:
    """Return the contents of the YAML file of the flag `flag_name`.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag_name}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag_name}: {path} is not a text file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag_name}: {path} is not YAML: {_where(error)}") from error


def _where(error: yaml.YAMLError) -> str:
    """Return a YAML parser's complaint on one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def unknown_setting(written: str, kind: type = ServeConfig) -> str:
    """Return the sentence for a setting that does not exist. It names the nearest one that does."""
    name = flag(written.lstrip("-").split("=")[0])
    if kind is ServeConfig and name in REFUSED:
        return f"{name} is not a setting of this server: {REFUSED[name]}"
    known = {flag(known) for known in options.options_of(kind)}
    return f"unknown setting {name}{nearest(name, known)}"


def _check_together(config: ServeConfig, written: Mapping[str, object]) -> None:
    def both(left: str, right: str, why: str) -> None:
        if left in written and right in written:
            raise ConfigError(f"{flag(left)} and {flag(right)} exclude each other: {why}")

    if any(option.group == ENGINES for name, option in _given(written)):
        _check_engines(config, written)
        _check_tls(config, written)
        _check_keys(config)
        return
    for name in ("ssd_key_file", "ssd_key_command"):
        if name in written and not config.ssd_encryption:
            raise ConfigError(f"{flag(name)}: the key is used only with --ssd-encryption; add it")
    if config.ssd_encryption and not (config.ssd or config.object_store):
        raise ConfigError(
            "ssd-encryption: there are no disks to encrypt; add --ssd DIR:SIZE or --object-store "
            "s3://BUCKET"
        )
    for name in ("object_endpoint", "object_size", "object_min_uses"):
        if name in written and config.object_store is None:
            raise ConfigError(f"{flag(name)}: there is no bucket; add --object-store s3://BUCKET")
    if "otlp_traces_sampling_ratio" in written and config.otlp_traces_endpoint is None:
        raise ConfigError(
            "otlp-traces-sampling-ratio: nothing is traced; add --otlp-traces-endpoint URL"
        )
    if config.role_switching and config.follows_load:
        raise ConfigError(
            "role-switching: with --autoscale this process starts and ends workers of each role "
            "instead; leave one of them out"
        )
    both("kv_cache_memory_bytes", "num_gpu_blocks_override", "both say how many KV pages there are")
    both("require_transport", "transport", "the first names the only one")
    if config.colocated and config.require_transport is not None:
        raise ConfigError(
            "require-transport: one process (--colocated) moves no KV between workers; leave one "
            "of them out"
        )
    if config.hardware is not None and not config.dry_run:
        raise ConfigError("hardware: other hardware can only be planned for; add --dry-run")
    if config.colocated:
        for name in (
            "prefill", "decode", "role", "join", "ray_address", "headless", "prefill_set",
            "decode_set",
        ):  # fmt: skip
            both("colocated", name, "colocated is one process with one engine")
        for name in HEALTH:
            both("colocated", name, "the API answers /health and /metrics for the one process")
    _check_roles(config, written)
    _check_tls(config, written)
    if not config.model and config.role is not None and (config.is_seed or config.join is None):
        raise ConfigError(
            f"no model is named; put one first, e.g. mooncake serve {DEMO} --role {config.role}"
        )
    _check_keys(config)


def _given(written: Mapping[str, object]) -> list[tuple[str, options.Option]]:
    known = options.options_of(ServeConfig)
    return [(name, known[name][0]) for name in written]


def _check_keys(config: ServeConfig) -> None:
    for name in ("api_key", "admin_token", "engine_api_key"):
        if any(not key.isascii() for key in getattr(config, name) or ""):
            raise ConfigError(
                f"{flag(name)}: a key travels in a header, which takes only ASCII characters; "
                "give another"
            )


OF_ENGINES = (
    "role", "policy", "slo_ttft_s", "max_waiting_requests", "http_without_tls", "log_level",
    "log_file", "log_format", "audit_log", "dry_run",
)  # fmt: skip
"""What a gateway over other people's engines takes besides the settings of its API."""
NOT_OF_ENGINES = (
    "max_receipts", "allow_special_tokens_in_chat", "kv_events_config", "batch_dir",
)  # fmt: skip
"""What it does not take of them."""


def _check_engines(config: ServeConfig, written: Mapping[str, object]) -> None:
    """Refuse what a gateway over other people's engines cannot do."""
    if config.role != "gateway":
        raise ConfigError("engines: only a gateway sends requests to them; add --role gateway")
    if not config.engines:
        raise ConfigError("engines: they are missing; add --engines URL")
    for name, option in _given(written):
        is_known = option.group in (API, ENGINES) or name in OF_ENGINES or bool(option.variables)
        if not is_known or name in NOT_OF_ENGINES:
            raise ConfigError(
                f"{flag(name)}: a gateway over other people's engines has no such setting; leave "
                "it out, or set it at the engines"
            )
    if config.policy not in ENGINE_POLICIES:
        raise ConfigError(
            f"policy: {config.policy}: over other people's engines it is one of "
            f"{', '.join(ENGINE_POLICIES)}"
        )
    for engine, *_ in config.engine_events:
        if engine not in config.engines:
            raise ConfigError(
                f"engine-events: {engine} is not one of --engines, which are "
                f"{', '.join(config.engines)}"
            )


def _check_tls(config: ServeConfig, written: Mapping[str, object]) -> None:
    for port in ("", "admin_", "health_"):
        certfile = f"{port}ssl_certfile"
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if port + name in written and getattr(config, certfile) is None:
                raise ConfigError(
                    f"{flag(port + name)}: it is used only with TLS; add --{flag(certfile)} FILE"
                )
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError(
            "ssl-cert-reqs: clients' certificates are checked against their authorities, which "
            "are missing; add --ssl-ca-certs FILE"
        )
    has_keys = bool(config.api_key) or config.api_keys_file is not None
    for port, what in (
        ("admin_", "--admin-port would speak plain HTTP"),
        ("health_", "--health-port would speak plain HTTP"),
        *([("", "API keys would travel in plain HTTP")] if has_keys else []),
    ):
        certfile = f"{port}ssl_certfile"
        host = config.health_address if port == "health_" else getattr(config, f"{port}host")
        plain = getattr(config, certfile) is None and not config.http_without_tls
        if plain and not is_loopback(host):
            raise ConfigError(
                f"{flag(port)}host: at {host} {what}: add --{flag(certfile)} FILE "
                "(`mooncake certificates` makes one), or --http-without-tls where the network is "
                "private or a proxy in front of it speaks HTTPS"
            )


def _check_roles(config: ServeConfig, written: Mapping[str, object]) -> None:
    if config.headless:
        if config.role is not None:
            raise ConfigError(
                "headless: a process with a --role has no API of its own to leave out; leave out "
                "--headless or the role"
            )
    elif config.decode == 0:
        raise ConfigError("decode: must be at least 1, unless decode workers join: --headless")
    has_role = config.role is not None
    if has_role and config.role not in ("kvstore", "gateway") and not config.seeds:
        raise ConfigError(f"role: a {config.role} worker joins a cluster; add --join HOST:PORT")
    if has_role and config.cluster_secret is None and "#" not in str(config.join):
        raise ConfigError(
            f"cluster-secret: a {config.role} process needs the cluster's secret; give it by "
            "--cluster-secret-file or MOONCAKE_CLUSTER_SECRET, or, on the machine of the cluster's "
            "first process, join the whole address that it printed, with its #KEY"
        )
    is_here = has_role or (config.ray_address is None and not config.colocated)
    if is_here and config.bind_host in WILDCARDS:
        raise ConfigError(
            f"bind-host: nobody can connect to {config.bind_host}; give an address of this machine"
        )
    if config.cluster_secret and not config.cluster_secret.isascii():
        raise ConfigError(
            "cluster-secret: it travels in a header, which takes only ASCII characters; make "
            "another, e.g. with `openssl rand -hex 32`"
        )
    if config.weights_from == FROM_ENGINES and config.role not in ("prefill", "decode"):
        raise ConfigError(
            "weights-from: only an engine that joins others reads their weights; add --role "
            "prefill|decode and --join HOST:PORT, or leave it out"
        )
    if config.join is not None and config.role is None:
        raise ConfigError(
            "join: the role of this process is missing; add --role prefill|decode|kvstore|gateway"
        )
    is_pool = config.role == "kvstore" and config.join is None
    if config.join_port and (config.colocated or not (is_pool or config.role in (None, "gateway"))):
        raise ConfigError(
            "join-port: others join only a gateway, or a pool that stands alone; leave it out here"
        )
    if config.role == "gateway":
        _check_gateway(config, written)


def _check_gateway(config: ServeConfig, written: Mapping[str, object]) -> None:
    """Refuse settings that one gateway may not decide: all gateways of a cluster place requests
    alike.
    """
    for name in HEALTH:
        if name in written:
            raise ConfigError(
                f"{flag(name)}: a gateway answers /health and /metrics on --port; leave it out"
            )
    for name, (option, _) in options.options_of(ServeConfig).items():
        if option.group == LIMITS and name in written and not config.is_seed:
            raise ConfigError(
                f"{flag(name)}: a gateway that joins places requests as its cluster does; set it "
                "where the cluster is started"
            )
