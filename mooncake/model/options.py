"""How to run a model, as plain values that are sent to its process. Needs no torch."""

from __future__ import annotations

import msgspec

from mooncake.base.kv_layout import PageArray
from mooncake.base.parallel import Shape, stage_layers
from mooncake.crypto.keys import KeySource
from mooncake.engine.expert_placement import EplbConfig

DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "reference", "onednn", "native", "triton")
RANK_BACKENDS = ("auto", "shm", "gloo")
GATHERED, DEEPEP = "allgather_reducescatter", ("deepep_high_throughput", "deepep_low_latency")
"""How rows go to the ranks that have their experts; vLLM's names."""
MOE_BACKENDS = ("auto", "reference", "onednn", "native", "triton")
EXPERT_DEVICES = ("auto", "cpu")
KV_DTYPES = {"fp8": "float8_e4m3fn"}
"""Of `--kv-cache-dtype`, besides auto, to a layout's dtype."""


class ExpertGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that hold the routed experts together, and which of them one is."""

    name: str
    """The same of all, and of no others on their machine."""
    number: int
    size: int
    workers: tuple[str, ...] = ()
    """What each is called."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a model, its device, dtype and backends."""

    device: str = "cpu"
    """"cpu", "cuda" or one GPU, as "cuda:1"."""
    expert_device: str = "auto"
    """Of routed experts: "auto", that of the rest, or "cpu", beside a model on a GPU."""
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    deterministic: bool = False
    """Results do not depend on what else is in the batch."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, steps and pages together."""
    measure_pages: bool = False
    """On a GPU: as many KV pages as fit, instead of the number in the engine's settings."""
    cache_dir: str | None = None
    """Where digests of weight files are kept, so that each is hashed once; None: nowhere."""
    cpu_isa: str | None = None
    """What compiled code may use of a CPU, as ONEDNN_MAX_CPU_ISA says it; None: all there is."""
    weights_key: KeySource = KeySource(name="weights-key")
    """Where the process that loads encrypted weights finds their key."""
    shape: Shape = Shape()
    """The processes among which each layer is cut, and how they share out the KVCache."""
    rank_backend: str = "auto"
    """What they exchange tensors by, see `group_kind`."""
    eplb: EplbConfig | None = None
    """How ranks that share experts place them anew while they are used; None: never."""
    num_threads: int | None = None
    """Of torch and compiled code in an engine's process; None: as many as there are cores."""
    with_mtp: bool = False
    """Whether the model's first MTP layer is loaded, which makes drafts."""
    draft_model: str | None = None
    """The directory of an EAGLE-3 head, which makes drafts; None: no head does."""
    graphs: bool = True
    """On a GPU: decode steps are captured once and replayed."""

    @property
    def group_kind(self) -> str:
        """What ranks exchange tensors by: "nccl" on GPUs; else, where nothing else is wanted, one
        memory, as they run on one machine.
        """
        return "nccl" if self.device != "cpu" else self.rank_backend

    @property
    def own_memories(self) -> bool:
        """Whether each rank keeps KV pages in a memory of its own, instead of all in one."""
        return self.group_kind in ("gloo", "nccl") and self.shape.num_ranks > 1

    def device_of(self, rank: int) -> str:
        """Return the device on which a rank computes: of the GPUs that its process sees, which are
        those of its engine, each rank has one.
        """
        shared = self.device == "cpu" or self.shape.num_ranks == 1
        return self.device if shared else f"cuda:{rank}"

    def held_by(self, rank: int, pages: PageArray) -> PageArray:
        """Return what the memory of `rank` holds of an engine's `pages`: of the layers of its
        stage the pages of its home.
        """
        if not self.own_memories:
            return pages
        stages = stage_layers(pages.layout.num_layers, self.shape.pp)
        return pages.of_rank(rank, stages[self.shape.stage_of(rank)])

    @property
    def experts_apart(self) -> bool:
        """Whether routed experts lie in DRAM, and all else on a GPU."""
        return self.expert_device == "cpu" and self.device != "cpu"
