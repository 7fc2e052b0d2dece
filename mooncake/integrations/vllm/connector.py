"""The connector that vLLM loads: its scheduler and each of its workers make one. It translates
between vLLM's interface (`KVConnectorBase_V1`, as of 0.32.0) and `plan` and `mover`, and decides
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mooncake.base import ConfigError, SystemIds
from mooncake.integrations.pool_link import PoolLink
from mooncake.integrations.settings import PoolSettings, weights_name
from mooncake.integrations.vllm.chunks import EngineKind, RankKv
from mooncake.integrations.vllm.lookups import PoolLookups, logger
from mooncake.integrations.vllm.mover import Mover, Staging
from mooncake.integrations.vllm.pages import Pages, StagedPages
from mooncake.integrations.vllm.plan import Planner, Scheduled, StepJobs, Use
from mooncake.integrations.vllm.saves import StepSaves

IDLE_WAIT_S = 0.005
"""How long an engine that has nothing to compute waits for the pool before it asks again."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers with each step."""

    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler at the start."""

    kv: RankKv


class MooncakePoolConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Shares the KVCache of prefixes with other vLLM servers through a Mooncake pool."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Create the part for this process. Raises ConfigError for KV that cannot be shared, and
        for wrong settings.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings = PoolSettings.read(
            transfer.kv_connector_extra_config, "kv_connector_extra_config"
        )
        _check(vllm_config, kv_cache_config)
        self._side: _Scheduler | _Worker
        if role == KVConnectorRole.WORKER:
            self._side = _Worker(settings, vllm_config, kv_cache_config.num_blocks)
        else:
            use = Use(
                takes=transfer.is_kv_consumer,
                gives=transfer.is_kv_producer,
                lookup_timeout_s=settings.lookup_timeout_s,
                load_timeout_s=settings.load_timeout_s,
            )
            self._side = _Scheduler(settings, vllm_config.cache_config.block_size, use)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is dropped is only a later miss."""
        return False

    def shutdown(self) -> None:
        self._side.close()

    # ------------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], RankMetadata]
    ) -> None:
        """Learn what the workers keep, and begin to look for the pool."""
        self._scheduler.set_ranks([metadata[rank].kv for rank in sorted(metadata)])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many more tokens the pool has, or None if it has not answered yet."""
        planner = self._scheduler.planner
        if planner is None or not _is_plain(request):
            return 0, False
        return planner.num_new_matched(request, num_computed_tokens, time.monotonic())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks into which tokens are to be loaded."""
        if (planner := self._scheduler.planner) is not None:
            block_ids = blocks.get_block_ids()[0]
            planner.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the jobs that go with a step."""
        return StepMetadata(self._scheduler.step(scheduler_output))

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks may be freed: saves do not need them any more."""
        planner = self._scheduler.planner
        return False, planner.finished(request.request_id) if planner is not None else None

    def reset_cache(self) -> bool:
        """Stop using earlier blocks: the weights may have been changed in place."""
        if (planner := self._scheduler.planner) is not None:
            planner.start_anew(f"{self._settings.namespace} {SystemIds().hex(8)}")
        return True

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the tensors that hold this rank's KV."""
        self._worker.take_pages(kv_caches)

    def get_handshake_metadata(self) -> RankMetadata:
        """Return what this rank keeps."""
        return RankMetadata(self._worker.rank)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the loads of this step."""
        self._worker.start_loads(self._get_connector_metadata().jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end between steps.

        A load within a step holds up the step's other requests. vLLM also lends its blocks to
        other requests before it hears that they did not come.
        """

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Copy this layer of the blocks that the step completes. A block of the pool that is whole
        by then goes there while later layers are computed.
        """
        self._worker.save_layer(layer_name, self._get_connector_metadata().jobs)

    def wait_for_save(self) -> None:
        """Copy what is left of the blocks that the step has completed. They go to the pool during
        the next steps.
        """
        self._worker.end_saves(self._get_connector_metadata().jobs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load has ended."""
        return None, self._worker.collect(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of ended loads that did not come; vLLM computes them."""
        return self._worker.take_missing()

    @property
    def _scheduler(self) -> _Scheduler:
        assert isinstance(self._side, _Scheduler), "called in a worker"
        return self._side

    @property
    def _worker(self) -> _Worker:
        assert isinstance(self._side, _Worker), "called in the scheduler"
        return self._side


class _Scheduler:
    """The part of the connector in the scheduler's process."""

    def __init__(self, settings: PoolSettings, block_tokens: int, use: Use) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._use = use
        self._lookups: PoolLookups | None = None
        self.planner: Planner | None = None

    def set_ranks(self, ranks: list[RankKv]) -> None:
        settings = self._settings
        link = PoolLink(settings, settings.lookup_timeout_s, logger)
        self._lookups = PoolLookups(link, ranks)
        self.planner = Planner(self._lookups, self._block_tokens, settings.namespace, self._use)

    def step(self, output: Any) -> StepJobs:
        if self.planner is None or self._lookups is None:
            return StepJobs()
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = output.kv_connector_block_state
        jobs = self.planner.step([
            Scheduled(name, computed[name], number, state.get_block_ids(name)[0])
            for name, number in output.num_scheduled_tokens.items()
        ])  # fmt: skip
        if jobs.idle and not jobs.loads and self.planner.is_asking:
            self._lookups.wait(IDLE_WAIT_S)
        return jobs

    def close(self) -> None:
        if self._lookups is not None:
            self._lookups.close()


class _Worker:
    """The part of the connector in a worker's process."""

    def __init__(self, settings: PoolSettings, config: Any, num_blocks: int) -> None:
        self._settings = settings
        self._config = config
        self._num_blocks = num_blocks
        self._pages: Pages | None = None
        self._kv: RankKv | None = None
        self._by_layer = False
        self._moving: tuple[Mover, StagedPages] | None = None
        self._step: StepSaves | None = None
        """The saves of this step, once they have begun."""
        self._is_idle = False
        self._missing: set[int] = set()

    @property
    def rank(self) -> RankKv:
        assert self._kv is not None, "asked before the KV was allocated"
        return self._kv

    def take_pages(self, kv_caches: Mapping[str, Any]) -> None:
        self._pages = Pages(kv_caches, self._num_blocks)
        kind = _kind(self._config, self._pages, list(kv_caches))
        self._kv = RankKv(kind.fingerprint, self._pages.block_bytes)
        # A copy from a GPU would hold up its next layers. A step of two batches has a layer twice.
        self._by_layer = self._pages.on_host and not self._config.parallel_config.use_ubatching

    def start_loads(self, jobs: StepJobs) -> None:
        self._is_idle = jobs.idle
        for load in jobs.loads:
            self._mover(jobs)[0].load(load, time.monotonic())

    def save_layer(self, name: str, jobs: StepJobs) -> None:
        assert self._pages is not None
        number = self._pages.number(name)
        if jobs.saves and self._by_layer and number is not None:
            self._saves(jobs).copy(number)

    def end_saves(self, jobs: StepJobs) -> None:
        if jobs.saves:
            self._saves(jobs).end()
            self._step = None

    def _saves(self, jobs: StepJobs) -> StepSaves:
        if self._step is None:
            self._step = StepSaves(*self._mover(jobs), jobs.saves)
        return self._step

    def collect(self, aborted: set[str]) -> set[str] | None:
        if self._moving is None or not self._moving[0].num_loads:
            return None
        mover, pages = self._moving
        if self._is_idle:
            mover.wait(IDLE_WAIT_S)
        ended = mover.collect(aborted, time.monotonic(), pages.write)
        self._missing |= ended.missing
        return ended.request_ids or None

    def take_missing(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    def close(self) -> None:
        if self._moving is not None:
            self._moving[0].close()

    def _mover(self, jobs: StepJobs) -> tuple[Mover, StagedPages]:
        """Return the mover of chunks, which starts with the first chunk."""
        if self._moving is None:
            assert jobs.packing is not None
            assert self._pages is not None
            settings = self._settings
            staging = Staging(jobs.packing, self.rank, settings.staging_bytes)
            pages = self._pages.staged(staging.memory, staging.slot_bytes, jobs.packing.blocks)
            link = PoolLink(settings, settings.load_timeout_s, logger)
            self._moving = Mover(link, staging, settings.tenant, settings.load_timeout_s), pages
        return self._moving


def _check(config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError for an engine whose KV cannot be shared."""
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            'kv_load_failure_policy: give "recompute" in --kv-transfer-config, or a pool that '
            "fails would fail requests"
        )
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "context parallelism: this connector does not support it; leave out "
            "--decode-context-parallel-size and --prefill-context-parallel-size"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise ConfigError(
            "this connector shares the KV of models with full attention only; serve this model "
            "without --kv-transfer-config"
        )


def _is_plain(request: Any) -> bool:
    """Return whether the KV of a request depends only on its tokens and the model."""
    return (
        request.lora_request is None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.skip_reading_prefix_cache
    )


def _kind(config: Any, pages: Pages, names: list[str]) -> EngineKind:
    """Return the kind of this rank's engine."""
    model, cache, tp, pp = config.model_config, config.cache_config, get_tp_group(), get_pp_group()
    layers = config.compilation_config.static_forward_context
    attention = {
        f"{layers[name].get_attn_backend().get_name()} {getattr(layers[name], 'isa', '')}"
        for name in names
    }
    return EngineKind(
        engine=f"vllm {vllm.__version__}",
        weights=weights_name(
            model.model,
            getattr(model.hf_config, "_commit_hash", None),
            config.load_config.load_format,
        ),
        config=model.hf_config.to_json_string(use_diff=False),
        dtype=str(model.dtype),
        quantization=str(model.quantization),
        kv_dtype=str(cache.cache_dtype),
        pages=f"{cache.block_size} tokens: {pages.described}",
        attention=", ".join(sorted(attention)),
        tp_size=tp.world_size,
        pp_size=pp.world_size,
        rank=pp.rank_in_group * tp.world_size + tp.rank_in_group,
    )
