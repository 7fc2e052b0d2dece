"""From a checkpoint directory to runners: the interface that launchers call, without tensors.

Owns the loaded model; several runners of one process share its weights, each has its own pages.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mooncake_kernels.dispatch import REFERENCE, TRITON, kernel
from mooncake_kernels.native import build
from mooncake_kernels.native.measured import Timing, timings

from mooncake.base import CheckpointError, ConfigError, InternalError, KvLayout, PageArray
from mooncake.crypto.keys import KeyRing
from mooncake.engine.config import EngineConfig
from mooncake.engine.rank_moves import Opened
from mooncake.engine.step_log import Measure, UsePages
from mooncake.model.backends import settle
from mooncake.model.checkpoint.weights import SPEC_DTYPES, Checkpoint
from mooncake.model.copies import Copies
from mooncake.model.device.cuda import CudaCopies, CudaGraphs, CudaMeter
from mooncake.model.device.cuda_memory import CudaDevice
from mooncake.model.device.graphs import DecodeGraphs
from mooncake.model.device.pages import PageDevice, PageMemory
from mooncake.model.follower import join_experts
from mooncake.model.grammar import Grammars
from mooncake.model.grammar_tokens import load_grammar_tokens
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.moe import HostExperts
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.measuring import measure_memory
from mooncake.model.memory import pages_that_fit
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.lead import Lead
from mooncake.model.parallel.peers import Peers
from mooncake.model.runner import ModelRunner
from mooncake.model.warm_up import Limits, warm_up
from mooncake.transfer.device import DeviceMemory

_log = logging.getLogger(__name__)


def _untold(done: int, whole: int) -> None:
    """Show no progress."""


class ModelSource:
    """A checkpoint on disk and, once loaded, the model in memory."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        options: ModelOptions | None = None,
        keys: KeyRing | None = None,
        lead: Lead | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Open the checkpoint, with `keys` where it is encrypted; reads headers only.

        lead: the followers that hold the other parts of the model, loading theirs already.
        peers: the instances with which this one shares its experts, doing the same.

        Raises:
            ConfigError: the options ask for what this machine does not have, or these are not the
                checkpoint's keys.
            CheckpointError: it cannot be read, or `dtype` is not one that can be computed in.
        """
        self._checkpoint = Checkpoint.open(path, keys)
        if dtype not in SPEC_DTYPES:
            raise CheckpointError(f"dtype {dtype!r} is none of {', '.join(SPEC_DTYPES)}")
        self._dtype = SPEC_DTYPES[dtype]
        self._options = options or ModelOptions()
        self._device = _device(self._options.device)
        if self._options.cache_dir is not None:
            build.keep_in(Path(self._options.cache_dir))
        build.limit_to(self._options.cpu_isa)
        apart = self._experts_apart
        self._backends = settle(
            self._options.attention_backend,
            "auto" if apart else self._options.moe_backend,
            self._device,
            deterministic=self._options.deterministic,
            dtype=self._dtype,
        )
        self._expert_backends = None
        if apart:
            if self._options.deterministic:
                raise ConfigError("expert-device=cpu: deterministic needs all on the GPU")
            moe, cpu = self._options.moe_backend, torch.device("cpu")
            self._expert_backends = settle("reference", moe, cpu, dtype=self._dtype)
        self._grammars = Grammars(
            self._checkpoint.spec.vocab_size, functools.partial(load_grammar_tokens, path)
        )
        self._lock = threading.Lock()
        self.lead = lead
        self._peers = peers
        self._model: KimiK2 | None = None
        self.memories: list[Opened] = []
        """The memories of ranks from 1 on, where they have some."""
        self._page_device: PageDevice | None = None

    @functools.cached_property
    def revision(self) -> str:
        """The revision of the weights; see `Checkpoint.revision`."""
        folder = self._options.cache_dir
        return self._checkpoint.revision(None if folder is None else Path(folder))

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights unless loaded; `progress(done, total)` counts tensors.

        Raises:
            CheckpointError: a tensor is missing, unknown or of the wrong shape.
            InternalError: another rank ended.
        """
        with self._lock:
            if self._model is None:
                if self._options.num_threads is not None:
                    torch.set_num_threads(
                        self._options.num_threads
                    )  # what is measured depends on it
                host = None
                if self._expert_backends is not None:
                    copies = self._open_copies()
                    assert copies is not None, "experts are apart from what has a device"
                    host = HostExperts(self._expert_backends, copies)
                model = load_model(
                    self._checkpoint,
                    dtype=self._dtype,
                    device=self._device,
                    progress=progress,
                    backends=self._backends,
                    group=None if self.lead is None else self.lead.group,
                    sharing=self._join_peers(),
                    eplb=self._options.eplb,
                    shape=self._options.shape,
                    host=host,
                    with_mtp=self._options.with_mtp,
                )
                if self.lead is not None:
                    self.lead.wait_until_loaded()
                self._model = model

    def warm_up(
        self, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Have built what steps within the limits of `config` need; see `model.warm_up`. Weights
        must have been loaded. `progress(done, total)` counts sizes.
        """
        assert self._model is not None
        began_s = time.monotonic()
        limits = Limits(config.max_batched_tokens, config.max_num_seqs, config.max_model_len)
        built, known = warm_up(self._model, limits, progress or _untold)
        if known:
            took_s = time.monotonic() - began_s
            _log.info("warmed up for %d of %d sizes in %.1f s", built, known, took_s)

    def close(self) -> None:
        """End the other ranks, if there are any, and the links to other instances. Runners must
        have been closed.
        """
        if self._peers is not None:
            self._peers.close()
        if self.lead is not None:
            self.lead.close()

    @staticmethod
    def expert_timings() -> list[Timing]:
        """Return what loading measured to choose how experts are computed on the CPU."""
        return timings()

    @property
    def owns_pages(self) -> bool:
        """Whether KV pages lie in the device's own memory, which the host cannot address."""
        return self._device.type != "cpu"

    def device_pages(self, layout: KvLayout, num_pages: int) -> PageMemory:
        """Return pages in the device's own memory, for a transfer engine and for `runner`. They are
        zero by now: neither NICs nor copies wait for what the device has only begun.
        """
        if self._page_device is None:
            self._page_device = self._open_page_device()
        kv = KvTensors.allocate(layout, num_pages, self._device)
        zeroed = self._page_device.copies.mark()
        if zeroed is not None:
            zeroed.reached()
        return PageMemory(kv, self._page_device)

    @property
    def _experts_apart(self) -> bool:
        """Whether routed experts lie in DRAM, and all else on a device."""
        return self._options.experts_apart

    def _open_copies(self) -> Copies | None:
        """Return copies between host and device; None: the device is the host."""
        return CudaCopies(self._device) if self._device.type == "cuda" else None

    def _open_page_device(self) -> PageDevice:
        return CudaDevice(self._device)

    def num_pages(self, layout: KvLayout, config: EngineConfig) -> int:
        """Return how many KV pages there are: as configured, or what the GPU has room for that has
        least, all ranks measuring in one step.

        Raises:
            ConfigError: not even one sequence of full length fits.
        """
        if not (self._options.measure_pages and self._device.type == "cuda"):
            return config.num_blocks
        self.load()
        assert self._model is not None
        homes = config.num_homes
        asked = Measure(layout, homes, config.max_batched_tokens, config.max_num_seqs)
        if self.lead is None:
            ranks = measure_memory(self._model, CudaMeter(), asked)
        else:
            model, group = self._model, self.lead.group
            ranks = self.lead.measure(
                asked, lambda: measure_memory(model, CudaMeter(), asked, group)
            )
        each = pages_that_fit(
            ranks,
            utilization=self._options.gpu_memory_utilization,
            block_bytes=layout.block_bytes,
            least_pages=-(-config.num_pages(config.max_model_len) // homes),
        )
        return each * homes

    def runner(
        self,
        layout: KvLayout,
        config: EngineConfig,
        pages: memoryview | DeviceMemory,
        num_threads: int | None,
        descriptor: int | None = None,
        transfer: bytes = b"",
    ) -> ModelRunner:
        """Return a runner of `config.num_blocks` pages, loading the weights first if need be.

        descriptor: of the memory of `pages`, which other ranks map; they need it, unless they have
            memories of their own.
        transfer: how these open a transfer engine (see `UsePages`); `memories` says where peers
            reach them afterwards.
        pages: host memory, or what `device_pages` returned. Where the device owns its pages and
        none are given they are the runner's own, out of any transfer's reach.
        """
        self.load()
        model = self._model
        assert model is not None
        array = PageArray(layout, config.num_blocks, config.num_homes)
        if isinstance(pages, PageMemory):
            kv = pages.kv
        elif self.owns_pages or not isinstance(pages, memoryview):
            kv = KvTensors.allocate(layout, config.num_blocks, self._device)
        else:
            kv = KvTensors.view(self._options.held_by(0, array), pages)
        if self.lead is not None:
            own = self._options.own_memories
            if descriptor is None and not own:
                raise InternalError("several ranks need pages that other processes can map")
            rows, width = self._captured(config)
            pages_of_all = UsePages(array, num_threads, rows, width, own, transfer)
            self.memories = self.lead.use_pages(pages_of_all, None if own else descriptor)
        self._grammars.read_vocabulary()
        copies = self._open_copies()
        decoder = self._decoder(model, kv, config, copies)
        if isinstance(pages, PageMemory) and decoder is not None:
            pages.last_guess = lambda: decoder.last_guess
        runner = ModelRunner(
            model,
            kv,
            Sampler(
                model.spec.vocab_size,
                self._grammars,
                copies=copies,
                draw_tokens=kernel("draw", TRITON) if self._backends.draws_on_device else None,
                penalize=kernel(
                    "penalize", TRITON if self._backends.draws_on_device else REFERENCE
                ),
            ),
            num_threads=num_threads,
            decoder=decoder,
            copies=copies,
            lead=self.lead,
            peers=self._peers,
        )
        if self._peers is not None:
            self._peers.wait_until_ready()
        return runner

    def _join_peers(self) -> ExpertRanks | None:
        """Join the ranks of all instances that share experts with this one, if any do."""
        peers = self._peers
        if peers is None:
            return None
        ranks = join_experts(self._options, 0, peers.number, peers.descriptor, peers.timeout_s)
        peers.use(ranks.all)
        return ranks

    def _decoder(
        self, model: KimiK2, kv: KvTensors, config: EngineConfig, copies: Copies | None
    ) -> DecodeGraphs | None:
        """Return captured decode steps where there are any; all ranks capture them at once."""
        rows, width = self._captured(config)
        if not rows:
            return None
        with torch.inference_mode():
            return DecodeGraphs(
                model,
                kv,
                CudaGraphs(),
                most_rows=rows,
                most_pages=width,
                copies=copies,
            )

    def _captured(self, config: EngineConfig) -> tuple[int, int]:
        """Return the sequences of the largest captured decode step, and pages of each: 0 where the
        device or the backends do not allow any, an MTP layer reads the states of each step, or the
        host takes part: it computes experts, stages tell each other what they timed, ranks that
        share experts how many rows they have.
        """
        model, shape = self._model, self._options.shape
        assert model is not None
        kernels = (self._backends.attention, self._backends.moe)
        can = self._device.type == "cuda" and kernels == (TRITON, TRITON)
        can = can and self._expert_backends is None and model.mtp is None
        can = can and shape.pp == shape.ep == 1 and model.spec.rope_interleave
        if not (can and self._options.graphs):
            return 0, 0
        return config.max_num_seqs, config.num_pages(config.max_model_len)


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA GPU here")
    return torch.device(name)
