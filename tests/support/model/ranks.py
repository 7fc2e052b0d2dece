"""One model on several ranks that are threads of this process, for comparing with one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mooncake.base import Shape
from mooncake.base.kv_layout import Home
from mooncake.engine.plan import StepSlot
from mooncake.model.backends import Backends
from mooncake.model.inputs import PrefersAbsorbed
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import WeightSource, load_model
from tests.support.model.thread_group import ThreadGroup
from tests.support.model.tiny_models import CPU, forward, kv_for

Made = TypeVar("Made")


class ThreadRanks:
    """The ranks of one model, each with KV pages of its own."""

    def __init__(
        self,
        source: Callable[[int], WeightSource],
        num_ranks: int,
        dtype: torch.dtype = torch.float32,
        num_homes: int = 1,
        backends: Backends | None = None,
        num_stages: int = 1,
        whole_experts: bool = False,
    ) -> None:
        """source: what a rank reads its weights from. num_ranks: of each stage. num_homes: ranks
        that share the KV out. whole_experts: each rank has some experts whole.
        """
        ep = num_ranks if whole_experts else 1
        self.shape = shape = Shape(tp=num_ranks, pp=num_stages, dcp=num_homes, ep=ep)
        self.groups = ThreadGroup.make(shape.num_ranks)
        self.sources = [source(rank) for rank in range(shape.num_ranks)]
        self.models: list[KimiK2] = [
            load_model(each, dtype=dtype, device=CPU, group=group, shape=shape, backends=backends)
            for each, group in zip(self.sources, self.groups, strict=True)
        ]
        self.kv: list[KvTensors] = [
            kv_for(model.spec, home=Home(rank % num_homes, num_homes))
            for rank, model in enumerate(self.models)
        ]
        self._threads = ThreadPoolExecutor(shape.num_ranks)

    def on_all(self, work: Callable[[int], Made]) -> list[Made]:
        """Return what `work(rank)` returns on each, all running at once."""

        def run(rank: int) -> Made:
            try:
                return work(rank)
            except BaseException:
                self.groups[rank].fail()
                raise

        return list(self._threads.map(run, range(len(self.groups))))

    def forward(
        self,
        slots: Sequence[StepSlot],
        *,
        whole: bool = False,
        rule: PrefersAbsorbed | None = None,
    ) -> dict[int, torch.Tensor]:
        """Return the logits of one step as `tiny_models.forward`; all ranks of the last stage have
        the same bits.
        """
        first, *others = self.on_all(
            lambda rank: forward(self.models[rank], self.kv[rank], slots, whole=whole, rule=rule)
        )[: self.shape.tp]
        for other in others:
            assert all(torch.equal(first[key], other[key]) for key in first)
        return first
