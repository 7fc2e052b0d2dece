"""All settings of `mooncake serve`, each with its kind, group and help. Reads nothing.

Names are those of the flags. A setting that vLLM has too has the same name here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mooncake.api.config import ApiConfig
from mooncake.base.kv_events import KvEventsConfig
from mooncake.engine.config import EngineConfig
from mooncake.engine.drafts.drafters import SpeculativeConfig
from mooncake.engine.expert_placement import EplbConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.config import options
from mooncake.launch.config.options import (
    OneOf,
    SomeOf,
    count,
    disks,
    flag,
    host_and_port,
    hosts_and_ports,
    joinable,
    nearby,
    owned,
    part,
    port_range,
    positive,
    quotas,
    role_settings,
    setting,
    share,
    size,
    table,
    text,
    texts,
    truth,
    web_url,
)
from mooncake.model.options import (
    ATTENTION_BACKENDS,
    DEEPEP,
    DEVICES,
    EXPERT_DEVICES,
    GATHERED,
    KV_DTYPES,
    MOE_BACKENDS,
    RANK_BACKENDS,
    ModelOptions,
)
from mooncake.scheduler.config import POLICIES, SchedulerConfig
from mooncake.transfer.net.protection import PROTECTIONS
from mooncake.transfer.rdma.backend import RdmaSettings

MODEL = "model and its memory"
POOL = "KVCache pool of each kvstore worker"
CLUSTER = "cluster"
API = "HTTP API"
ENGINE = "engine"
LIMITS = "placement and limits"
OTHER = "other"

_ROLES = ("prefill", "decode", "kvstore", "gateway")
_DTYPES = ("auto", "bfloat16", "float32", "float16")
_LEVELS = ("debug", "info", "warning", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All settings after they were resolved. They never change afterwards."""

    # fmt: off
    model: str = setting("", text, MODEL, "MODEL", "directory of a checkpoint, or k2-demo: the "
        "small model in the package (default)", positional=True)
    served_model_name: tuple[str, ...] = setting((), texts, MODEL, "NAME",
        "name in the API, may be repeated", repeat=True)
    dtype: str = setting("auto", OneOf(*_DTYPES), MODEL, "TYPE",
        "of weights and KV; auto: the checkpoint's")
    max_model_len: int | None = setting(None, count(1), MODEL, "TOKENS",
        "longest prompt plus output, e.g. 32k (default: the model's)")
    kv_cache_memory_bytes: int | None = setting(None, size(1), MODEL, "SIZE",
        "memory for KV pages of each engine (default: 1GiB)")
    kv_cache_dtype: str = setting("auto", OneOf("auto", *KV_DTYPES), MODEL, "TYPE",
        "of KV pages; auto: the dtype")
    weights_key_file: str | None = setting(None, text, MODEL, "FILE",
        "with the key of encrypted weights (or the key itself: env MOONCAKE_WEIGHTS_KEY)",
        env="MOONCAKE_WEIGHTS_KEY_FILE")
    weights_key_command: str | None = setting(None, text, MODEL, "COMMAND",
        "that prints it, e.g. a client of a key service; no shell runs it")
    device: str = setting("auto", OneOf(*DEVICES), MODEL, "NAME",
        "auto: a CUDA GPU where there is one")
    gpu_memory_utilization: float = owned(ModelOptions, "gpu_memory_utilization", share, MODEL,
        "SHARE", "of a GPU's memory; what is left of it holds KV pages")
    num_gpu_blocks_override: int | None = setting(None, count(1), MODEL, "PAGES",
        "number of KV pages of each engine, not a size")
    block_size: int = owned(EngineConfig, "block_tokens", count(1, 1024), MODEL, "TOKENS",
        "tokens in a KVCache block")
    kvstore_dram_bytes: int = owned(KvStoreConfig, "dram_bytes", size(1), POOL, "SIZE",
        "memory of each kvstore worker's pool", short="--dram")
    ssd: tuple[tuple[str, int], ...] = setting((), disks, POOL, "DIR:SIZE",
        "directory for blocks that DRAM has no room for, e.g. /mnt/nvme0:2TiB; one a disk, may be "
        "repeated or listed with commas", repeat=True)
    tenant_quota: tuple[tuple[str, int], ...] = setting((), quotas, POOL, "TENANT=SIZE",
        "most DRAM for a tenant's blocks, may be repeated", repeat=True)
    tenant_ssd_quota: tuple[tuple[str, int], ...] = setting((), quotas, POOL, "TENANT=SIZE",
        "the same of all --ssd directories together", repeat=True)
    client_quota_share: float = owned(KvStoreConfig, "client_quota_share", share, POOL, "SHARE",
        "largest part of a worker's DRAM, and of its SSD, that pool clients of a tenant without a "
        "quota may fill together")
    ssd_min_uses: int = owned(KvStoreConfig, "ssd_min_uses", count(1), POOL, "N",
        "a block asked for so often goes down to SSD; 1: every one")
    ssd_write_at: float = owned(KvStoreConfig, "ssd_write_at", part, POOL, "SHARE",
        "of DRAM in use above which blocks go down; 0: at once")
    ssd_encryption: bool = setting(False, truth, POOL, "",
        "blocks on SSD are encrypted; needs a key", switch=True)
    ssd_key_file: str | None = setting(None, text, POOL, "FILE",
        "with the key of --ssd-encryption (or the key itself: env MOONCAKE_SSD_KEY)",
        env="MOONCAKE_SSD_KEY_FILE")
    ssd_key_command: str | None = setting(None, text, POOL, "COMMAND",
        "that prints it; no shell runs it")
    admin_ssl_certfile: str | None = setting(None, text, POOL, "FILE",
        "certificate chain in PEM: --admin-port is then HTTPS")
    admin_ssl_keyfile: str | None = setting(None, text, POOL, "FILE",
        "its private key (default: in the certificate's file)")
    admin_ssl_ca_certs: str | None = setting(None, text, POOL, "FILE",
        "authorities of the clients that are let in (default: clients need no certificate)")
    admin_host: str = setting("127.0.0.1", text, POOL, "HOST", "address of --admin-port")
    admin_port: int | None = setting(None, count(0, 65535), POOL, "PORT",
        "health, metrics, stats and drain of a kvstore worker over HTTP; 0: any free one; the "
        "second worker takes the next (default: none; a pool standing alone: 8100)")
    admin_token: tuple[str, ...] = setting((), texts, POOL, "TOKEN",
        "lets its bearer ask --admin-port for stats and drain, may be repeated", repeat=True,
        env="MOONCAKE_ADMIN_TOKEN", secret=True)
    prefill: int = setting(1, count(0, 512), CLUSTER, "N", "prefill workers")
    decode: int = setting(1, count(0, 512), CLUSTER, "N", "decode workers")
    kvstore: int | None = setting(None, count(0, 512), CLUSTER, "N",
        "kvstore workers (default: 1, colocated 0)")
    colocated: bool = setting(False, truth, CLUSTER, "",
        "one process, one engine for everything, no Ray", switch=True)
    ray_address: str | None = setting(None, host_and_port, CLUSTER, "HOST:PORT",
        "use this Ray cluster, start none")
    ray_ssl_certfile: str | None = setting(None, text, CLUSTER, "FILE",
        "certificate of this machine in PEM: Ray speaks TLS, with those of the same authority only")
    ray_ssl_keyfile: str | None = setting(None, text, CLUSTER, "FILE",
        "its private key (default: in the certificate's file)")
    ray_ssl_ca_certs: str | None = setting(None, text, CLUSTER, "FILE",
        "authorities of the machines of the cluster")
    ray_without_tls: bool = setting(False, truth, CLUSTER, "", "Ray may speak in clear beyond this "
        "machine: who reads the network can run programs here", switch=True,
        env="MOONCAKE_RAY_WITHOUT_TLS")
    role: str | None = setting(None, OneOf(*_ROLES), CLUSTER, "ROLE", "run one worker or one more "
        "gateway; needs --join (kvstore without it: a pool standing alone)")
    headless: bool = setting(False, truth, CLUSTER, "",
        "look after workers without an API: gateways come with --role gateway --join", switch=True)
    join: str | None = setting(None, joinable, CLUSTER, "HOST:PORT",
        "a running cluster: tcp://HOST:PORT of a gateway, or HOST:PORT of its Ray; of a pool "
        "standing alone tcp://HOST:PORT; several gateways with commas: one that answers is enough; "
        "for a gateway also http:// or https://HOST:PORT, the health port of a --headless process")
    join_port: int = setting(0, count(0, 65535), CLUSTER, "PORT",
        "where others join this gateway, or this pool standing alone: PORT in their --join "
        "tcp://HOST:PORT; 0: any free one")
    join_ca_certs: str | None = setting(None, text, CLUSTER, "FILE",
        "authorities of --join https://HOST:PORT (default: this machine's)")
    join_timeout: int = setting(0, count(0), CLUSTER, "S",
        "seconds that --join waits for a cluster that is not up yet")
    node_id: str | None = setting(None, text, CLUSTER, "NAME",
        "name of this machine (default: its host name)")
    transport: tuple[str, ...] = setting(("auto",), SomeOf("auto", "shm", "rdma", "tcp"), CLUSTER,
        "LIST", "how KV may move, e.g. shm,tcp; auto: all that work on this machine")
    require_transport: str | None = owned(SchedulerConfig, "require_transport",
        OneOf("shm", "rdma", "tcp"), CLUSTER, "NAME",
        "move KV by this one only: a worker that cannot use it does not start, and gateways use no "
        "worker that moves KV by another one (default: see --transport)")
    transfer_protection: str = setting("auto", OneOf("auto", *PROTECTIONS), CLUSTER, "KIND",
        "of KV on sockets: from nothing, from changes (mac), or from readers, too; auto: mac, none "
        "where workers listen on loopback. RDMA cannot encrypt")
    push_checksums: str = setting("auto", OneOf("auto", "on", "off"), CLUSTER, "WHEN",
        "decode compares KV that prefill pushes with checksums before it goes on; auto: where "
        "workers listen beyond loopback and KV is in host memory")
    rdma_device: tuple[str, ...] = owned(RdmaSettings, "devices", texts, CLUSTER, "NAME",
        "NIC such as mlx5_0, may be repeated (default: all)", repeat=True)
    rdma_near: tuple[tuple[str, tuple[str, ...]], ...] = setting((), nearby, CLUSTER,
        "PLACE=NIC,NIC", "NICs for memory at cpu:NUMA-NODE, gpu:PCI-ADDRESS or anywhere, all "
        "others after them; may be repeated (default: the nearest)", repeat=True)
    rdma_gid_index: int | None = owned(RdmaSettings, "gid_index", count(0, 255), CLUSTER, "N",
        "of each NIC (default: RoCE v2, routable)")
    rdma_mtu: int | None = owned(RdmaSettings, "mtu_bytes", count(256, 4096), CLUSTER, "BYTES",
        "at most (default: the port's own)")
    rdma_traffic_class: int = owned(RdmaSettings, "traffic_class", count(0, 255), CLUSTER, "N",
        "of RDMA packets, for networks that have a lossless one (RoCE: 4 times the DSCP)")
    rdma_service_level: int = owned(RdmaSettings, "service_level", count(0, 15), CLUSTER, "N",
        "the same for InfiniBand")
    bind_host: str = setting("127.0.0.1", text, CLUSTER, "HOST",
        "address workers listen on for each other")
    bind_ports: tuple[int, int] | None = setting(None, port_range, CLUSTER, "FIRST-LAST",
        "ports of it that they take, each socket the first that is free, e.g. 7000-7099 (default: "
        "any)")
    health_ssl_certfile: str | None = setting(None, text, CLUSTER, "FILE",
        "certificate chain in PEM: --health-port is then HTTPS")
    health_ssl_keyfile: str | None = setting(None, text, CLUSTER, "FILE",
        "its private key (default: in the certificate's file)")
    health_ssl_ca_certs: str | None = setting(None, text, CLUSTER, "FILE",
        "authorities of the probes that are let in (default: probes need no certificate; those of "
        "Kubernetes have none)")
    http_without_tls: bool = setting(False, truth, CLUSTER, "", "the API with keys, health and "
        "admin ports may speak plain HTTP beyond this machine", switch=True,
        env="MOONCAKE_HTTP_WITHOUT_TLS")
    health_host: str = setting("127.0.0.1", text, CLUSTER, "HOST", "address of --health-port")
    health_port: int = setting(0, count(0, 65535), CLUSTER, "PORT",
        "/health and /metrics of each worker's process (with --headless also of this one, which "
        "takes the first); the second worker takes the next; 0: any free ones, which "
        "`mooncake status` names")
    cluster_secret: str | None = setting(None, text, CLUSTER, "TEXT", "shared by all processes of "
        "the cluster (default: drawn at start; who joins on the same machine finds it)",
        env="MOONCAKE_CLUSTER_SECRET", secret=True)
    cluster_secret_file: str | None = setting(None, text, CLUSTER, "FILE",
        "that holds it, or a credential: other users see flags, but not this",
        env="MOONCAKE_CLUSTER_SECRET_FILE")
    tensor_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "processes that share each layer of an engine", short="-tp")
    decode_context_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "ranks of those among which an engine's KV is dealt out", short="-dcp")
    prefill_set: tuple[tuple[str, int], ...] = setting((), role_settings, CLUSTER, "NAME=N",
        "tensor-, pipeline-, decode-context- or data-parallel-size of prefill workers, where it is "
        "not that of all; may be repeated", repeat=True)
    decode_set: tuple[tuple[str, int], ...] = setting((), role_settings, CLUSTER, "NAME=N",
        "the same of decode workers", repeat=True)
    pipeline_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "stages of an engine, each with a part of the layers", short="-pp")
    stage_hosts: tuple[str, ...] = setting((), hosts_and_ports, CLUSTER, "HOST:PORT",
        "a machine that computes a stage, where `mooncake ranks` runs; may be repeated, first "
        "stage first; the last stage is the worker's own (default: all are)", repeat=True)
    data_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "workers of each engine: each has sequences and KV of its own, and all share the experts; "
        "on GPUs only with --dry-run so far",
        short="-dp")
    enable_expert_parallel: bool = setting(False, truth, CLUSTER, "",
        "each rank of an engine has some routed experts whole, in place of columns of all",
        switch=True, short="-ep")
    enable_eplb: bool = setting(False, truth, CLUSTER, "",
        "ranks that share experts move and copy those with most rows while they are used",
        switch=True)
    eplb_config: EplbConfig | None = owned(ModelOptions, "eplb", table(EplbConfig), CLUSTER, "JSON",
        'of --enable-eplb: \'{"window_size": 1000, "step_interval": 3000, '
        '"num_redundant_experts": 0}\' where nothing is said')
    all2all_backend: str = setting(GATHERED, OneOf(GATHERED, *DEEPEP), CLUSTER, "NAME",
        "how rows get to the ranks that have their experts: all to all of them, sums back; deepep: "
        "only with --dry-run so far")
    host: str = owned(ApiConfig, "host", text, API, "HOST", "address of the API")
    port: int = owned(ApiConfig, "port", count(0, 65535), API, "PORT",
        "port of the API; 0: any free one")
    api_key: tuple[str, ...] = owned(ApiConfig, "api_keys", texts, API, "KEY",
        "accepted key, an operator's and of all classes; may be repeated", repeat=True,
        env="MOONCAKE_API_KEY", secret=True)
    api_keys_file: str | None = setting(None, text, API, "FILE", "YAML list of keys; each has "
        "name, tenant, priorities, operator, requests_per_min, tokens_per_min, max_concurrent")
    ssl_certfile: str | None = setting(None, text, API, "FILE",
        "certificate chain in PEM: the API is then HTTPS")
    ssl_keyfile: str | None = setting(None, text, API, "FILE",
        "its private key (default: in the certificate's file)")
    ssl_ca_certs: str | None = setting(None, text, API, "FILE",
        "authorities whose client certificates are let in")
    ssl_cert_reqs: int | None = setting(None, count(0, 2), API, "N",
        "client certificates: 0 none, 1 optional, 2 needed (default: 2 with --ssl-ca-certs)")
    allowed_origins: tuple[str, ...] = owned(ApiConfig, "cors_origins", texts, API, "ORIGIN",
        "web origin whose pages may call, may be repeated", repeat=True)
    max_body_bytes: int = owned(ApiConfig, "max_body_bytes", size(1), API, "SIZE",
        "largest body of a request; larger ones get 413")
    max_inflight_body_bytes: int = owned(ApiConfig, "max_inflight_body_bytes", size(1), API,
        "SIZE", "bodies of running requests in memory together; more get 429, and one key has at "
        "most half of what the others leave")
    max_kept_answer_bytes: int = owned(ApiConfig, "max_kept_answer_bytes", size(0), API,
        "SIZE", "answers to requests with an Idempotency-Key in memory, for those that repeat "
        "them; one key has at most half of what the others leave")
    max_receipts: int = owned(ApiConfig, "max_receipts", count(0), API, "N",
        "last calls whose receipts (`mooncake explain`) are kept in memory; 0: none")
    max_connections: int = owned(ApiConfig, "max_connections", count(1), API, "N",
        "open connections; of more, the oldest that has proven no key is closed")
    max_body_cost: int = owned(ApiConfig, "max_body_cost", count(1), API, "N",
        "most values in a body: fields, objects and lists count 8, items of lists 1; streams "
        "stall about 1 ms for every 5,000")
    timeout_keep_alive: int = owned(ApiConfig, "keep_alive_s", count(1, 86400), API, "S",
        "seconds that idle connections stay open; longer than a proxy before it keeps them")
    access_log: bool = owned(ApiConfig, "access_log", truth, API, "", "log every HTTP request",
        switch=True)
    allow_special_tokens_in_chat: bool = owned(ApiConfig, "allow_special_tokens_in_chat", truth,
        API, "", "let messages spell control tokens: any user can then speak as the system",
        switch=True)
    kv_events_config: KvEventsConfig | None = setting(None, table(KvEventsConfig), API, "JSON",
        "publish which blocks are cached, in vLLM's format, for routers in front of this server: "
        '\'{"endpoint": "tcp://127.0.0.1:5557"}\'; the events hold prompts and answers')
    shutdown_timeout: float = owned(ApiConfig, "drain_s", positive, API, "S",
        "seconds that running requests get to finish at the end")
    max_num_seqs: int = setting(64, count(1, 65536), ENGINE, "N", "sequences in an engine's batch")
    max_num_batched_tokens: int | None = setting(None, count(1), ENGINE, "N",
        "tokens in one step: the chunk of a long prompt (default: 2048; on a GPU the largest of "
        "8192, 4096 and 2048 beside which the KV fits)")
    enable_prefix_caching: bool = owned(EngineConfig, "enable_prefix_caching", truth, ENGINE, "",
        "reuse blocks of earlier requests", switch=True)
    speculative_config: SpeculativeConfig | None = owned(EngineConfig, "speculation",
        table(SpeculativeConfig), ENGINE, "JSON", "several tokens of a sequence in one step, the "
        'same ones: \'{"method": "ngram", "num_speculative_tokens": 4}\'', short="-sc")
    step_timeout: int = owned(EngineConfig, "step_timeout_s", count(1), ENGINE, "SECONDS",
        "a worker whose step makes no progress for this long (its first steps: ten times as long) "
        "ends, and others take its requests")
    attention_backend: str = owned(ModelOptions, "attention_backend", OneOf(*ATTENTION_BACKENDS),
        ENGINE, "NAME",
        "auto: triton on a GPU; in bfloat16 native (C++, compiled here) or else onednn, where they "
        "can; else reference")
    moe_backend: str = owned(ModelOptions, "moe_backend", OneOf(*MOE_BACKENDS), ENGINE, "NAME",
        "auto: triton on a GPU; native or, where it is measured faster, onednn in bfloat16; else "
        "reference")
    expert_device: str = owned(ModelOptions, "expert_device", OneOf(*EXPERT_DEVICES), ENGINE,
        "NAME", "cpu: routed experts lie in DRAM and --moe-backend computes them, all else runs on "
        "the GPU")
    rank_backend: str = owned(ModelOptions, "rank_backend", OneOf(*RANK_BACKENDS), ENGINE, "NAME",
        "what the ranks of an engine exchange tensors by; auto: NCCL on GPUs, else shm, a memory "
        "that they share; gloo: connections over loopback, slower")
    deterministic: bool = owned(ModelOptions, "deterministic", truth, ENGINE, "",
        "no result depends on the rest of the batch nor, on CPUs, on the number of ranks; slower",
        switch=True)
    enforce_eager: bool = setting(False, truth, ENGINE, "",
        "capture no CUDA graphs of decode steps and of short prompts", switch=True)
    num_threads: int | None = setting(None, count(1, 1024), ENGINE, "N",
        "CPU threads of each engine (default: a fair share)")
    self_profile: bool = setting(True, truth, ENGINE, "",
        "time a few steps at start, for placement", switch=True)
    policy: str = owned(SchedulerConfig, "policy", OneOf(*POLICIES), LIMITS, "NAME", "of placement")
    slo_ttft_s: float | None = owned(SchedulerConfig, "ttft_slo_s", positive, LIMITS, "S",
        "answer 429 when the first token would take longer (default: no limit)")
    slo_tbt_ms: float | None = owned(SchedulerConfig, "tbt_slo_s", positive, LIMITS, "MS",
        "answer 429 when gaps between tokens would be longer; prompts beside streams are computed "
        "in chunks that keep this limit; the first token is shown together with the second, so "
        "that the hand-over to decode makes no gap (default: no limit)",
        per_unit=1000)
    role_switching: bool = owned(SchedulerConfig, "role_switching", truth, LIMITS, "",
        "workers change between prefill and decode when the load moves for long", switch=True)
    max_waiting_requests: int = owned(SchedulerConfig, "max_inflight", count(1), LIMITS, "N",
        "accepted requests at a time; more get 429")
    log_level: str | None = setting(None, OneOf(*_LEVELS), OTHER, "LEVEL",
        "of the log on standard error (default: info; a cluster that is started on a terminal "
        "shows warnings, and names the file that has the rest)")
    log_file: str | None = setting(None, text, OTHER, "PATH",
        "also append the log of all its processes, from info on, to this file on their machines")
    log_format: str = setting("text", OneOf("text", "json"), OTHER, "FORMAT",
        "json: one object a line")
    audit_log: str | None = setting(None, text, OTHER, "PATH",
        "append to this file who drained, removed, changed keys or was refused, one JSON object a "
        "line; -: write it to standard error")
    otlp_traces_endpoint: str | None = setting(None, web_url, OTHER, "URL",
        "send traces of requests to this collector, by OTLP over HTTP; needs the packages of "
        "mooncake-serve[otlp]")
    otlp_traces_sampling_ratio: float = setting(1.0, part, OTHER, "SHARE",
        "of requests without a traceparent that are traced; with one, the client has decided")
    dry_run: bool = setting(False, truth, OTHER, "", switch=True,
        text="print the configuration and memory plan, check all that `serve` would, start nothing")
    hardware: str | None = setting(None, text, OTHER, "H", "with --dry-run: fit the model on these "
        "GPUs instead of this machine: a name in configs/hardware, or a JSON file of that form")
    check: bool = setting(False, truth, OTHER, "", switch=True,
        text="compare each kernel with its reference on this machine, start nothing")
    # fmt: on

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the model answers to; the first one is reported."""
        return self.served_model_name or (Path(self.model).resolve().name,)

    @property
    def joins_by_ray(self) -> bool:
        """True if Ray places and supervises the one worker of `role`."""
        return self.join is not None and not self.join.startswith((options.DIRECT, *options.BY_URL))

    @property
    def seeds(self) -> tuple[str, ...]:
        """Addresses of gateways; the process joins any one of them without Ray."""
        if self.join is None or not self.join.startswith(options.DIRECT):
            return ()
        return tuple(self.join.split(","))

    @property
    def is_seed(self) -> bool:
        """True if this is a gateway that decides how its cluster works: it stands alone, or others
        join by its own address. Others ask it.
        """
        own = f"{options.DIRECT}{options.bracketed(self.bind_host)}:{self.join_port}"
        return self.role == "gateway" and (self.join is None or own in self.seeds)

    @property
    def joins_by_url(self) -> bool:
        """True if this gateway asks the cluster's first process by HTTP what it must know."""
        return self.join is not None and self.join.startswith(options.BY_URL)

    def shown(self) -> dict[str, Any]:
        """Return all settings in a form for people, with secrets hidden."""
        values = dataclasses.asdict(self) | {"served_model_name": self.names}
        for name, (option, _) in options.options_of(ServeConfig).items():
            if option.secret:
                values[name] = "(set)" if values[name] else None
        return {flag(name): value for name, value in values.items()}
