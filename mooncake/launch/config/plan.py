"""What a configuration means for one model on one machine: sizes, limits, memory.

Pure but for reading the small files of a checkpoint; needs no torch, so mistakes show at once.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from mooncake.base import (
    DTYPE_BYTES,
    CheckpointError,
    ConfigError,
    KvLayout,
    ModelSpec,
    format_bytes,
)
from mooncake.engine.config import EngineConfig
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.launch.config.options import values_of
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.model.checkpoint.files import CheckpointFiles
from mooncake.model.checkpoint.revision import PIECE_BYTES
from mooncake.model.memory import weights_bytes, workspace_bytes
from mooncake.model.options import KV_DTYPES, ModelOptions
from mooncake.scheduler.config import SchedulerConfig

DEFAULT_KV_BYTES = 2**30
LIBRARY_BYTES = 400 * 2**20
"""Of an engine's process: interpreter, tensor library, Ray."""
LOGGED_HASHING_BYTES = 8 * 2**30
"""Weights of this size take some seconds to hash."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The model as it will be served."""

    path: Path
    spec: ModelSpec
    dtype: str
    max_model_len: int
    weight_bytes: int
    """Of the weights in memory."""
    revision: str
    """Names the weights; part of every block key. Empty in a dry run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServePlan:
    """Everything that follows from a `ServeConfig`."""

    model: ModelPlan
    engine: EngineConfig
    kvstore: KvStoreConfig
    scheduler: SchedulerConfig
    num_prefills: int
    num_decodes: int
    num_kvstores: int
    num_threads: int
    layout: KvLayout
    options: ModelOptions
    workspace_bytes: int
    """Of the largest step of an engine."""

    @property
    def num_engines(self) -> int:
        """Workers with a model."""
        return self.num_prefills + self.num_decodes

    @property
    def engine_bytes(self) -> int:
        """Memory of one engine's process."""
        return self.model.weight_bytes + self.kv_bytes + self.overhead_bytes

    @property
    def overhead_bytes(self) -> int:
        """Memory of one engine's process besides weights and pages."""
        return self.workspace_bytes + LIBRARY_BYTES

    @property
    def kv_bytes(self) -> int:
        """Memory of one engine's pages."""
        return self.engine.num_blocks * self.layout.block_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of all workers on this machine."""
        return self.num_engines * self.engine_bytes + self.num_kvstores * self.kvstore.dram_bytes

    def memory_rows(self) -> list[tuple[str, str, str]]:
        """Return what takes memory, for a table: (what, each, all together)."""
        engines, stores = self.num_engines, self.num_kvstores
        pages = f"{self.engine.num_blocks} pages of {self.engine.block_tokens} tokens"
        rows = [
            (f"weights ({self.model.dtype})", self.model.weight_bytes, engines),
            (f"KV cache, {pages}", self.kv_bytes, engines),
            ("activations and libraries", self.overhead_bytes, engines),
            ("kvstore pool", self.kvstore.dram_bytes, stores),
        ]
        shown = [
            (what, f"{format_bytes(each)} x {count}", format_bytes(each * count))
            for what, each, count in rows
        ]
        return [*shown, ("total", "", format_bytes(self.total_bytes))]


def read_model(config: ServeConfig) -> ModelPlan:
    """Read the headers of the checkpoint that `config` names and, unless this is a dry run, the
    revision of its weights, for which files are hashed that were not hashed here before.

    Raises:
        CheckpointError: there is no checkpoint, or not one that can be served.
        ConfigError: `max_model_len` is longer than the model can do.
    """
    path, max_model_len = config.model, config.max_model_len
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "is not there"
        raise CheckpointError(
            f"{path} {what}; give the directory of a checkpoint "
            "(nothing is downloaded; `mooncake model init` writes a small one)"
        )
    files = CheckpointFiles.open(directory)
    spec = ModelSpec.from_config(files.config)
    longest = spec.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(f"max-model-len: {max_model_len} is more than this model's {longest}")
    wanted = spec.dtype if config.dtype == "auto" else config.dtype
    if spec.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise CheckpointError(
            f"{directory / 'config.json'}: dtype {spec.dtype!r} is none of {known}"
        )
    return ModelPlan(
        path=directory.resolve(),
        spec=spec,
        dtype=wanted,
        max_model_len=max_model_len or longest,
        weight_bytes=weights_bytes(spec, wanted),
        revision="" if config.dry_run else files.revision(environment.cache_dir(), _log_hashing),
    )


def _log_hashing(done: int, whole: int) -> None:
    """Log every tenth of a hashing that takes more than a moment."""
    tenth = max(1, whole // 10)
    if whole > LOGGED_HASHING_BYTES and done // tenth > (done - PIECE_BYTES) // tenth:
        shown = f"{format_bytes(done)} of {format_bytes(whole)}"
        logger.info("hashing weights that are new here: %s", shown)


def make_plan(config: ServeConfig, cores: int) -> ServePlan:
    """Return what `config` means here.

    Raises:
        CheckpointError, ConfigError: the model cannot be served, or not with these settings.
    """
    model = read_model(config)
    layout = KvLayout.for_model(
        model.spec,
        block_tokens=config.block_size,
        dtype=KV_DTYPES.get(config.kv_cache_dtype, model.dtype),
        weights_revision=model.revision,
    )
    num_prefills, num_decodes, num_kvstores = _counts(config)
    num_engines = num_prefills + num_decodes
    kvstore = KvStoreConfig(
        ssd=[SsdConfig(directory=where, num_bytes=size) for where, size in config.ssd],
        tenant_quota_bytes=dict(config.tenant_quota),
        tenant_ssd_quota_bytes=dict(config.tenant_ssd_quota),
        **values_of(config, KvStoreConfig),
    )
    if num_kvstores:
        kvstore.num_blocks(layout)
    elif config.ssd:
        cure = "leave it out" if config.role is not None else "add --kvstore 1"
        raise ConfigError(f"ssd: no kvstore worker would use it; {cure}")
    return ServePlan(
        model=model,
        engine=EngineConfig(
            num_blocks=_num_pages(config, model, layout.block_bytes),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_num_batched_tokens,
            max_chunk_tokens=config.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            max_waiting=config.max_waiting_requests,
            **values_of(config, EngineConfig),
        ),
        kvstore=kvstore,
        scheduler=SchedulerConfig(
            # Where all workers are to join, both kinds are expected.
            needs_prefill=num_prefills > 0 or (config.headless and num_decodes == 0),
            **values_of(config, SchedulerConfig),
        ),
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        num_kvstores=num_kvstores,
        num_threads=config.num_threads or max(1, cores // max(1, num_engines)),
        layout=layout,
        options=_options(config),
        workspace_bytes=workspace_bytes(
            model.spec,
            model.dtype,
            step_tokens=config.max_num_batched_tokens,
            step_sequences=config.max_num_seqs,
        ),
    )


def _options(config: ServeConfig) -> ModelOptions:
    """Return how engines run the model. ConfigError: more engines than the GPUs here can take."""
    device, num_gpus = config.device, machine_facts.num_gpus()
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    sized = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
    num_engines = sum(_counts(config)[:2])
    if device == "cuda" and num_engines > 1 and not num_gpus:
        raise ConfigError("device=cuda: this machine shows no NVIDIA GPU; use --device cpu")
    if device == "cuda" and num_engines > 1 and num_engines > num_gpus and sized is None:
        raise ConfigError(
            f"device=cuda: {num_engines} engines and {num_gpus} GPU: each takes all its memory. "
            "Engines that share one need pages of a given size: --kv-cache-memory-bytes or "
            "--num-gpu-blocks-override; else use fewer, --colocated, or --device cpu"
        )
    return ModelOptions(
        device=device,
        measure_pages=device == "cuda" and sized is None,
        graphs=not config.enforce_eager,
        cache_dir=str(environment.cache_dir()),
        **values_of(config, ModelOptions),
    )


def _counts(config: ServeConfig) -> tuple[int, int, int]:
    """Return how many prefill, decode and kvstore workers run on this machine."""
    if config.role is not None:
        return (
            int(config.role == "prefill"),
            int(config.role == "decode"),
            int(config.role == "kvstore"),
        )
    if config.colocated:
        return 0, 1, config.kvstore or 0
    return config.prefill, config.decode, 1 if config.kvstore is None else config.kvstore


def _num_pages(config: ServeConfig, model: ModelPlan, block_bytes: int) -> int:
    """Return how many KV pages an engine gets; one sequence of full length must fit."""
    longest = -(-model.max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        pages, name = config.num_gpu_blocks_override, "num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        pages, name = config.kv_cache_memory_bytes // block_bytes, "kv-cache-memory-bytes"
    else:
        return max(longest, DEFAULT_KV_BYTES // block_bytes)
    if pages < longest:
        raise ConfigError(
            f"{name}: room for {pages} pages, one sequence of {model.max_model_len} tokens takes "
            f"{longest} ({format_bytes(longest * block_bytes)}); give more or lower --max-model-len"
        )
    return pages


def check_memory(plan: ServePlan, available: int | None) -> None:
    """Raise ConfigError when the workers would not fit into the memory that is there."""
    if available is None or plan.total_bytes <= available or plan.options.device != "cpu":
        return
    nothing = format_bytes(0)
    rows = [(what, total) for what, _, total in plan.memory_rows()[:-1] if total != nothing]
    parts = ", ".join(f"{what} {total}" for what, total in rows)
    cures = []
    if plan.num_engines:
        cures += ["fewer workers", "--kv-cache-memory-bytes", "--max-model-len"]
    if plan.num_kvstores:
        cures += ["a smaller --kvstore-dram-bytes (--dram)"]
    raise ConfigError(
        f"this needs {format_bytes(plan.total_bytes)} ({parts}) and {format_bytes(available)} are "
        f"free; use {' or '.join(cures)}"
    )
