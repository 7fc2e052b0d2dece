"""What `mooncake serve` can be told: every setting with its kind, group and help. Reads nothing.

Names are those of the flags; where vLLM has the same setting it has the same name here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mooncake.launch import options
from mooncake.launch.options import flag, setting
from mooncake.model.options import ATTENTION_BACKENDS, DEVICES, KV_DTYPES, MOE_BACKENDS
from mooncake.scheduler.config import POLICIES

MODEL = "model and its memory"
POOL = "KVCache pool of each kvstore worker"
CLUSTER = "cluster"
DOOR = "HTTP door"
ENGINE = "engine"
LIMITS = "placement and limits"
OTHER = "other"

SECRETS = ("api_key", "cluster_secret")
"""Never shown."""

_ONE_PROCESS = "a worker is one process with the whole model; add workers: --prefill N --decode N"
_ROLES = ("prefill", "decode", "kvstore", "gateway")
_DTYPES = ("auto", "bfloat16", "float32", "float16")
_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All settings, resolved; frozen from then on."""

    model: str = setting(
        "", options.text, MODEL, "MODEL", "directory of a checkpoint", positional=True
    )
    served_model_name: tuple[str, ...] = setting(
        (), options.texts, MODEL, "NAME", "name in the API, may be repeated",
        repeat=True,
    )  # fmt: skip
    dtype: str = setting(
        "auto", options.one_of(*_DTYPES), MODEL, "TYPE", "of weights and KV; auto: the checkpoint's"
    )
    max_model_len: int | None = setting(
        None, options.count(1), MODEL, "TOKENS",
        "longest prompt plus output, e.g. 32k (default: the model's)",
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = setting(
        None, options.size(1), MODEL, "SIZE", "memory for KV pages of each engine (default: 1GiB)"
    )
    kv_cache_dtype: str = setting(
        "auto", options.one_of("auto", *KV_DTYPES), MODEL, "TYPE", "of KV pages; auto: the dtype"
    )
    device: str = setting(
        "auto", options.one_of(*DEVICES), MODEL, "NAME", "auto: a CUDA GPU where there is one"
    )
    gpu_memory_utilization: float = setting(
        0.9, options.share, MODEL, "SHARE", "of a GPU's memory; what is left of it holds KV pages"
    )
    num_gpu_blocks_override: int | None = setting(
        None, options.count(1), MODEL, "PAGES", "number of KV pages of each engine, not a size"
    )
    block_size: int = setting(
        64, options.count(1, 1024), MODEL, "TOKENS", "tokens in a KVCache block"
    )
    kvstore_dram_bytes: int = setting(
        2**30, options.size(1), POOL, "SIZE", "memory of each kvstore worker's pool",
        short="--dram",
    )  # fmt: skip
    ssd: tuple[tuple[str, int], ...] = setting(
        (), options.disks, POOL, "DIR:SIZE",
        "directory for blocks that DRAM has no room for, e.g. /mnt/nvme0:2TiB; one a disk, may be "
        "repeated or listed with commas",
        repeat=True,
    )  # fmt: skip
    tenant_quota: tuple[tuple[str, int], ...] = setting(
        (), options.quotas, POOL, "TENANT=SIZE", "most DRAM for a tenant's blocks, may be repeated",
        repeat=True,
    )  # fmt: skip
    tenant_ssd_quota: tuple[tuple[str, int], ...] = setting(
        (), options.quotas, POOL, "TENANT=SIZE", "the same of all --ssd directories together",
        repeat=True,
    )  # fmt: skip
    ssd_min_uses: int = setting(
        2, options.count(1), POOL, "N", "a block asked for so often goes down to SSD; 1: every one"
    )
    ssd_write_at: float = setting(
        0.7, options.part, POOL, "SHARE", "of DRAM in use above which blocks go down; 0: at once"
    )
    admin_host: str = setting("127.0.0.1", options.text, POOL, "HOST", "address of --admin-port")
    admin_port: int | None = setting(
        None, options.count(0, 65535), POOL, "PORT",
        "health, metrics, stats and drain of a kvstore worker over HTTP; 0: any free one; the "
        "second worker takes the next (default: none; a pool standing alone: 8100)",
    )  # fmt: skip
    pool_port: int = setting(
        0, options.count(0, 65535), POOL, "PORT",
        "where a pool standing alone is joined by clients and other nodes; 0: any free one",
    )  # fmt: skip
    prefill: int = setting(1, options.count(0, 512), CLUSTER, "N", "prefill workers")
    decode: int = setting(1, options.count(0, 512), CLUSTER, "N", "decode workers")
    kvstore: int | None = setting(
        None, options.count(0, 512), CLUSTER, "N", "kvstore workers (default: 1, colocated 0)"
    )
    colocated: bool = setting(
        False, options.truth, CLUSTER, "", "one process, one engine for everything, no Ray",
        switch=True,
    )  # fmt: skip
    ray_address: str | None = setting(
        None, options.host_and_port, CLUSTER, "HOST:PORT", "use this Ray cluster, start none"
    )
    role: str | None = setting(
        None, options.one_of(*_ROLES), CLUSTER, "ROLE",
        "run one worker or one more gateway; needs --join (kvstore without it: a pool standing "
        "alone)",
    )  # fmt: skip
    headless: bool = setting(
        False, options.truth, CLUSTER, "",
        "look after workers and open no door: gateways come with --role gateway --join",
        switch=True,
    )  # fmt: skip
    join: str | None = setting(
        None, options.joinable, CLUSTER, "HOST:PORT",
        "Ray address of the cluster to join; tcp://HOST:PORT: of a pool standing alone",
    )  # fmt: skip
    node_id: str | None = setting(
        None, options.text, CLUSTER, "NAME", "name of this machine (default: its host name)"
    )
    transport: tuple[str, ...] = setting(
        ("auto",), options.some_of("auto", "shm", "rdma", "tcp"), CLUSTER, "LIST",
        "how KV may move, e.g. shm,tcp; auto: all that work on this machine",
    )  # fmt: skip
    rdma_device: tuple[str, ...] = setting(
        (), options.texts, CLUSTER, "NAME", "NIC such as mlx5_0, may be repeated (default: all)",
        repeat=True,
    )  # fmt: skip
    rdma_near: tuple[tuple[str, tuple[str, ...]], ...] = setting(
        (), options.nearby, CLUSTER, "PLACE=NIC,NIC",
        "NICs for memory at cpu:NUMA-NODE, gpu:PCI-ADDRESS or anywhere, all others after them; may "
        "be repeated (default: the nearest)",
        repeat=True,
    )  # fmt: skip
    rdma_gid_index: int | None = setting(
        None, options.count(0, 255), CLUSTER, "N", "of each NIC (default: RoCE v2, routable)"
    )
    rdma_mtu: int | None = setting(
        None, options.count(256, 4096), CLUSTER, "BYTES", "at most (default: the port's own)"
    )
    rdma_traffic_class: int = setting(
        0, options.count(0, 255), CLUSTER, "N",
        "of RDMA packets, for networks that have a lossless one (RoCE: 4 times the DSCP)",
    )  # fmt: skip
    rdma_service_level: int = setting(
        0, options.count(0, 15), CLUSTER, "N", "the same for InfiniBand"
    )
    bind_host: str = setting(
        "127.0.0.1", options.text, CLUSTER, "HOST", "address workers listen on for each other"
    )
    cluster_secret: str | None = setting(
        None, options.text, CLUSTER, "TEXT",
        "shared by all workers (env MOONCAKE_CLUSTER_SECRET; default: drawn at start)",
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, options.only_one(_ONE_PROCESS), CLUSTER, "N", "only 1 so far", short="-tp"
    )
    pipeline_parallel_size: int = setting(
        1, options.only_one(_ONE_PROCESS), CLUSTER, "N", "only 1 so far", short="-pp"
    )
    data_parallel_size: int = setting(
        1, options.only_one(_ONE_PROCESS), CLUSTER, "N", "only 1 so far", short="-dp"
    )
    host: str = setting("127.0.0.1", options.text, DOOR, "HOST", "address of the API")
    port: int = setting(
        8000, options.count(0, 65535), DOOR, "PORT", "port of the API; 0: any free one"
    )
    api_key: tuple[str, ...] = setting(
        (), options.texts, DOOR, "KEY", "accepted key, may be repeated (env MOONCAKE_API_KEY)",
        repeat=True,
    )  # fmt: skip
    api_keys_file: str | None = setting(
        None, options.text, DOOR, "FILE",
        "YAML list of keys, each with name, tenant, requests_per_min, tokens_per_min, "
        "max_concurrent",
    )  # fmt: skip
    ssl_certfile: str | None = setting(
        None, options.text, DOOR, "FILE", "certificate chain in PEM: the API is then HTTPS"
    )
    ssl_keyfile: str | None = setting(
        None, options.text, DOOR, "FILE", "its private key (default: in the certificate's file)"
    )
    ssl_ca_certs: str | None = setting(
        None, options.text, DOOR, "FILE", "authorities whose client certificates are let in"
    )
    ssl_cert_reqs: int | None = setting(
        None, options.count(0, 2), DOOR, "N",
        "client certificates: 0 none, 1 optional, 2 needed (default: 2 with --ssl-ca-certs)",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), options.texts, DOOR, "ORIGIN", "web origin whose pages may call, may be repeated",
        repeat=True,
    )  # fmt: skip
    max_body_bytes: int = setting(
        32 << 20, options.size(1), DOOR, "SIZE", "largest body of a request; larger ones get 413"
    )
    max_body_cost: int = setting(
        1 << 19, options.count(1), DOOR, "N", "most values in a body: fields, objects and lists "
        "count 8, items of lists 1; streams stall about 1 ms for every 5,000",
    )  # fmt: skip
    timeout_keep_alive: int = setting(
        120, options.count(1, 86400), DOOR, "S",
        "seconds that idle connections stay open; longer than a proxy before it keeps them",
    )  # fmt: skip
    access_log: bool = setting(
        False, options.truth, DOOR, "", "log every HTTP request", switch=True
    )
    allow_special_tokens_in_chat: bool = setting(
        False, options.truth, DOOR, "", "let messages spell control tokens: any user can then "
        "speak as the system", switch=True,
    )  # fmt: skip
    shutdown_timeout: float = setting(
        30.0, options.positive, DOOR, "S", "seconds that running requests get to finish at the end"
    )
    max_num_seqs: int = setting(
        64, options.count(1, 65536), ENGINE, "N", "sequences in an engine's batch"
    )
    max_num_batched_tokens: int = setting(
        2048, options.count(1), ENGINE, "N", "tokens in one step: the chunk of a long prompt"
    )
    enable_prefix_caching: bool = setting(
        True, options.truth, ENGINE, "", "reuse blocks of earlier requests", switch=True
    )
    attention_backend: str = setting(
        "auto", options.one_of(*ATTENTION_BACKENDS), ENGINE, "NAME",
        "auto: triton on a GPU, else reference",
    )  # fmt: skip
    moe_backend: str = setting(
        "auto", options.one_of(*MOE_BACKENDS), ENGINE, "NAME",
        "auto: triton on a GPU, else onednn where it can, else reference",
    )  # fmt: skip
    deterministic: bool = setting(
        False, options.truth, ENGINE, "", "no result depends on the rest of the batch; slower",
        switch=True,
    )  # fmt: skip
    enforce_eager: bool = setting(
        False, options.truth, ENGINE, "", "capture no CUDA graphs of decode steps", switch=True
    )
    num_threads: int | None = setting(
        None,
        options.count(1, 1024),
        ENGINE,
        "N",
        "CPU threads of each engine (default: a fair share)",
    )
    self_profile: bool = setting(
        True, options.truth, ENGINE, "", "time a few steps at start, for placement", switch=True
    )
    seed: int = setting(0, options.count(0), ENGINE, "N", "of random choices in placement")
    policy: str = setting(
        POLICIES[0],
        options.one_of(*POLICIES),
        LIMITS,
        "NAME",
        f"of placement: {', '.join(POLICIES)}",
    )
    slo_ttft_s: float | None = setting(
        None, options.positive, LIMITS, "S",
        "answer 429 when the first token would take longer (default: no limit)",
    )  # fmt: skip
    slo_tbt_ms: float | None = setting(
        None, options.positive, LIMITS, "MS",
        "answer 429 when gaps between tokens would be longer; the first token is then shown with "
        "the second, so that the hand-over to decode is no gap (default: no limit)",
    )  # fmt: skip
    role_switching: bool = setting(
        False, options.truth, LIMITS, "",
        "workers change between prefill and decode when the load moves for long",
        switch=True,
    )  # fmt: skip
    max_waiting_requests: int = setting(
        1024, options.count(1), LIMITS, "N", "accepted requests at a time; more get 429"
    )
    log_level: str = setting(
        "info", options.one_of(*_LEVELS), OTHER, "LEVEL", f"one of {', '.join(_LEVELS)}"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names the model answers to; the first is the one reported."""
        return self.served_model_name or (Path(self.model).resolve().name,)

    @property
    def joins_by_ray(self) -> bool:
        """Whether Ray places and supervises the one worker of `role`."""
        return self.join is not None and not self.join.startswith(options.DIRECT)

    def shown(self) -> dict[str, Any]:
        """Return all settings for a person, secrets hidden."""
        values = dataclasses.asdict(self) | {"served_model_name": self.names}
        for secret in SECRETS:
            values[secret] = "(set)" if values[secret] else None
        return {flag(name): value for name, value in values.items()}
