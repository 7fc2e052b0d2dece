"""Works out what a configuration means for one model on one machine: sizes, limits, memory.

Pure, except that it reads the small files of a checkpoint. It needs no torch, so mistakes show at
once.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from mooncake.base import (
    DTYPE_BYTES,
    CheckpointError,
    ConfigError,
    KvLayout,
    ModelSpec,
    Role,
    Shape,
    format_bytes,
)
from mooncake.base.models.parallel import (
    DCP_FLAG,
    DP_FLAG,
    EP_FLAG,
    EXPERTS_FLAG,
    PP_FLAG,
    TP_FLAG,
    stage_layers,
)
from mooncake.crypto.keys import KeySource
from mooncake.engine.config import EAGLE3, MTP, EngineConfig
from mooncake.engine.expert_placement import EplbConfig, check_slots
from mooncake.kvstore.config import KvStoreConfig, ObjectStoreConfig, SsdConfig
from mooncake.launch.config.options import values_of
from mooncake.launch.config.rank_plan import (
    STEP_TOKENS,
    GpuNode,
    InstanceMemory,
    RankNeeds,
    StepTokens,
    check_dram,
    check_gpus,
    check_one_machine,
    instance_memory,
    step_tokens,
)
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.config.shipped import figures
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.secrets.key_source import key_source, read_keys
from mooncake.model.checkpoint.eagle3 import Eagle3Files
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.revision import PIECE_BYTES
from mooncake.model.checkpoint.quant_format import Fp8Block, QuantFormat, parse_quantization
from mooncake.model.checkpoint.tensor_cuts import check_cuts, check_slabs
from mooncake.model.memory import kept_by
from mooncake.model.options import FROM_ENGINES, GATHERED, KV_DTYPES, ModelOptions
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.world.cost_model import HardwareFigures

DEFAULT_KV_BYTES = 2**30
GAP_SHARE = 0.8
"""Engines plan for this share of the limits, because predictions err by 10 to 15 %."""
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
    quantization: QuantFormat | None
    """The format in which the weights are stored."""
    revision: str
    """Names the weights; part of every block key. Empty in a dry run, and where the cluster tells
    it.
    """


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
    layout: KvLayout
    options: ModelOptions
    needs: RankNeeds
    steps: StepTokens
    ranks: dict[Role, InstanceMemory]
    """The shape and the memory of a prefill engine and of a decode engine, rank by rank."""
    gpu_node: GpuNode | None
    """The hardware that is planned for, if it is not this machine."""
    stage_hosts: tuple[tuple[str, int], ...] = ()
    """Machines that compute the stages before the last one, first stage first, with their ports;
    empty: all ranks of an engine are on its worker's machine.
    """
    refusal: str = ""
    """Why `serve` on one such machine would not start this, in a dry run; empty: it would."""

    @property
    def num_engines(self) -> int:
        return sum(number for _, number in self.engines)

    @property
    def num_ranks(self) -> int:
        """How many ranks of engines are on this machine."""
        here = ((number, self._here(role)) for role, number in self.engines)
        return sum(number * memory.shape.tp * len(memory.stages) for number, memory in here)

    @property
    def engines(self) -> list[tuple[Role, int]]:
        """Roles with a model, and how many workers of each run on this machine."""
        counts = (
            (Role.PREFILL, self.num_prefills),
            (Role.DECODE, self.num_decodes),
            (Role.EXPERTS, self.num_experts),
        )
        return [(role, number) for role, number in counts if number]

    @property
    def num_experts(self) -> int:
        """How many workers hold routed experts and nothing else, on this machine."""
        shape = self.ranks[Role.DECODE].shape
        return self.num_decodes // shape.dp * shape.experts

    def engine_of(self, role: Role) -> EngineConfig:
        """Return the limits of an engine of `role`. Its ranks share the pages evenly. While each
        stage computes a step, one more step waits for the first stage.
        """
        shape = self.ranks[role].shape
        return dataclasses.replace(
            self.engine,
            num_blocks=-(-self.engine.num_blocks // shape.dcp) * shape.dcp,
            num_homes=shape.dcp,
            num_stages=shape.pp,
            in_lockstep=shape.num_sharers > 1,
            max_steps_in_flight=shape.pp + 1 if shape.pp > 1 else self.engine.max_steps_in_flight,
        )

    def engine_bytes(self, role: Role) -> int:
        """Return the memory of all ranks of one engine that are on its worker's machine."""
        memory = self._here(role)
        return memory.sum(lambda rank: rank.dram + rank.weights + rank.overhead) + self._kv(memory)

    def _here(self, role: Role) -> InstanceMemory:
        """Return the memory of an engine's ranks that are on its worker's machine."""
        memory = self.ranks[role]
        first = -1 if self.stage_hosts and memory.shape.pp > 1 else 0
        return dataclasses.replace(memory, stages=memory.stages[first:])

    def _kv(self, memory: InstanceMemory) -> int:
        """Return the bytes of an engine's pages with their copies. Ranks on the host map the same
        pages, unless each has its own memory.
        """
        shape = memory.shape
        own = msgspec.structs.replace(self.options, shape=shape).own_memories
        copies = shape.tp if self.needs.on_gpu or own else shape.dcp
        return memory.sum(lambda rank: rank.kv) // shape.tp * copies

    @property
    def total_bytes(self) -> int:
        """Memory of all workers on this machine, in bytes."""
        engines = sum(number * self.engine_bytes(role) for role, number in self.engines)
        return engines + self.num_kvstores * self.kvstore.dram_bytes

    @property
    def _weights_as(self) -> str:
        kept = kept_by(self.options, self.model.dtype, self.model.quantization)
        name = "" if kept is None else "FP8, " if isinstance(kept.format, Fp8Block) else "INT4, "
        return name + self.model.dtype

    def memory_rows(self) -> list[tuple[str, str, str]]:
        """Return what takes memory, for a table: (what, each, all together)."""
        rows = []
        alike = len({self.ranks[role] for role, _ in self.engines}) == 1
        engines = [(role, self.num_engines) for role, _ in self.engines[:1]]
        for role, number in engines if alike else self.engines:
            memory, of_whom = self._here(role), "" if alike else f", {role.value}"
            pages = f"{memory.num_pages} pages of {self.engine.block_tokens} tokens"
            num_ranks = memory.shape.tp * len(memory.stages)
            ranks = number * num_ranks
            rows.append(
                (
                    f"weights ({self._weights_as}){of_whom}",
                    memory.sum(lambda rank: rank.weights) // num_ranks,
                    ranks,
                )
            )
            if not memory.only_experts:
                rows.append((f"KV cache, {pages}{of_whom}", self._kv(memory), number))
            rows.append(
                (
                    f"activations and libraries{of_whom}",
                    memory.sum(lambda rank: rank.overhead) // num_ranks,
                    ranks,
                )
            )
            dram = memory.sum(lambda rank: rank.dram)
            if dram:
                rows.append((f"routed experts in DRAM{of_whom}", dram // num_ranks, ranks))
        rows.append(("kvstore pool", self.kvstore.dram_bytes, self.num_kvstores))
        shown = [
            (what, f"{format_bytes(each)} x {count}", format_bytes(each * count))
            for what, each, count in rows
        ]
        return [*shown, ("total", "", format_bytes(self.total_bytes))]


def read_model(config: ServeConfig) -> ModelPlan:
    """Read the headers of the checkpoint that `config` names. Unless this is a dry run, read the
    revision of its weights too, which hashes files that were not hashed here before. A process
    without engines takes the revision from the checkpoint, and then needs neither weights nor a
    key.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be served.
        ConfigError: `max_model_len` is longer than the model allows, or a key is missing or wrong.
    """
    path, max_model_len = config.model, config.max_model_len
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "is not there"
        raise CheckpointError(
            f"{path} {what}; give the directory of a checkpoint "
            "(nothing is downloaded; `mooncake model init` writes a small one)"
        )
    keys = read_keys(_weights_key(config))
    is_told = config.dry_run or config.weights_from == FROM_ENGINES
    read = CheckpointFiles.open_config if is_told else CheckpointFiles.open
    files = read(directory, keys, reads_weights=_reads_weights(config))
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
        quantization=parse_quantization(
            spec.quantization or files.config.get("quantization_config")
        ),
        revision="" if is_told else files.revision(environment.cache_dir(), _log_hashing),
    )


def _reads_weights(config: ServeConfig) -> bool:
    """Return whether this process starts an engine."""
    if config.role is not None:
        return config.role not in ("gateway", "kvstore")
    return config.colocated or bool(config.prefill or config.decode)


def _weights_key(config: ServeConfig) -> KeySource:
    return key_source("weights-key", config.weights_key_file, config.weights_key_command)


def _log_hashing(done: int, whole: int) -> None:
    """Log every tenth of the hashing if it takes more than a moment."""
    tenth = max(1, whole // 10)
    if whole > LOGGED_HASHING_BYTES and done // tenth > (done - PIECE_BYTES) // tenth:
        shown = f"{format_bytes(done)} of {format_bytes(whole)}"
        logger.info("hashing weights that are new here: %s", shown)


def make_plan(config: ServeConfig, cores: int) -> ServePlan:
    """Return the plan for `config` on this machine.

    Raises:
        CheckpointError, ConfigError: the model cannot be served, or not with these settings.
    """
    model = read_model(config)
    layout = KvLayout.for_model(
        model.spec,
        block_tokens=config.block_size,
        dtype=KV_DTYPES.get(config.kv_cache_dtype, model.dtype),
        weights_revision=model.revision,
        with_mtp=_has_mtp(config),
    )
    shapes, gpu_node = _shapes(config, model), _gpu_node(config)
    draft_bytes = _draft_bytes(config, model)
    num_prefills, num_decodes, num_kvstores = _counts(config, shapes)
    here = _here(config, shapes)
    num_ranks = num_prefills * here[Role.PREFILL].num_ranks
    of_decode = here[Role.DECODE]
    num_ranks += num_decodes * of_decode.num_ranks + num_decodes // of_decode.dp * of_decode.experts
    num_threads = config.num_threads or max(1, cores // max(1, num_ranks))
    device, num_gpus = _devices(config, gpu_node)
    if gpu_node is None and device == "cuda" and num_gpus:
        largest = max(shapes.values(), key=lambda shape: shape.tp)
        check_gpus(model.spec, model.quantization, largest, num_gpus)
    started = {Role.PREFILL: num_prefills, Role.DECODE: num_decodes}
    refusal = _refusal(config, shapes, started, device, num_gpus)
    if refusal and not config.dry_run:
        raise ConfigError(refusal)
    options = _options(config, model, shapes, device)
    options = msgspec.structs.replace(options, num_threads=num_threads)
    needs = RankNeeds(
        spec=model.spec,
        dtype=model.dtype,
        quantization=model.quantization,
        options=options,
        elsewhere=gpu_node is not None,
        layout=layout,
        step_tokens=config.max_num_batched_tokens or STEP_TOKENS[-1],
        step_sequences=config.max_num_seqs,
        max_model_len=model.max_model_len,
        draft_bytes=draft_bytes,
    )
    if gpu_node is not None:
        for shape in shapes.values():
            gpu_node.check_ranks(needs, shape)
    num_pages = _num_pages(config, model, layout.block_bytes)
    longest = -(-model.max_model_len // config.block_size)
    steps = step_tokens(
        config.max_num_batched_tokens,
        gpu_node or _gpus_here(config, options, num_ranks),
        needs,
        shapes.values(),
        longest if options.measure_pages else num_pages,
    )
    needs = dataclasses.replace(needs, step_tokens=steps.number)
    ranks, num_pages = _memories(needs, shapes, gpu_node, num_pages)
    kvstore = _kvstore(config, layout if num_kvstores else None)
    return ServePlan(
        model=model,
        engine=EngineConfig(
            num_blocks=num_pages,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=steps.number,
            max_chunk_tokens=steps.number,
            max_model_len=model.max_model_len,
            max_waiting=config.max_waiting_requests,
            max_gap_s=_max_gap_s(config),
            max_gap_is_target=config.slo_tbt_ms is None,
            first_token_s=_first_token_s(config),
            **values_of(config, EngineConfig),
        ),
        kvstore=kvstore,
        scheduler=SchedulerConfig(
            # Where all workers are to join, both kinds are expected.
            needs_prefill=num_prefills > 0
            or (config.headless and num_decodes == 0)
            or (config.is_seed and config.prefill > 0),
            **values_of(config, SchedulerConfig),
        ),
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        num_kvstores=num_kvstores,
        layout=layout,
        options=options,
        needs=needs,
        steps=steps,
        ranks=ranks,
        gpu_node=gpu_node,
        stage_hosts=_stage_hosts(config, shapes),
        refusal=refusal,
    )


def _memories(
    needs: RankNeeds, shapes: Mapping[Role, Shape], gpu_node: GpuNode | None, num_pages: int
) -> tuple[dict[Role, InstanceMemory], int]:
    """Return the memory of each role's engines, and the pages of an engine: `num_pages`, or
    as many as fill the GPUs of a described node.
    """
    ranks = {}
    for role, shape in shapes.items():
        if gpu_node is not None and needs.options.measure_pages:
            ranks[role] = gpu_node.filled(needs, shape)
            num_pages = max(1, ranks[role].num_pages * shape.dcp)
        else:
            ranks[role] = instance_memory(needs, shape, num_pages)
    of_decode = shapes[Role.DECODE]
    if of_decode.experts:
        ranks[Role.EXPERTS] = (
            instance_memory(needs, of_decode, 0, only_experts=True)
            if gpu_node is None
            else gpu_node.with_experts(needs, of_decode)
        )
    return ranks, num_pages


def _kvstore(config: ServeConfig, layout: KvLayout | None) -> KvStoreConfig:
    """Return the settings of pool nodes, which are to hold blocks of `layout`. There are no pool
    nodes if that is None.

    Raises:
        ConfigError: DRAM holds no block, or there are disks or a bucket and no pool node.
    """
    kvstore = KvStoreConfig(
        ssd=[SsdConfig(directory=where, num_bytes=size) for where, size in config.ssd],
        object_store=_object_store(config),
        tenant_quota_bytes=dict(config.tenant_quota),
        tenant_ssd_quota_bytes=dict(config.tenant_ssd_quota),
        **values_of(config, KvStoreConfig),
    )
    if layout is not None:
        kvstore.num_blocks(layout)
    elif config.ssd or config.object_store:
        cure = "leave it out" if config.role is not None else "add --kvstore 1"
        name = "ssd" if config.ssd else "object-store"
        raise ConfigError(f"{name}: no kvstore worker would use it; {cure}")
    return kvstore


def _object_store(config: ServeConfig) -> ObjectStoreConfig | None:
    """Return the bucket that `config` names. Raises ConfigError when it is written wrongly."""
    if config.object_store is None:
        return None
    scheme, _, rest = config.object_store.partition("://")
    bucket, _, prefix = rest.partition("/")
    if "@" in config.object_store:  # what is before it may be secret: it is not repeated
        raise ConfigError("object-store: give s3://BUCKET or s3://BUCKET/PREFIX, no credentials")
    if scheme != "s3" or not bucket or "?" in rest:
        raise ConfigError(
            f"object-store: {config.object_store!r} is not s3://BUCKET or s3://BUCKET/PREFIX"
        )
    endpoint = config.object_endpoint
    if endpoint is not None and not re.fullmatch(r"https?://[^@]+", endpoint):
        raise ConfigError("object-endpoint: give https://HOST or http://HOST:PORT, no credentials")
    return ObjectStoreConfig(
        bucket=bucket,
        prefix=prefix,
        num_bytes=config.object_size,
        endpoint=endpoint,
    )


def _shapes(config: ServeConfig, model: ModelPlan) -> dict[Role, Shape]:
    """Return the shape of each role's engines. Raises ConfigError when a shape is not possible."""
    shapes = {}
    if config.experts and not config.enable_expert_parallel:
        raise ConfigError(f"{EXPERTS_FLAG}: workers hold whole experts; add --{EP_FLAG}")
    for role, own in ((Role.PREFILL, config.prefill_set), (Role.DECODE, config.decode_set)):
        given = dict(own)
        tp = given.get(TP_FLAG, config.tensor_parallel_size)
        dp = given.get(DP_FLAG, config.data_parallel_size)
        experts = config.experts if role is Role.DECODE else 0
        shape = shapes[role] = Shape(
            tp=tp,
            pp=given.get(PP_FLAG, config.pipeline_parallel_size),
            dcp=given.get(DCP_FLAG, config.decode_context_parallel_size),
            dp=dp,
            ep=experts or (tp * dp if config.enable_expert_parallel else 1),
            experts=experts,
        )
        check_cuts(model.spec, model.quantization, shape)
        stage_layers(model.spec.num_hidden_layers, shape.pp)
        if config.deterministic:
            check_slabs(model.spec, shape)
    return shapes


def _has_mtp(config: ServeConfig) -> bool:
    """Return whether the model's MTP layer makes drafts: then blocks hold its KV, too."""
    return config.speculative_config is not None and config.speculative_config.method == MTP


def _draft_bytes(config: ServeConfig, model: ModelPlan) -> int:
    """Return the memory of an engine's head that makes drafts, including its KV.

    Raises:
        CheckpointError: the head does not fit this model.
        ConfigError: drafts cannot be made with these settings.
    """
    if _has_mtp(config) and not model.spec.num_nextn_predict_layers:
        raise ConfigError(
            f"speculative-config: {model.path} has no MTP layer (num_nextn_predict_layers is 0); "
            "the method ngram needs none"
        )
    if (head := _draft_model(config)) is None:
        return 0
    files = Eagle3Files.open(Path(head), model.spec)
    sizes = config.max_num_seqs, DTYPE_BYTES[model.dtype]
    windows = files.spec.window_bytes(*sizes) + files.spec.copied_bytes(*sizes)
    return files.num_bytes(sizes[1]) + windows


def _draft_model(config: ServeConfig) -> str | None:
    """Return the directory of the head that makes drafts, if there is one."""
    speculation = config.speculative_config
    if speculation is None or speculation.method != EAGLE3:
        return None
    return str(Path(speculation.model).resolve())


def _gpu_node(config: ServeConfig) -> GpuNode | None:
    """Return the hardware that a dry run names, if any."""
    if config.hardware is None:
        return None
    found = figures(config.hardware, HardwareFigures)
    return GpuNode(
        name=found.name,
        num_gpus=found.num_gpus,
        gpu_bytes=int(found.hbm_bytes),
        utilization=config.gpu_memory_utilization,
        dram_bytes=None if found.dram_bytes is None else int(found.dram_bytes),
    )


def _max_gap_s(config: ServeConfig) -> float | None:
    """Return how long a step for a prompt may take while streams wait for their own steps: by the
    limit, or else by the target. A target needs one for first tokens, too, because prompts that
    wait for streams must know how long.
    """
    if config.slo_tbt_ms is not None:
        return GAP_SHARE * config.slo_tbt_ms / 1e3
    if not config.target_tbt_ms or _first_token_s(config) is None:
        return None
    return GAP_SHARE * config.target_tbt_ms / 1e3


def _first_token_s(config: ServeConfig) -> float | None:
    """Return how long a prompt may wait and compute while streams keep their limit. A limit on gaps
    alone is kept whatever it costs first tokens.
    """
    if config.slo_tbt_ms is not None:
        first_s = config.slo_ttft_s
    elif not config.target_tbt_ms:
        first_s = None
    else:
        first_s = config.slo_ttft_s or config.target_ttft_s
    return GAP_SHARE * first_s if first_s else None


def _gpus_here(config: ServeConfig, options: ModelOptions, num_ranks: int) -> GpuNode | None:
    """Return this machine's GPUs, each as large as the part that one of `num_ranks` ranks has.
    Return None if there are no GPUs, or their memory is not known.
    """
    num_gpus = machine_facts.num_gpus()
    if options.device == "cpu" or not num_gpus or config.max_num_batched_tokens is not None:
        return None
    gpu_bytes = machine_facts.gpu_bytes()
    if gpu_bytes is None:
        return None
    return GpuNode(
        name="this machine",
        num_gpus=num_gpus,
        gpu_bytes=gpu_bytes // max(1, -(-num_ranks // num_gpus)),
        utilization=config.gpu_memory_utilization,
        dram_bytes=None,
    )


def _devices(config: ServeConfig, gpu_node: GpuNode | None) -> tuple[str, int]:
    """Return on what engines compute, and how many GPUs their machine has."""
    if gpu_node is not None:
        return "cuda", gpu_node.num_gpus
    num_gpus = machine_facts.num_gpus()
    if config.device == "auto":
        return "cuda" if num_gpus else "cpu", num_gpus
    return config.device, num_gpus


def _here(config: ServeConfig, shapes: Mapping[Role, Shape]) -> Mapping[Role, Shape]:
    """Return the shapes of what is on this machine: of engines whose other stages are elsewhere,
    the last stage.
    """
    if not config.stage_hosts:
        return shapes
    return {role: msgspec.structs.replace(shape, pp=1) for role, shape in shapes.items()}


def _refusal(
    config: ServeConfig,
    shapes: Mapping[Role, Shape],
    started: Mapping[Role, int],
    device: str,
    num_gpus: int,
) -> str:
    """Return why `serve` on a machine with these GPUs does not start as many workers of each role
    as `started` says; empty: it does.
    """
    sized = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
    try:
        for shape in shapes.values():
            _check_served(shape, device, config)
        if device == "cuda":
            here = _here(config, shapes)
            engines = [here[role] for role, number in started.items() for _ in range(number)]
            check_one_machine(engines, num_gpus, sized=sized is not None)
    except ConfigError as error:
        return error.message
    return ""


def _options(
    config: ServeConfig, model: ModelPlan, shapes: Mapping[Role, Shape], device: str
) -> ModelOptions:
    """Return the options with which engines run the model. Raises ConfigError: they cannot."""
    for shape in shapes.values():
        if device == "cpu" and shape.num_ranks > 1 and config.moe_backend == "triton":
            raise ConfigError("moe-backend=triton: ranks on CPUs do not use it; leave it out")
    sized = config.num_gpu_blocks_override or config.kv_cache_memory_bytes
    values = values_of(config, ModelOptions)
    values["eplb"] = _eplb(config, model.spec, shapes)
    if config.stage_hosts and device == "cpu":
        values["rank_backend"] = "gloo"
    return ModelOptions(
        device=device,
        measure_pages=device == "cuda" and sized is None,
        graphs=not config.enforce_eager,
        shape=shapes[Role.PREFILL if config.role == "prefill" else Role.DECODE],
        cache_dir=str(environment.cache_dir()),
        cpu_isa=environment.variables().get("ONEDNN_MAX_CPU_ISA"),
        weights_key=_weights_key(config),
        with_mtp=_has_mtp(config),
        draft_model=_draft_model(config),
        **values,
    )


def _eplb(config: ServeConfig, spec: ModelSpec, shapes: Mapping[Role, Shape]) -> EplbConfig | None:
    """Return how experts are moved between ranks, or None. Raises ConfigError if no ranks share
    experts, or if slots are not divisible among the ranks.
    """
    if not config.enable_eplb:
        if config.eplb_config is not None:
            raise ConfigError("eplb-config: it is used only with --enable-eplb; add it")
        return None
    sharing = [shape for shape in shapes.values() if shape.ep > 1]
    if not sharing:
        raise ConfigError(f"enable-eplb: no ranks share experts; add --{EP_FLAG}")
    eplb = config.eplb_config or EplbConfig()
    for shape in sharing:
        check_slots(spec.n_routed_experts, eplb.num_redundant_experts, shape.ep)
    return eplb


def _check_served(shape: Shape, device: str, config: ServeConfig) -> None:
    """Raise ConfigError for shapes that can be planned but not served yet."""
    if config.all2all_backend != GATHERED:
        raise ConfigError(
            f"all2all-backend={config.all2all_backend}: DeepEP is not served yet, only planned "
            "(--dry-run); leave it out, and rows go to all ranks that share experts"
        )
    if shape.ep > 1 and shape.pp > 1:
        raise ConfigError(
            f"{EP_FLAG} with {PP_FLAG}={shape.pp} is not served yet, only planned (--dry-run): "
            "leave one of them out, or give each to a role of its own (--prefill-set "
            f"{PP_FLAG}={shape.pp}, --decode-set {DP_FLAG}=2)"
        )
    shares = shape.num_sharers > 1
    flag = f"{EXPERTS_FLAG}={shape.experts}" if shape.experts else f"{DP_FLAG}={shape.dp}"
    if shares and device == "cuda" and config.expert_device == "cpu":
        raise ConfigError(
            f"{flag}: engines on GPUs do not share experts in DRAM yet (expert-device=cpu); leave "
            "one of them out"
        )
    if shares and config.colocated:
        raise ConfigError(
            f"{flag}: one process (--colocated) has one worker, which has nobody to share experts "
            "with; leave one of them out"
        )
    if shares and config.follows_load:
        raise ConfigError(
            f"autoscale: workers that share experts ({shape}) start and end together, so `mooncake "
            "serve` cannot start one alone; leave it out"
        )
    if shares and config.role_switching:
        raise ConfigError(
            f"role-switching: workers that share experts ({shape}) cannot change their role; "
            "leave it out"
        )
    if shape.experts and (config.role is not None or config.join is not None):
        raise ConfigError(
            f"{flag}: workers that join a running cluster hold their experts themselves; leave it "
            f"out, or raise {DP_FLAG}"
        )
    if device == "cuda" and config.enable_eplb and config.expert_device == "cpu":
        raise ConfigError(
            "enable-eplb: experts in DRAM beside a GPU are not moved yet (expert-device=cpu); "
            "leave one of them out"
        )
    if device == "cuda" and shape.num_ranks > 1 and config.rank_backend != "auto":
        raise ConfigError(
            f"rank-backend={config.rank_backend}: ranks on GPUs exchange by NCCL; leave it out"
        )


def _stage_hosts(config: ServeConfig, shapes: Mapping[Role, Shape]) -> tuple[tuple[str, int], ...]:
    """Return the machines of the stages before the last. Raises ConfigError if they do not fit the
    other settings.
    """
    if not config.stage_hosts:
        return ()
    staged = [shape for shape in shapes.values() if shape.pp > 1]
    for shape in staged:
        if shape.pp != len(config.stage_hosts) + 1:
            raise ConfigError(
                f"stage-hosts: the {shape.pp} stages of {shape} need {shape.pp - 1}, not "
                f"{len(config.stage_hosts)}; give one for each stage but the last, which runs on "
                "the worker's own machine, first stage first"
            )
    if not staged:
        raise ConfigError(f"stage-hosts: no engine has stages; add --{PP_FLAG} 2")
    if config.rank_backend == "shm":
        raise ConfigError(
            "stage-hosts: ranks on several machines share no memory; leave out rank-backend=shm"
        )
    if config.colocated:
        raise ConfigError(
            "stage-hosts: one process (--colocated) has all its stages on this machine; leave one "
            "of them out"
        )
    if config.cluster_secret is None:
        raise ConfigError(
            "stage-hosts: ranks there accept only workers that know their cluster's secret; give "
            "it here and there by --cluster-secret-file or MOONCAKE_CLUSTER_SECRET"
        )
    found = [(host.strip("[]"), int(port)) for host, _, port in (
        each.rpartition(":") for each in config.stage_hosts
    )]  # fmt: skip
    near = environment.is_loopback(config.bind_host)
    if near and not all(environment.is_loopback(host) for host, _ in found):
        raise ConfigError(
            f"bind-host: ranks on other machines cannot reach {config.bind_host}; give an address "
            "of this machine that they can reach"
        )
    if config.bind_host in ("0.0.0.0", "::"):
        raise ConfigError(
            "bind-host: ranks do not check who connects to them, so with --stage-hosts they do "
            f"not listen on {config.bind_host}, which is every network; give one address"
        )
    return tuple(found)


def _counts(config: ServeConfig, shapes: Mapping[Role, Shape]) -> tuple[int, int, int]:
    """Return how many prefill, decode and kvstore workers there are. An engine that shares its
    experts counts once for each sharer. If workers come and go on one machine, plan for the largest
    number of them: memory and threads must suffice for all.
    """
    dp = {role.value: shape.dp for role, shape in shapes.items()}
    if config.role is not None:
        return (
            dp["prefill"] * (config.role == "prefill"),
            dp["decode"] * (config.role == "decode"),
            int(config.role == "kvstore"),
        )
    if config.colocated:
        return 0, dp["decode"], config.kvstore or 0
    num_kvstores = 1 if config.kvstore is None else config.kvstore
    is_one_machine = environment.is_loopback(config.bind_host)
    count = config.most_engines if is_one_machine else config.first_engines
    prefill, decode = count(Role.PREFILL), count(Role.DECODE)
    return prefill * dp["prefill"], decode * dp["decode"], num_kvstores


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
            f"{name}: this is room for {pages} pages, but one sequence of {model.max_model_len} "
            f"tokens takes {longest} ({format_bytes(longest * block_bytes)}); give more or lower "
            "--max-model-len"
        )
    return pages


def check_memory(plan: ServePlan, available: int | None) -> None:
    """Raise ConfigError if the workers do not fit into the available memory."""
    if plan.gpu_node is not None:
        for role, number in plan.engines:
            plan.gpu_node.check(plan.needs, plan.ranks[role], number)
    else:
        for role, number in plan.engines:
            ranks = number * plan.ranks[role].shape.num_ranks
            check_dram(ranks, max(rank.dram for rank in plan.ranks[role].stages), available, "here")
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
