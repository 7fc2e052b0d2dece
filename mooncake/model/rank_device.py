"""The device of one rank of an engine, and all that depends on it: its part of the model, backends,
copies, graphs, the memory of its KV pages. A lead and its followers make the same choices.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mooncake_kernels.dispatch import TRITON
from mooncake_kernels.native import build

from mooncake.base import ConfigError, PageArray, format_bytes
from mooncake.base.kv_layout import ALL_PAGES, Home
from mooncake.model.backends import settle
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.copies import Copies
from mooncake.model.device.cuda import CudaCopies, CudaGraphs, CudaMeter, CudaSide
from mooncake.model.device.cuda_memory import CudaDevice
from mooncake.model.device.graphs import GraphPort
from mooncake.model.device.pages import PageDevice, PageMemory
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.moe import HostExperts
from mooncake.model.loading import load_model
from mooncake.model.measuring import MemoryMeter
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.group import Group


class RankDevice:
    def __init__(self, options: ModelOptions, dtype: torch.dtype, rank: int = 0) -> None:
        """With several ranks on GPUs, this rank's GPU becomes the calling thread's, because
        captures and exchanges depend on the thread.

        Raises:
            ConfigError: the options need something that this machine lacks.
        """
        self._options, self._dtype = options, dtype
        self.device = _device(options.device_of(rank))
        if self.device.type == "cuda" and options.shape.num_ranks > 1:
            torch.cuda.set_device(self.device)
        apart = options.experts_apart
        if apart or not self.is_gpu:
            build.look_in(options.compile_cache)
        self.backends = settle(
            options.attention_backend,
            "auto" if apart else options.moe_backend,
            self.device,
            deterministic=options.deterministic,
            dtype=dtype,
        )
        if self.is_gpu and not apart:
            self.backends = dataclasses.replace(self.backends, side=CudaSide(self.device))
        self._shipped: Any = self._shipped_kernels()
        self.expert_backends = None
        if apart:
            if options.deterministic:
                raise ConfigError(
                    "expert-device=cpu: deterministic needs all on the GPU; leave one of them out"
                )
            cpu = torch.device("cpu")
            self.expert_backends = settle("reference", options.moe_backend, cpu, dtype=dtype)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def owns_pages(self) -> bool:
        """Whether KV pages are in the device's own memory, which the host cannot address."""
        return self.device.type != "cpu"

    def _shipped_kernels(self) -> Any:
        """Return the module that reads kernels from the compile cache, if that has some for this
        GPU.
        """
        folder = self._options.compile_cache
        uses_triton = TRITON in (self.backends.attention, self.backends.moe)
        if folder is None or not (uses_triton and self.is_gpu):
            return None
        shipped = importlib.import_module("mooncake_kernels.triton.shipped")
        major, minor = torch.cuda.get_device_capability(self.device)
        return shipped if shipped.use(Path(folder), 10 * major + minor) else None

    def log_kernels(self) -> None:
        """Log how many compiled kernels a start has read and compiled."""
        if self._shipped is not None:
            self._shipped.log_use()

    def load(
        self,
        checkpoint: Checkpoint,
        group: Group | None,
        sharing: ExpertRanks | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> KimiK2:
        """Return this rank's part of a model; see `load_model`. Raises CheckpointError."""
        options = self._options
        return load_model(
            checkpoint,
            dtype=self._dtype,
            device=self.device,
            progress=progress,
            backends=self.backends,
            group=group,
            shape=options.shape,
            sharing=sharing,
            eplb=options.eplb,
            host=self.host_experts(),
            with_mtp=options.with_mtp,
            drafts=options.drafts,
            copies=self.open_copies(),
        )

    def open_copies(self) -> Copies | None:
        """Return copies between host and device, or None if the device is the host."""
        return CudaCopies(self.device) if self.is_gpu else None

    def host_experts(self) -> HostExperts | None:
        """Return the object that computes routed experts in DRAM, or None if they are with the rest
        of the model.
        """
        if self.expert_backends is None:
            return None
        copies = self.open_copies()
        assert copies is not None, "experts are apart from what has a device"
        return HostExperts(self.expert_backends, copies)

    def open_graphs(self) -> GraphPort | None:
        """Return the port that captures decode steps, or None if there is none."""
        return CudaGraphs() if self.is_gpu else None

    def open_meter(self) -> MemoryMeter | None:
        """Return the meter of the device's memory, or None if it has no memory of its own."""
        return CudaMeter() if self.is_gpu else None

    @functools.cached_property
    def page_device(self) -> PageDevice:
        """The device as transfers see it."""
        return CudaDevice(self.device)

    def allocate(self, pages: PageArray) -> KvTensors:
        """Return zeroed pages on the device.

        Raises:
            ConfigError: the device has no longer as much memory.
        """
        home = ALL_PAGES if pages.home is None else Home(pages.home, pages.num_homes)
        held = pages.num_homes_here * pages.pages_of_home
        try:
            return KvTensors.allocate(pages.layout, held, self.device, home, pages.layers)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"gpu-memory-utilization: {self.device} has no room for "
                f"{format_bytes(pages.num_bytes)} of KV pages, although it had when its memory was "
                "measured: another process has taken memory since. Start workers that share a GPU "
                "one after the other and give each later one a larger share, such as 0.4 and then "
                "0.8, or give `num-gpu-blocks-override`"
            ) from None

    def pages(self, pages: PageArray) -> PageMemory:
        """Return pages in the device's own memory, for a transfer engine and for a rank. They are
        zero by now, because neither NICs nor copies wait for what the device has only begun.
        """
        kv = self.allocate(pages)
        zeroed = self.page_device.copies.mark()
        if zeroed is not None:
            zeroed.reached()
        return PageMemory(kv, self.page_device)


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA GPU here")
    number = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= number:
        raise ConfigError(f"device={name}: torch sees {number} GPUs here; each rank needs its own")
    return device
