"""All settings of `mooncake serve`, each with its kind, group and help. Reads nothing.

Names are those of the flags. A setting that vLLM has too has the same name here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mooncake.api.config import ApiConfig
from mooncake.base import Role
from mooncake.base.block_events.kv_events import KvEventsConfig
from mooncake.base.tls_files import TlsFiles
from mooncake.engine.config import EngineConfig, SpeculativeConfig
from mooncake.engine.expert_placement import EplbConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.config import options
from mooncake.launch.config.options import (
    OneOf,
    SomeOf,
    amount,
    bounds,
    count,
    disks,
    engine_events,
    engine_urls,
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
from mooncake.launch.host.environment import is_loopback
from mooncake.model.options import (
    ATTENTION_BACKENDS,
    DEEPEP,
    DEVICES,
    EXPERT_DEVICES,
    FROM_ENGINES,
    FROM_FILES,
    GATHERED,
    KV_DTYPES,
    MOE_BACKENDS,
    RANK_BACKENDS,
    ModelOptions,
)
from mooncake.scheduler.config import POLICIES, SchedulerConfig
from mooncake.scheduler.scaling.config import Bounds, ScalingConfig
from mooncake.transfer.net.endpoint import PROTECTIONS
from mooncake.transfer.rdma.settings import RdmaSettings

MODEL = "model and its memory"
POOL = "KVCache pool of each kvstore worker"
CLUSTER = "cluster"
ENGINES = "other people's engines"
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
    model: str = setting("", text, MODEL, "MODEL",
        "directory of a checkpoint (default: k2-demo, the small model in the package)",
        positional=True)
    served_model_name: tuple[str, ...] = setting((), texts, MODEL, "NAME",
        "name of the model in the API; may be repeated", repeat=True)
    dtype: str = setting("auto", OneOf(*_DTYPES), MODEL, "TYPE",
        "data type of weights and KV; auto: as in the checkpoint")
    max_model_len: int | None = setting(None, count(1), MODEL, "TOKENS",
        "longest prompt plus output, e.g. 32k (default: the model's)")
    kv_cache_memory_bytes: int | None = setting(None, size(1), MODEL, "SIZE",
        "memory for KV pages of each engine (default: 1GiB)")
    kv_cache_dtype: str = setting("auto", OneOf("auto", *KV_DTYPES), MODEL, "TYPE",
        "data type of KV pages; auto: as --dtype")
    weights_key_file: str | None = setting(None, text, MODEL, "FILE",
        "file with the key of encrypted weights; the variable MOONCAKE_WEIGHTS_KEY may hold the "
        "key itself",
        env="MOONCAKE_WEIGHTS_KEY_FILE")
    weights_key_command: str | None = setting(None, text, MODEL, "COMMAND",
        "command that prints the key of encrypted weights, e.g. a client of a key service; no "
        "shell runs it")
    weights_from: str = setting(FROM_FILES, OneOf(FROM_FILES, FROM_ENGINES), MODEL, "WHERE",
        "where a worker that joins reads the weights: files; engines: from an engine that serves "
        "them, or from the files if none does")
    device: str = setting("auto", OneOf(*DEVICES), MODEL, "NAME",
        "device that computes; auto: a CUDA GPU if there is one")
    gpu_memory_utilization: float = owned(ModelOptions, "gpu_memory_utilization", share, MODEL,
        "SHARE",
        "share of a GPU's memory to use; KV pages get what weights and steps leave of it")
    num_gpu_blocks_override: int | None = setting(None, count(1), MODEL, "PAGES",
        "number of KV pages of each engine")
    block_size: int = owned(EngineConfig, "block_tokens", count(1, 1024), MODEL, "TOKENS",
        "tokens in a KVCache block")
    kvstore_dram_bytes: int = owned(KvStoreConfig, "dram_bytes", size(1), POOL, "SIZE",
        "DRAM for the pool of each kvstore worker", short="--dram")
    ssd: tuple[tuple[str, int], ...] = setting((), disks, POOL, "DIR:SIZE",
        "directory and size for blocks that do not fit into DRAM, e.g. /mnt/nvme0:2TiB; give one "
        "for each disk: repeat the flag or use commas", repeat=True)
    tenant_quota: tuple[tuple[str, int], ...] = setting((), quotas, POOL, "TENANT=SIZE",
        "most DRAM that a tenant's blocks may take; may be repeated", repeat=True)
    tenant_ssd_quota: tuple[tuple[str, int], ...] = setting((), quotas, POOL, "TENANT=SIZE",
        "most room that a tenant's blocks may take on all --ssd directories together; may be "
        "repeated", repeat=True)
    client_quota_share: float = owned(KvStoreConfig, "client_quota_share", share, POOL, "SHARE",
        "largest share of a worker's DRAM, and of its SSD, that all pool clients of a tenant "
        "without a quota may fill together")
    kept_share: float = owned(KvStoreConfig, "kept_share", part, POOL, "SHARE",
        "largest share of a worker's DRAM that is kept for requests which ask for it "
        "(cache_control, prompt_cache_key, session_id); 0: nothing is kept")
    tenant_kept_share: float = owned(KvStoreConfig, "tenant_kept_share", part, POOL, "SHARE",
        "largest share of a worker's DRAM that is kept for any one tenant")
    ssd_min_uses: int = owned(KvStoreConfig, "ssd_min_uses", count(1), POOL, "N",
        "blocks that were asked for this often are written to SSD; 1: all blocks")
    ssd_write_at: float = owned(KvStoreConfig, "ssd_write_at", part, POOL, "SHARE",
        "share of DRAM in use above which blocks are written to SSD; 0: at once")
    ssd_load_timeout_s: float = owned(KvStoreConfig, "ssd_load_timeout_s", positive, POOL,
        "SECONDS",
        "seconds that a reader waits for blocks on SSD or in --object-store; then it goes on with "
        "those that have come")
    object_store: str | None = setting(None, text, POOL, "s3://BUCKET/PREFIX",
        "bucket for blocks that outlive the cluster; clusters with the same model may share it")
    object_endpoint: str | None = setting(None, text, POOL, "URL",
        "server of --object-store, e.g. http://10.0.0.9:9000 (default: that of the machine's AWS "
        "settings)")
    object_size: int = setting(1 << 40, size(1), POOL, "SIZE",
        "most bytes of blocks in --object-store that a kvstore worker uses; it forgets the others "
        "and deletes none")
    object_min_uses: int = owned(KvStoreConfig, "object_min_uses", count(1), POOL, "N",
        "blocks that were asked for this often are written to --object-store; 1: all blocks")
    ssd_encryption: bool = setting(False, truth, POOL, "",
        "encrypt blocks on SSD and in --object-store; needs a key")
    ssd_key_file: str | None = setting(None, text, POOL, "FILE",
        "file with the key for --ssd-encryption; the variable MOONCAKE_SSD_KEY may hold the key "
        "itself",
        env="MOONCAKE_SSD_KEY_FILE")
    ssd_key_command: str | None = setting(None, text, POOL, "COMMAND",
        "command that prints the key for --ssd-encryption; no shell runs it")
    admin_ssl_certfile: str | None = setting(None, text, POOL, "FILE",
        "certificate chain (PEM) for --admin-port, which then speaks HTTPS")
    admin_ssl_keyfile: str | None = setting(None, text, POOL, "FILE",
        "private key of --admin-ssl-certfile (default: it is in the certificate's file)")
    admin_ssl_ca_certs: str | None = setting(None, text, POOL, "FILE",
        "authorities of the clients that --admin-port accepts (default: clients need no "
        "certificate)")
    admin_host: str = setting("127.0.0.1", text, POOL, "HOST",
        "address at which --admin-port listens")
    admin_port: int | None = setting(None, count(0, 65535), POOL, "PORT",
        "HTTP port of a kvstore worker for health, metrics, stats and drain (default: none, or "
        "8100 for a pool without engines); 0: any free port; a second worker takes the next port")
    admin_token: tuple[str, ...] = setting((), texts, POOL, "TOKEN",
        "token that lets its holder ask --admin-port for stats and drain; may be repeated",
        repeat=True,
        env="MOONCAKE_ADMIN_TOKEN", secret=True)
    prefill: int = setting(1, count(0, 512), CLUSTER, "N", "number of prefill workers")
    decode: int = setting(1, count(0, 512), CLUSTER, "N", "number of decode workers")
    kvstore: int | None = setting(None, count(0, 512), CLUSTER, "N",
        "number of kvstore workers (default: 1, or 0 with --colocated)")
    colocated: bool = setting(False, truth, CLUSTER, "",
        "run everything in one process with one engine")
    ray_address: str | None = setting(None, host_and_port, CLUSTER, "HOST:PORT",
        "Ray cluster that places the workers (default: all run on this machine)")
    ray_without_tls: bool = setting(False, truth, CLUSTER, "",
        "use a Ray at --ray-address that speaks without TLS; anyone who reads the network can then "
        "run programs here",
        env="MOONCAKE_RAY_WITHOUT_TLS")
    role: str | None = setting(None, OneOf(*_ROLES), CLUSTER, "ROLE",
        "run only one worker, or one more gateway; needs --join (kvstore without --join: a pool "
        "without engines)")
    headless: bool = setting(False, truth, CLUSTER, "",
        "start and watch workers without an API; gateways are added with --role gateway --join")
    join: str | None = setting(None, joinable, CLUSTER, "HOST:PORT",
        "running cluster to join, by the address of a gateway or of a pool without engines, with "
        "or without tcp://; give several with commas, and one that answers is enough")
    join_port: int = setting(0, count(0, 65535), CLUSTER, "PORT",
        "port of --bind-host at which others join this cluster, this gateway or this pool without "
        "engines; 0: any free port")
    join_timeout: int = setting(0, count(0), CLUSTER, "S",
        "seconds that --join waits for a cluster that is not up yet")
    orphan_timeout: int = setting(60, count(0), CLUSTER, "S",
        "seconds that workers serve on after their `serve` was killed; the same command, started "
        "by then, adopts them; 0, or --port 0: they end with `serve`")
    node_id: str | None = setting(None, text, CLUSTER, "NAME",
        "name of this machine (default: its host name)")
    transport: tuple[str, ...] = setting(("auto",), SomeOf("auto", "shm", "rdma", "tcp"), CLUSTER,
        "LIST", "transports that may move KV, e.g. shm,tcp; auto: all that work on this machine")
    require_transport: str | None = owned(SchedulerConfig, "require_transport",
        OneOf("shm", "rdma", "tcp"), CLUSTER, "NAME",
        "move KV only by this transport; a worker that cannot use it does not start, and gateways "
        "use no worker that moves KV by another one (default: see --transport)")
    shm_directory: str | None = setting(None, text, CLUSTER, "DIR",
        "directory of this machine in which workers find each other's shared memory, if they have "
        "networks of their own, as pods have (default: they share a network and /dev/shm)")
    transfer_protection: str = setting("auto", OneOf("auto", *PROTECTIONS), CLUSTER, "KIND",
        "protection of KV on sockets: none, mac (against changes) or encrypt (against readers "
        "too); auto: mac, or none if workers listen on loopback; RDMA cannot encrypt")
    push_checksums: str = setting("auto", OneOf("auto", "on", "off"), CLUSTER, "WHEN",
        "decode compares KV that prefill pushes with checksums before it uses it; auto: on if "
        "workers listen beyond loopback and KV is in host memory")
    rdma_device: tuple[str, ...] = owned(RdmaSettings, "devices", texts, CLUSTER, "NAME",
        "NIC to use, such as mlx5_0; may be repeated (default: all)", repeat=True)
    rdma_near: tuple[tuple[str, tuple[str, ...]], ...] = setting((), nearby, CLUSTER,
        "PLACE=NIC,NIC",
        "NICs to prefer for memory at a place: cpu:NUMA-NODE, gpu:PCI-ADDRESS or anywhere; may be "
        "repeated (default: the nearest)", repeat=True)
    rdma_gid_index: int | None = owned(RdmaSettings, "gid_index", count(0, 255), CLUSTER, "N",
        "GID index of each NIC (default: RoCE v2, routable)")
    rdma_mtu: int | None = owned(RdmaSettings, "mtu_bytes", count(256, 4096), CLUSTER, "BYTES",
        "largest MTU in bytes (default: the port's own)")
    rdma_traffic_class: int = owned(RdmaSettings, "traffic_class", count(0, 255), CLUSTER, "N",
        "traffic class of RDMA packets, for networks with a lossless class (RoCE: 4 times the "
        "DSCP)")
    rdma_service_level: int = owned(RdmaSettings, "service_level", count(0, 15), CLUSTER, "N",
        "service level of RDMA packets on InfiniBand")
    bind_host: str = setting("127.0.0.1", text, CLUSTER, "HOST",
        "address at which workers listen for each other")
    bind_ports: tuple[int, int] | None = setting(None, port_range, CLUSTER, "FIRST-LAST",
        "ports at which workers may listen on --bind-host, e.g. 7000-7099; each socket takes the "
        "first free one (default: any port)")
    health_ssl_certfile: str | None = setting(None, text, CLUSTER, "FILE",
        "certificate chain (PEM) for --health-port, which then speaks HTTPS")
    health_ssl_keyfile: str | None = setting(None, text, CLUSTER, "FILE",
        "private key of --health-ssl-certfile (default: it is in the certificate's file)")
    health_ssl_ca_certs: str | None = setting(None, text, CLUSTER, "FILE",
        "authorities of the probes that --health-port accepts (default: probes need no "
        "certificate; Kubernetes' probes have none)")
    http_without_tls: bool = setting(False, truth, CLUSTER, "",
        "let the API with keys, the health ports and the admin ports speak plain HTTP beyond this "
        "machine",
        env="MOONCAKE_HTTP_WITHOUT_TLS")
    health_host: str | None = setting(None, text, CLUSTER, "HOST",
        "address at which --health-port listens (default: --bind-host if it may listen there, with "
        "--health-ssl-certfile or --http-without-tls, otherwise 127.0.0.1)")
    health_port: int = setting(0, count(0, 65535), CLUSTER, "PORT",
        "port for /health and /metrics of each worker's process; a second worker takes the next "
        "port; with --headless this process takes the first; 0: any free ports, which `mooncake "
        "status` shows")
    cluster_secret: str | None = setting(None, text, CLUSTER, "TEXT",
        "secret that all processes of the cluster share; if none is given, `mooncake serve` draws "
        "one, and processes that join on its machine find it",
        env="MOONCAKE_CLUSTER_SECRET", secret=True)
    cluster_secret_file: str | None = setting(None, text, CLUSTER, "FILE",
        "file with the cluster secret, or with a credential; other users can see flags, but not "
        "this file",
        env="MOONCAKE_CLUSTER_SECRET_FILE")
    tensor_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "number of processes that share each layer of an engine", short="-tp")
    decode_context_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "number of ranks of an engine among which its KV is divided", short="-dcp")
    prefill_set: tuple[tuple[str, int], ...] = setting((), role_settings, CLUSTER, "NAME=N",
        "tensor-, pipeline-, decode-context- or data-parallel-size of prefill workers only; may be "
        "repeated", repeat=True)
    decode_set: tuple[tuple[str, int], ...] = setting((), role_settings, CLUSTER, "NAME=N",
        "as --prefill-set, for decode workers only; may be repeated", repeat=True)
    pipeline_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "number of stages of an engine, each with a part of the layers", short="-pp")
    stage_hosts: tuple[str, ...] = setting((), hosts_and_ports, CLUSTER, "HOST:PORT",
        "machine that computes a stage and runs `mooncake ranks`; may be repeated, first stage "
        "first; the last stage always runs on the worker's machine (default: all stages do)",
        repeat=True)
    data_parallel_size: int = setting(1, count(1, 1024), CLUSTER, "N",
        "number of workers of each engine; each has its own sequences and KV, and all share the "
        "experts; they run on one machine",
        short="-dp")
    enable_expert_parallel: bool = setting(False, truth, CLUSTER, "",
        "give each rank of an engine some whole routed experts, instead of some columns of all",
        short="-ep")
    experts: int = setting(0, count(0, 1024), CLUSTER, "N",
        "number of workers that hold the routed experts of a decode engine, and nothing else; its "
        "decode workers then hold none (needs --enable-expert-parallel)")
    enable_eplb: bool = setting(False, truth, CLUSTER, "",
        "move and copy the experts with the most rows between ranks that share experts, while they "
        "serve")
    eplb_config: EplbConfig | None = owned(ModelOptions, "eplb", table(EplbConfig), CLUSTER, "JSON",
        'settings of --enable-eplb (default: \'{"window_size": 1000, "step_interval": 3000, '
        '"num_redundant_experts": 0}\')')
    all2all_backend: str = setting(GATHERED, OneOf(GATHERED, *DEEPEP), CLUSTER, "NAME",
        "how tokens' rows get to the ranks that hold their experts; allgather_reducescatter: all "
        "rows go to all ranks, and sums come back; deepep: only with --dry-run so far")
    engines: tuple[str, ...] = setting((), engine_urls, ENGINES, "URL",
        "OpenAI-compatible server, such as vLLM's, to which --role gateway sends requests; may be "
        "repeated", repeat=True)
    engine_events: tuple[tuple[str, str, str | None], ...] = setting((), engine_events, ENGINES,
        "URL=EVENTS,REPLAY",
        "addresses at which one of --engines publishes block events in vLLM's format, and replays "
        "them, e.g. http://h:8000=tcp://h:5557,tcp://h:5558; may be repeated", repeat=True)
    engine_api_key: str | None = setting(None, text, ENGINES, "KEY",
        "API key that --engines expect (default: none, or that of the client if this server needs "
        "none)",
        env="MOONCAKE_ENGINE_API_KEY", secret=True)
    host: str = owned(ApiConfig, "host", text, API, "HOST", "address at which the API listens")
    port: int = owned(ApiConfig, "port", count(0, 65535), API, "PORT",
        "port of the API; 0: any free port")
    api_key: tuple[str, ...] = owned(ApiConfig, "api_keys", texts, API, "KEY",
        "key that the API accepts, with an operator's rights and all classes; may be repeated",
        repeat=True,
        env="MOONCAKE_API_KEY", secret=True)
    api_keys_file: str | None = setting(None, text, API, "FILE", "YAML list of keys; each has "
        "name, tenant, priorities, operator, requests_per_min, tokens_per_min, max_concurrent")
    ssl_certfile: str | None = setting(None, text, API, "FILE",
        "certificate chain (PEM) for the API, which then speaks HTTPS")
    ssl_keyfile: str | None = setting(None, text, API, "FILE",
        "private key of --ssl-certfile (default: it is in the certificate's file)")
    ssl_ca_certs: str | None = setting(None, text, API, "FILE",
        "authorities of the clients that the API accepts")
    ssl_cert_reqs: int | None = setting(None, count(0, 2), API, "N",
        "client certificates: 0 none, 1 optional, 2 required (default: 2 with --ssl-ca-certs)")
    allowed_origins: tuple[str, ...] = owned(ApiConfig, "cors_origins", texts, API, "ORIGIN",
        "web origin whose pages may call the API; may be repeated", repeat=True)
    max_body_bytes: int = owned(ApiConfig, "max_body_bytes", size(1), API, "SIZE",
        "largest body of a request; larger ones get 413")
    max_inflight_body_bytes: int = owned(ApiConfig, "max_inflight_body_bytes", size(1), API,
        "SIZE",
        "memory for the bodies of running requests; more get 429, and one key may take at most "
        "half of what the others leave")
    max_inflight_logprob_bytes: int = owned(ApiConfig, "max_inflight_logprob_bytes", size(1), API,
        "SIZE",
        "memory for the log-probabilities of running requests, each counted with its longest "
        "answer; more get 429, and one key may take at most half of what the others leave")
    max_kept_answer_bytes: int = owned(ApiConfig, "max_kept_answer_bytes", size(0), API,
        "SIZE",
        "memory for answers to requests with an Idempotency-Key, for clients that repeat them; one "
        "key may take at most half of what the others leave")
    max_receipts: int = owned(ApiConfig, "max_receipts", count(0), API, "N",
        "number of last calls whose receipts (`mooncake explain`) are kept in memory; 0: none")
    batch_dir: str | None = owned(ApiConfig, "batch_dir", text, API, "DIR",
        "directory of files and batches (/v1/files, /v1/batches), which survive restarts; gateways "
        "may share it (default: neither is served)")
    max_batch_lines: int = owned(ApiConfig, "max_batch_lines", count(1), API, "N",
        "most lines of a batch; a longer input file fails")
    max_batch_file_bytes: int = owned(ApiConfig, "max_batch_file_bytes", size(1), API, "SIZE",
        "largest file that is uploaded; larger ones get 413")
    max_tenant_batch_bytes: int = owned(ApiConfig, "max_tenant_batch_bytes", size(1), API, "SIZE",
        "most bytes that the files of a tenant take together, and most that the answers of one "
        "batch take")
    max_tenant_batches: int = owned(ApiConfig, "max_tenant_batches", count(1), API, "N",
        "most batches of a tenant that have not ended; more get 429")
    max_connections: int = owned(ApiConfig, "max_connections", count(1), API, "N",
        "most open connections; when there are more, the oldest that has proven no key is closed")
    max_body_cost: int = owned(ApiConfig, "max_body_cost", count(1), API, "N",
        "most values in a body; fields, objects and lists count 8, items of lists 1, 64 digits of "
        "a number 40; streams stall about 1 ms for every 5,000")
    timeout_keep_alive: int = owned(ApiConfig, "keep_alive_s", count(1, 86400), API, "S",
        "seconds that idle connections stay open; choose more than a proxy in front of this server "
        "has")
    enable_sleep_mode: bool = owned(ApiConfig, "enable_sleep_mode", truth, API, "",
        "let operators pause the cluster, let it sleep and replace its weights (/pause, /sleep, "
        "/update_weights)")
    access_log: bool = owned(ApiConfig, "access_log", truth, API, "", "log every HTTP request")
    allow_special_tokens_in_chat: bool = owned(ApiConfig, "allow_special_tokens_in_chat", truth,
        API, "", "let messages contain control tokens; any user can then speak as the system")
    kv_events_config: KvEventsConfig | None = setting(None, table(KvEventsConfig), API, "JSON",
        "publish in vLLM's format which blocks are cached, for routers in front of this server, "
        'e.g. \'{"endpoint": "tcp://127.0.0.1:5557"}\'; the events contain prompts and answers')
    shutdown_timeout: float = owned(ApiConfig, "drain_s", positive, API, "S",
        "seconds that running requests get to finish at shutdown")
    max_num_seqs: int = setting(64, count(1, 65536), ENGINE, "N",
        "most sequences in an engine's batch")
    max_num_batched_tokens: int | None = setting(None, count(1), ENGINE, "N",
        "most tokens in one step, which is also the chunk of a long prompt (default: 2048; on a "
        "GPU the largest of 8192, 4096 and 2048 that leaves room for the KV)")
    enable_prefix_caching: bool = owned(EngineConfig, "enable_prefix_caching", truth, ENGINE, "",
        "reuse cached blocks of earlier requests")
    speculative_config: SpeculativeConfig | None = owned(EngineConfig, "speculation",
        table(SpeculativeConfig), ENGINE, "JSON",
        'compute several tokens of a sequence in one step, with the same result, e.g. \'{"method": '
        '"ngram", "num_speculative_tokens": 4}\'', short="-sc")
    step_timeout: int = owned(EngineConfig, "step_timeout_s", count(1), ENGINE, "SECONDS",
        "seconds without progress of a step after which its worker ends and others take its "
        "requests; the first steps may take ten times as long")
    attention_backend: str = owned(ModelOptions, "attention_backend", OneOf(*ATTENTION_BACKENDS),
        ENGINE, "NAME",
        "kernels for attention; auto: triton on a GPU; on a CPU in bfloat16 native (C++, compiled "
        "here) or else onednn, if they can; otherwise reference")
    moe_backend: str = owned(ModelOptions, "moe_backend", OneOf(*MOE_BACKENDS), ENGINE, "NAME",
        "kernels for experts; auto: triton on a GPU; on a CPU in bfloat16 native or, if it is "
        "measured to be faster, onednn; otherwise reference")
    expert_device: str = owned(ModelOptions, "expert_device", OneOf(*EXPERT_DEVICES), ENGINE,
        "NAME",
        "where routed experts are computed; cpu: they lie in DRAM and --moe-backend computes them, "
        "while all else runs on the GPU")
    rank_backend: str = owned(ModelOptions, "rank_backend", OneOf(*RANK_BACKENDS), ENGINE, "NAME",
        "how the ranks of an engine exchange tensors; auto: NCCL on GPUs, otherwise shm (shared "
        "memory), and with --stage-hosts gloo; gloo: connections, without --stage-hosts over "
        "loopback, slower")
    deterministic: bool = owned(ModelOptions, "deterministic", truth, ENGINE, "",
        "make results independent of the rest of the batch and, on CPUs, of the number of ranks; "
        "slower")
    compile_cache: str | None = owned(ModelOptions, "compile_cache", text, ENGINE, "DIR",
        "read compiled kernels from this directory, which `mooncake compile` wrote; others must "
        "not be able to write to it",
        env="MOONCAKE_COMPILE_CACHE")
    enforce_eager: bool = setting(False, truth, ENGINE, "",
        "do not capture CUDA graphs of decode steps and short prompts")
    num_threads: int | None = setting(None, count(1, 1024), ENGINE, "N",
        "CPU threads of each engine (default: a fair share)")
    self_profile: bool = setting(True, truth, ENGINE, "",
        "time a few steps at start, so that placement knows their cost")
    policy: str = owned(SchedulerConfig, "policy", OneOf(*POLICIES), LIMITS, "NAME",
        "policy by which a prefill worker is chosen")
    slo_ttft_s: float | None = owned(SchedulerConfig, "ttft_slo_s", positive, LIMITS, "S",
        "limit on the predicted time to the first token, in seconds; requests above it get 429 "
        "(default: no limit)")
    slo_tbt_ms: float | None = owned(SchedulerConfig, "tbt_slo_s", positive, LIMITS, "MS",
        "limit on predicted gaps between tokens, in ms; requests above it get 429; with a limit, "
        "engines compute prompts in chunks short enough for running streams, or let them wait for "
        "these as long as --slo-ttft-s allows; the first token is sent together with the second, "
        "so that the hand-over to decode makes no gap (default: no limit)",
        per_unit=1000)
    target_ttft_s: float = setting(5.0, amount, LIMITS, "S",
        "time to the first token that engines plan for if no limits are set; prompts that can "
        "still be in time go before those that cannot; no request is refused for it; 0: as with "
        "--target-tbt-ms 0")
    target_tbt_ms: float = setting(150.0, amount, LIMITS, "MS",
        "gaps between tokens that engines plan for if --slo-tbt-ms is not set; prompts wait for "
        "running streams as long as --target-ttft-s allows, or are computed in chunks that are "
        "short enough, if this costs little throughput; no request is refused for it; 0: prompts "
        "neither wait nor let others go first")
    role_switching: bool = owned(SchedulerConfig, "role_switching", truth, LIMITS, "",
        "let workers change between prefill and decode when the load shifts for long")
    autoscale: str | None = owned(SchedulerConfig, "autoscale", bounds, LIMITS,
        "prefill=MIN..MAX,decode=MIN..MAX[,total=N][,start=S][,quiet=S]",
        "bounds for the number of replicas that the gateways advise (mooncake:desired_replicas, "
        "`mooncake plan --live`); a `mooncake serve` that starts prefill or decode workers follows "
        "this advice. total: most of both roles; start: seconds until a new worker serves; quiet: "
        "seconds for which fewer must have been enough before fewer are advised; MIN 0: the "
        "gateway is ready without workers, and batch requests wait for them")
    max_waiting_requests: int = owned(SchedulerConfig, "max_inflight", count(1), LIMITS, "N",
        "most accepted requests at a time; more get 429")
    log_level: str | None = setting(None, OneOf(*_LEVELS), OTHER, "LEVEL",
        "level of the log on standard error (default: info; warning for a cluster that is started "
        "on a terminal: the start then names the file that has the rest)")
    log_file: str | None = setting(None, text, OTHER, "PATH",
        "also append the log of all processes, from level info on, to this file on their machines")
    log_format: str = setting("text", OneOf("text", "json"), OTHER, "FORMAT",
        "format of the log; json: one object a line")
    audit_log: str | None = setting(None, text, OTHER, "PATH",
        "append to this file who drained, removed, changed keys or was refused, one JSON object a "
        "line; -: write to standard error")
    otlp_traces_endpoint: str | None = setting(None, web_url, OTHER, "URL",
        "send traces of requests to this collector, by OTLP over HTTP; needs the packages of "
        "mooncake-serve[otlp]")
    otlp_traces_sampling_ratio: float = setting(1.0, part, OTHER, "SHARE",
        "share to trace of the requests that come without a traceparent header; with this header "
        "the client decides")
    dry_run: bool = setting(False, truth, OTHER, "",
        "print the settings that have a value and the memory plan, make all checks that `serve` "
        "makes, start nothing")
    hardware: str | None = setting(None, text, OTHER, "H",
        "with --dry-run: fit the model on these GPUs instead of this machine; a name in "
        "configs/hardware, or a JSON file of the same form")
    check: bool = setting(False, truth, OTHER, "",
        "compare each kernel with its reference on this machine, and start nothing")
    # fmt: on

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the model answers to; the first one is reported."""
        return self.served_model_name or (Path(self.model).resolve().name,)

    @property
    def stays_here(self) -> bool:
        """True if all workers that this process starts run on its own machine: no Ray places
        them, or others could not reach them elsewhere.
        """
        return self.ray_address is None or is_loopback(self.bind_host)

    @property
    def health_address(self) -> str:
        """Where health ports listen: where others reach the process, if that is allowed."""
        allowed = self.http_without_tls or self.health_ssl_certfile is not None
        return self.health_host or (self.bind_host if allowed else "127.0.0.1")

    @property
    def seeds(self) -> tuple[str, ...]:
        """Addresses of gateways; the process joins any one of them."""
        return () if self.join is None else tuple(self.join.split(","))

    @property
    def is_seed(self) -> bool:
        """True if this is a gateway that decides how its cluster works: it stands alone, or others
        join by its own address. Others ask it.
        """
        own = f"{options.DIRECT}{options.bracketed(self.bind_host)}:{self.join_port}"
        return self.role == "gateway" and (self.join is None or own in self.seeds)

    def tls(self, port: str = "") -> TlsFiles | None:
        """Return the files of HTTPS for a port, "admin_", "health_" or "" (the API's), by their
        paths on its machine.
        """
        names = (f"{port}ssl_{name}" for name in ("certfile", "keyfile", "ca_certs", "cert_reqs"))
        certfile, keyfile, ca_certs, cert_reqs = (getattr(self, name, None) for name in names)
        if certfile is None:
            return None
        return TlsFiles(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs, cert_reqs=cert_reqs)

    @property
    def follows_load(self) -> bool:
        """True if this process starts and ends prefill and decode workers as the load needs."""
        starts = self.role is None and not self.colocated and self.prefill + self.decode > 0
        return starts and self.autoscale is not None

    def first_engines(self, role: Role) -> int:
        """Return with how many prefill or decode engines a cluster starts."""
        number = self.prefill if role is Role.PREFILL else self.decode
        return self._bounds(role).clamp(number) if self.follows_load else number

    def most_engines(self, role: Role) -> int:
        """Return how many prefill or decode engines there may be at a time."""
        most = self._bounds(role).most if self.follows_load else None
        return self.first_engines(role) if most is None else most

    def _bounds(self, role: Role) -> Bounds:
        return ScalingConfig.parse(str(self.autoscale)).bounds(role)

    def shown(self) -> dict[str, Any]:
        """Return all settings in a form for people, with secrets hidden."""
        values = dataclasses.asdict(self) | {"served_model_name": self.names}
        for name, (option, _) in options.options_of(ServeConfig).items():
            if option.secret:
                values[name] = "(set)" if values[name] else None
        return {flag(name): value for name, value in values.items()}
