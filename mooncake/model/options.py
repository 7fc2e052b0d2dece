"""How to run a model, as plain values that are sent to its process. Needs no torch."""

from __future__ import annotations

import msgspec

from mooncake.base.kv_layout import PageArray
from mooncake.base.models.parallel import Shape, stage_layers
from mooncake.crypto.keys import KeySource
from mooncake.engine.expert_placement import EplbConfig

DEVICES = ("auto", "cpu", "cuda")
FROM_FILES, FROM_ENGINES = "files", "engines"
"""Where weights are read: from files, or from an engine that serves them."""
ATTENTION_BACKENDS = ("auto", "reference", "onednn", "native", "triton")
RANK_BACKENDS = ("auto", "shm", "gloo")
GATHERED, DEEPEP = "allgather_reducescatter", ("deepep_high_throughput", "deepep_low_latency")
"""How rows go to the ranks that have their experts, under vLLM's names."""
MOE_BACKENDS = ("auto", "reference", "onednn", "native", "triton")
EXPERT_DEVICES = ("auto", "cpu")
KV_DTYPES = {"fp8": "float8_e4m3fn"}
"""Values of `--kv-cache-dtype`, besides auto -> the dtype of a layout."""


class ExpertGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that hold the routed experts together, and which of them this one is."""

    name: str
    """An id that is the same for all of them, and differs from other groups on their machine."""
    number: int
    size: int
    workers: tuple[str, ...] = ()
    """The names of the workers."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a model, its device, dtype and backends."""

    device: str = "cpu"
    """"cpu", "cuda" or one GPU, as "cuda:1"."""
    expert_device: str = "auto"
    """The device of routed experts: "auto", the same as the rest, or "cpu", beside a model on a
    GPU.
    """
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    deterministic: bool = False
    """Whether results must not depend on what else is in the batch."""
    gpu_memory_utilization: float = 0.9
    """The share of a GPU's memory for weights, steps and pages together."""
    measure_pages: bool = False
    """Whether a GPU gets as many KV pages as fit, instead of the number in the engine's
    settings.
    """
    cache_dir: str | None = None
    """The directory that keeps digests of weight files, so that each is hashed once; None: they are
    not kept.
    """
    cpu_isa: str | None = None
    """The CPU features that compiled code may use, as ONEDNN_MAX_CPU_ISA names them; None: all."""
    weights_key: KeySource = KeySource(name="weights-key")
    """Where the process that loads encrypted weights finds their key."""
    shape: Shape = Shape()
    """The processes among which each layer is cut, and how they share out the KVCache."""
    rank_backend: str = "auto"
    """The transport by which these exchange tensors, see `group_kind`."""
    eplb: EplbConfig | None = None
    """How ranks that share experts place them anew while they are used; None: never."""
    num_threads: int | None = None
    """The number of threads of torch and compiled code in an engine's process; None: one for each
    core.
    """
    with_mtp: bool = False
    """Whether to load the model's first MTP layer, which makes drafts."""
    draft_model: str | None = None
    """The directory of an EAGLE-3 head, which makes drafts; None: no head makes any."""
    head_at_start: bool = True
    """Whether to load that head with the weights. False: an engine that drafts later loads it."""
    graphs: bool = True
    """Whether decode steps on a GPU are captured once and replayed."""
    compile_cache: str | None = None
    """A directory that `mooncake compile` wrote; None: code is compiled here."""

    @property
    def drafts(self) -> bool:
        """Whether a layer drafts, from states of the model."""
        return self.with_mtp or self.draft_model is not None

    @property
    def group_kind(self) -> str:
        """The transport by which ranks exchange tensors: "nccl" on GPUs. Otherwise, unless the user
        chose another, it is one shared memory, because they run on one machine.
        """
        return "nccl" if self.device != "cpu" else self.rank_backend

    @property
    def own_memories(self) -> bool:
        """Whether each rank keeps KV pages in a memory of its own, instead of all in one."""
        return self.group_kind in ("gloo", "nccl") and self.shape.num_ranks > 1

    def device_of(self, rank: int) -> str:
        """Return the device on which a rank computes. Its process sees the GPUs of its engine, and
        each rank has one of them.
        """
        shared = self.device == "cpu" or self.shape.num_ranks == 1
        return self.device if shared else f"cuda:{rank}"

    def held_by(self, rank: int, pages: PageArray) -> PageArray:
        """Return what the memory of `rank` holds of an engine's `pages`: the pages of its home, in
        the layers of its stage.
        """
        if not self.own_memories:
            return pages
        num_layers, shape = pages.layout.num_layers, self.shape
        layers = stage_layers(num_layers - self.with_mtp, shape.pp)[shape.stage_of(rank)]
        if shape.stage_of(rank) == shape.pp - 1:  # an MTP layer lies behind those of the model
            layers = range(layers.start, num_layers)
        return pages.of_rank(rank, layers)

    @property
    def experts_apart(self) -> bool:
        """Whether routed experts are in DRAM and everything else on a GPU."""
        return self.expert_device == "cpu" and self.device != "cpu"
