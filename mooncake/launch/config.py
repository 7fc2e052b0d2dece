"""The one place that reads settings: flags over a YAML file over the environment over defaults.

Nothing below `launch` reads a file of settings or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from mooncake.base import ConfigError
from mooncake.launch import options
from mooncake.launch.options import flag, nearest
from mooncake.launch.settings import LIMITS, ServeConfig

ENVIRONMENT = {"api_key": "MOONCAKE_API_KEY", "cluster_secret": "MOONCAKE_CLUSTER_SECRET"}
"""The secrets, and the variable each may come from."""

REFUSED = {
    "trust-remote-code": "no code is ever loaded from a checkpoint; leave the flag out",
    "kv-transfer-config": "prefill and decode are built in: use --prefill N --decode N",
    "distributed-executor-backend": "Ray places the workers, or use --colocated for one process",
    "enable-chunked-prefill": "long prompts always come in chunks: --max-num-batched-tokens",
    "load-format": "weights are read from safetensors only",
    "download-dir": "nothing is downloaded; give the directory of a checkpoint",
    "tokenizer-mode": "the tokenizer files of the checkpoint decide",
    "swap-space": "preempted sequences are kept in the pool: --kvstore-dram-bytes",
}
"""Flags that people bring from vLLM, each with what to do here instead."""


def resolve(
    given: Mapping[str, object], file: str | None, environ: Mapping[str, str]
) -> ServeConfig:
    """Return the configuration: flags over file over environment over defaults.

    Args:
        given: settings from the command line, by field name, as written.
        file: path of a YAML file, or None.
        environ: the environment.

    Raises:
        ConfigError: unknown key, unreadable value, or settings that exclude each other.
    """
    written: dict[str, object] = {
        name: environ[variable] for name, variable in ENVIRONMENT.items() if environ.get(variable)
    }
    if file is not None:
        written |= read_file(file)
    written |= given
    known = options.options_of(ServeConfig)
    values = {}
    for name, value in written.items():
        option, _ = known[name]
        values[name] = option.read(name, value)
    config = ServeConfig(**values)
    _check_together(config, written)
    return config


def read_file(path: str) -> dict[str, object]:
    """Return the settings in a YAML file by field name, unread; keys are flags with - or _."""
    try:
        content = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not a text file") from error
    try:
        loaded = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML: {_where(error)}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config: {path} must hold `name: value` lines, not a {type(loaded).__name__}"
        )
    known = options.options_of(ServeConfig)
    settings: dict[str, object] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {unknown_setting(str(key))}")
        if name in settings:
            raise ConfigError(f"{path}: {flag(name)} is given twice")
        if value is None:
            raise ConfigError(
                f"{path}: {flag(name)} has no value; leave the line out for the default"
            )
        settings[name] = value
    return settings


def _where(error: yaml.YAMLError) -> str:
    """Return a YAML parser's complaint on one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def unknown_setting(written: str) -> str:
    """Return the sentence for a setting that does not exist, with the nearest that does."""
    name = flag(written.lstrip("-").split("=")[0])
    if name in REFUSED:
        return f"{name} is not a setting of this server: {REFUSED[name]}"
    known = {flag(known) for known in options.options_of(ServeConfig)}
    return f"unknown setting {name}{nearest(name, known)}"


def _check_together(config: ServeConfig, written: Mapping[str, object]) -> None:
    def both(left: str, right: str, why: str) -> None:
        if left in written and right in written:
            raise ConfigError(f"{flag(left)} and {flag(right)} exclude each other: {why}")

    both("kv_cache_memory_bytes", "num_gpu_blocks_override", "both say how many KV pages there are")
    if config.colocated:
        for name in ("prefill", "decode", "role", "join", "ray_address", "headless"):
            both("colocated", name, "colocated is one process with one engine")
    _check_roles(config, written)
    if config.joins_by_ray and config.role != "gateway":
        return
    if not config.model and config.role != "gateway":
        raise ConfigError(
            "no model: give a checkpoint directory, e.g. mooncake serve checkpoints/k2-small "
            "(`mooncake model init` writes one)"
        )
    for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
        if name in written and config.ssl_certfile is None:
            raise ConfigError(f"{flag(name)} is for HTTPS: add --ssl-certfile FILE")
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError("ssl-cert-reqs: say whose certificates: --ssl-ca-certs FILE")
    if config.api_key and any(not key.isascii() for key in config.api_key):
        raise ConfigError("api-key: only ASCII characters can travel in a header")


def _check_roles(config: ServeConfig, written: Mapping[str, object]) -> None:
    if config.headless:
        if config.role is not None:
            raise ConfigError("headless: only the process that looks after a cluster has no door")
    elif config.decode == 0:
        raise ConfigError("decode: must be at least 1, unless decode workers join: --headless")
    alone = config.role == "kvstore" and not config.joins_by_ray
    if alone and config.cluster_secret is None:
        raise ConfigError(
            "cluster-secret: a pool standing alone needs one, for its clients to prove: "
            "--cluster-secret or MOONCAKE_CLUSTER_SECRET"
        )
    if config.cluster_secret and not config.cluster_secret.isascii():
        raise ConfigError("cluster-secret: only ASCII characters can travel in a header")
    if (config.role is None) != (config.join is None) and not alone:
        missing = "join HOST:PORT" if config.join is None else "role prefill|decode|kvstore|gateway"
        raise ConfigError(f"role and join belong together: add --{missing}")
    if config.role not in (None, "kvstore") and not config.joins_by_ray:
        raise ConfigError(f"join: {config.join} is a pool; only --role kvstore can join it")
    if config.role == "gateway":
        _check_gateway(written)


def _check_gateway(written: Mapping[str, object]) -> None:
    """Refuse what is not for one gateway to decide: all of a cluster place requests alike."""
    for name, (option, _) in options.options_of(ServeConfig).items():
        if option.group == LIMITS and name in written:
            raise ConfigError(
                f"{flag(name)}: a gateway that joins places requests as its cluster does; set it "
                "where the cluster is started"
            )
