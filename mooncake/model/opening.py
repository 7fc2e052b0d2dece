"""Opens a checkpoint directory and makes runners: what launchers call, without tensors.

Owns the loaded model. Several runners of one process share its weights; each has its own pages.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mooncake_kernels.native import build
from mooncake_kernels.native.measured import Timing, machine, timings

from mooncake.base import CheckpointError, InternalError, KvLayout, PageArray
from mooncake.crypto.keys import KeyRing
from mooncake.engine.config import EngineConfig
from mooncake.engine.ranks.kv_moves import Opened
from mooncake.engine.ranks.step_log import CapturedSizes, Measure, UsePages
from mooncake.model.checkpoint.files.checkpoint_files import LentFiles
from mooncake.model.checkpoint.files.signature import Signature
from mooncake.model.checkpoint.tensor_cuts import tensor_shapes
from mooncake.model.checkpoint.weights import SPEC_DTYPES, Checkpoint
from mooncake.model.copies import Copies, HostCopies
from mooncake.model.device.graphs import most_rows
from mooncake.model.device.pages import PageMemory
from mooncake.model.drafts.eagle3 import Eagle3Head
from mooncake.model.drafts.layers import draft_layer, drafts_over, layers_read, load_head
from mooncake.model.grammars.following import Grammars
from mooncake.model.grammars.grammar_tokens import load_grammar_tokens
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler, sampling_ops
from mooncake.model.measuring import measure_memory
from mooncake.model.memory import GpuMemory, pages_that_fit
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.lead import Lead
from mooncake.model.parallel.peers import Peers
from mooncake.model.rank_device import RankDevice
from mooncake.model.running.computed_step import capture_steps, captured_sizes
from mooncake.model.running.follower import join_experts
from mooncake.model.running.runner import ModelRunner
from mooncake.model.warm_up import Limits, warm_up
from mooncake.transfer.device import DeviceMemory

_log = logging.getLogger(__name__)


def read_weights(
    path: Path, keys: KeyRing | None, cache_dir: str | None, lent: LentFiles | None = None
) -> tuple[Signature, str]:
    """Return the signature and the revision of the checkpoint at `path`, of which weights may be
    `lent`. Files that are not in `cache_dir` are hashed.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: these are not its keys.
    """
    checkpoint = Checkpoint.open(path, keys, lent)
    checkpoint.check_names(tensor_shapes(checkpoint.spec))
    return checkpoint.signature, checkpoint.revision(None if cache_dir is None else Path(cache_dir))


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
        lent: LentFiles | None = None,
    ) -> None:
        """Open the checkpoint, with `keys` if it is encrypted, or `lent` weights in place of those
        at `path`. Reads headers only.

        lead: the followers that hold the other parts of the model. They are already loading. peers:
        the instances with which this one shares its experts. They are loading too.

        Raises:
            ConfigError: the options need something that this machine lacks, or these are not the
                checkpoint's keys.
            CheckpointError: it cannot be read, or the model cannot compute in `dtype`.
        """
        self._lent = lent
        self._checkpoint = Checkpoint.open(path, keys, lent)
        if dtype not in SPEC_DTYPES:
            raise CheckpointError(f"dtype {dtype!r} is none of {', '.join(SPEC_DTYPES)}")
        self._dtype = SPEC_DTYPES[dtype]
        self._options = options or ModelOptions()
        if self._options.cache_dir is not None:
            build.keep_in(Path(self._options.cache_dir))
        build.limit_to(self._options.cpu_isa)
        self._device = RankDevice(self._options, self._dtype)
        if not self._device.is_gpu and self._dtype == torch.bfloat16:
            _log.info("native code: %s", build.used())
        self._grammars = Grammars(
            self._checkpoint.spec.vocab_size, functools.partial(load_grammar_tokens, path)
        )
        self._lock = threading.Lock()
        self.lead = lead
        self._peers = peers
        self._model: KimiK2 | None = None
        self._head: Eagle3Head | None = None
        self.memories: list[Opened] = []
        """The memories of ranks from 1 on, if they have any."""

    @functools.cached_property
    def revision(self) -> str:
        """The revision of the weights; see `Checkpoint.revision`."""
        folder = self._options.cache_dir
        return self._checkpoint.revision(None if folder is None else Path(folder))

    @property
    def can_rest(self) -> bool:
        """True if the weights can be kept in DRAM while nothing computes: they lie there already,
        and no other rank holds pages.
        """
        return self.lead is None and not self._device.is_gpu

    @functools.cached_property
    def signature(self) -> Signature:
        """What weights must have in common with these to replace them."""
        return self._checkpoint.signature

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights unless they are loaded. `progress` is called with (tensors done, all
        tensors).

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
                group = None if self.lead is None else self.lead.group
                peers = self._join_peers()
                model = self._device.load(self._checkpoint, group, peers, progress)
                self._give_back()
                if self.lead is not None:
                    self.lead.wait_until_loaded()
                if self._options.head_at_start:
                    self._load_head(model)
                self._model = model

    def _load_head(self, model: KimiK2) -> None:
        """Load the head that drafts unless it is loaded, or there is none."""
        if self._head is None:
            self._head = load_head(self._options.draft_model, model, self._device.backends)

    def _most_drafted(self, config: EngineConfig) -> int:
        """Return for how many sequences an engine drafts at most. If it does, its head is loaded
        then.
        """
        if config.speculation is None:
            return 0
        assert self._model is not None
        self._load_head(self._model)
        return config.max_num_seqs

    def _give_back(self) -> None:
        """Free what lent weights take."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()

    def warm_up(
        self, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Build the code that steps within the limits of `config` need; see `model.warm_up`. Load
        the weights first. `progress` is called with (sizes done, all sizes).
        """
        assert self._model is not None
        began_s = time.monotonic()
        limits = Limits(config.max_batched_tokens, config.max_num_seqs, config.max_model_len)
        built, known = warm_up(self._model, limits, progress or _untold)
        if known:
            took_s = time.monotonic() - began_s
            _log.info("warmed up for %d of %d sizes in %.1f s", built, known, took_s)

    def close(self) -> None:
        """End the other ranks, if there are any, the links to other instances, and the threads that
        compile grammars. Close all runners first.
        """
        self._grammars.close()
        self._give_back()
        if self._peers is not None:
            self._peers.close()
        if self.lead is not None:
            self.lead.close()

    @property
    def machine(self) -> str:
        """What computes here: how long a step takes depends on it."""
        return machine()

    @staticmethod
    def expert_timings() -> list[Timing]:
        """Return the times that loading measured to choose how the CPU computes experts."""
        return timings()

    @property
    def owns_pages(self) -> bool:
        """Whether KV pages are in the device's own memory, which the host cannot address."""
        return self._device.owns_pages

    def device_pages(self, layout: KvLayout, num_pages: int) -> PageMemory:
        """Return this rank's part of an engine's pages in the device's own memory, for a transfer
        engine and for `runner`; see `RankDevice.pages`.
        """
        array = PageArray(layout, num_pages, self._options.shape.dcp)
        return self._device.pages(self._options.held_by(0, array))

    def num_pages(self, layout: KvLayout, config: EngineConfig) -> int:
        """Return the number of KV pages: as configured, or as many as fit on the GPU with the least
        room; all ranks measure in one step. GPUs are measured in either case, so that no request
        later waits for a kernel to be compiled.

        Raises:
            ConfigError: not even one sequence of full length fits.
        """
        meter = self._device.open_meter()
        if meter is None:
            return config.num_blocks
        self.load()
        assert self._model is not None
        homes, model, drafted = config.num_homes, self._model, self._most_drafted(config)
        asked = Measure(
            layout, homes, config.max_batched_tokens, config.max_num_seqs, config.max_model_len,
            drafted, layers_read(model, self._head, drafted),
        )  # fmt: skip
        copies = self._device.open_copies()
        sampler = self._sampler(copies)
        group = None if self.lead is None else self.lead.group

        drafts = drafts_over(model, self._head, drafted, copies or HostCopies())

        def measure() -> list[GpuMemory]:
            return measure_memory(model, meter, asked, group, sampler.try_out, drafts)

        ranks = measure() if self.lead is None else self.lead.measure(asked, measure)
        if not self._options.measure_pages or not model.has_rest:
            return config.num_blocks
        tp, captured = self._options.shape.tp, self._draft_bytes(config)
        ranks = [*(rank.beside(captured) for rank in ranks[:tp]), *ranks[tp:]]
        page = PageArray(layout, homes, homes)
        each = pages_that_fit(
            ranks,
            utilization=self._options.gpu_memory_utilization,
            page_bytes=[self._options.held_by(rank, page).num_bytes for rank in range(len(ranks))],
            least_pages=-(-config.num_pages(config.max_model_len) // homes),
        )
        return each * homes

    def _draft_bytes(self, config: EngineConfig) -> int:
        """Return what captured steps with drafts take on a rank of the last stage beside what was
        measured: copies of a head's windows, and logits and states of the rows for drafts.
        """
        if config.speculation is None:
            return 0
        assert self._model is not None
        spec, item, head = self._model.spec, self._dtype.itemsize, self._head
        copied, num_states = 0, 0 if self._model.mtp is None else 2
        if head is not None:
            copied = head.spec.copied_bytes(config.max_num_seqs, item)
            num_states = len(head.spec.layers) + 1
        rows = most_rows(config.max_num_seqs, config.speculation.num_speculative_tokens)
        logits = (rows - config.max_num_seqs) * spec.vocab_size * torch.float32.itemsize
        return copied + logits + rows * num_states * spec.hidden_size * item

    def runner(
        self,
        layout: KvLayout,
        config: EngineConfig,
        pages: memoryview | DeviceMemory | None,
        num_threads: int | None,
        descriptor: int | None = None,
        transfer: bytes = b"",
    ) -> ModelRunner:
        """Return a runner of `config.num_blocks` pages, or of none if this rank holds routed
        experts and nothing else. Loads the weights first if necessary.

        descriptor: of the memory of `pages`, which other ranks map. They need it unless they have
        memories of their own. transfer: how these ranks open a transfer engine (see `UsePages`).
        Afterwards `memories` says where peers reach them. pages: host memory, or the result of
        `device_pages`. When none are given, or the device owns its pages and gets others, the
        runner makes its own, which transfers cannot reach.
        """
        self.load()
        model = self._model
        assert model is not None
        array = PageArray(layout, config.num_blocks if model.has_rest else 0, config.num_homes)
        held = self._options.held_by(0, array)
        if isinstance(pages, PageMemory):
            kv = pages.kv
        elif self.owns_pages or not isinstance(pages, memoryview):
            kv = self._device.allocate(held)
        else:
            kv = KvTensors.view(held, pages)
        drafted = self._most_drafted(config)
        copies = self._device.open_copies()
        layer = draft_layer(model, self._head, kv, drafted, copies or HostCopies())
        reads = () if layer is None else layer.reads
        sizes = CapturedSizes()
        if self._device.is_gpu:
            sizes = captured_sizes(model, self._device.backends, self._options, config, reads)
        if self.lead is not None:
            own = self._options.own_memories
            if descriptor is None and not own:
                raise InternalError("several ranks need pages that other processes can map")
            pages_of_all = UsePages(array, num_threads, sizes, own, transfer, drafted, reads)
            self.memories = self.lead.use_pages(pages_of_all, None if own else descriptor)
        if model.has_rest:
            self._grammars.read_vocabulary()
        captured = None
        graphs = self._device.open_graphs() if sizes.most_rows else None
        if graphs is not None:  # all ranks capture at once
            captured = capture_steps(model, kv, graphs, sizes, copies, layer, reads)
        if isinstance(pages, PageMemory) and captured is not None:
            pages.last_guess = lambda: captured.decode.last_guess
        runner = ModelRunner(
            model,
            kv,
            self._sampler(copies),
            num_threads=num_threads,
            captured=captured,
            copies=copies,
            lead=self.lead,
            peers=self._peers,
            draft_layer=layer,
        )
        if self._peers is not None:
            self._peers.wait_until_ready()
        self._device.log_kernels()
        return runner

    def is_released(self) -> bool:
        """Whether no instance that uses the experts of this one takes part in further steps."""
        return self._peers is None or self._peers.have_left(range(self._options.shape.dp))

    def _sampler(self, copies: Copies | None) -> Sampler:
        """Return a sampler whose kernels run where the model's do."""
        return Sampler(
            self._checkpoint.spec.vocab_size,
            self._grammars,
            copies=copies,
            ops=sampling_ops(self._device.backends),
        )

    def _join_peers(self) -> ExpertRanks | None:
        """Join the ranks of all instances that share experts with this one, if any do."""
        peers = self._peers
        if peers is None:
            return None
        ranks = join_experts(self._options, 0, peers.number, peers.descriptor, peers.timeout_s)
        peers.use(ranks.all)
        return ranks
