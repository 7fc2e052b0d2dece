"""A follower: a rank that computes its part of every step that its lead names. It samples nothing.

It owns its process: the process ends with its lead, and any error ends it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import mmap
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from mooncake.base import MooncakeError, PageArray
from mooncake.base.threads import VitalThread
from mooncake.crypto.keys import KeyRing
from mooncake.engine.plan import BY_MODEL, StepSlot
from mooncake.engine.ranks.kv_moves import (
    ALL_LAYERS,
    Alive,
    GuessHeard,
    Progress,
    RankAnswer,
    RankWord,
    Written,
    encode_answer,
)
from mooncake.engine.ranks.rank_group import LEAD_SILENT_S, SIGN_S
from mooncake.engine.ranks.step_log import (
    Ahead,
    CapturedSizes,
    Drafted,
    Held,
    Measure,
    RankMessage,
    RankStep,
    StepReader,
    UsePages,
    Way,
    decode,
)
from mooncake.model.checkpoint.files.checkpoint_files import LentFiles
from mooncake.model.checkpoint.weights import SPEC_DTYPES, Checkpoint
from mooncake.model.copies import Copies, HostCopies, LayerReports, Mark
from mooncake.model.device.graphs import DecodeGraphs, GraphPort
from mooncake.model.device.pages import PageMemory
from mooncake.model.drafts.eagle3 import Eagle3Head
from mooncake.model.drafts.layers import draft_layer, drafts_over, load_head
from mooncake.model.drafts.model_drafts import ModelDrafts
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.measuring import MemoryMeter, measure_memory
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.exchange import ExpertRanks
from mooncake.model.parallel.group import Group, GroupError
from mooncake.model.parallel.joining import join
from mooncake.model.parallel.lead import Loaded
from mooncake.model.rank_device import RankDevice
from mooncake.model.running.computed_step import ComputedStep, ForwardPass, capture_steps
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.net.blocking import receive, send

_log = logging.getLogger(__name__)

_LOOKS = 10
"""How often a follower checks a silent lead before it declares it stopped."""

Word = tuple[RankMessage, int | None]
"""A message of the lead, and the descriptor that came with it."""


class FollowerSettings(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    gpu: int = 0
    """Which of the GPUs that its process sees is its own."""
    model: str
    dtype: str
    options: ModelOptions
    num_threads: int | None = None
    """torch's CPU threads while it loads. Each `UsePages` says how many compute."""
    timeout_s: float
    """How long it waits for the other ranks in an exchange."""
    sign_s: float = SIGN_S
    """The time between two of its signs of life."""
    store: tuple[str, int] | None = None
    """(host, port) where ranks on several machines find each other; None: they use a file."""
    number: int = 0
    """The number of its instance among those that share experts."""
    loan: bytes = b""
    """What an engine lends this rank to read its weights; empty: it reads files."""


class PageMoves(Protocol):
    """Moves the pages of this rank when they are in a memory of its own."""

    def close(self) -> None:
        """End all moves in the last memory, if there is one. Peers cannot reach it any more."""

    def open(self, pages: PageArray, transfer: bytes, device: DeviceMemory | None) -> memoryview:
        """Return a memory for `pages`, after `close`, or an empty one when they are in a `device`'s
        memory. Tell the lead where peers reach it, or why it cannot exist.

        transfer: see `UsePages`.

        Raises:
            MooncakeError: the memory cannot be made.
        """

    def tell(self, word: RankWord) -> None:
        """Carry out an order of the lead. Any thread may call this."""

    def reached(self, progress: Progress) -> None:
        """Record this rank's progress, including its device's. One thread at a time may
        call this.
        """


class Guesses:
    """Steps that the lead has begun ahead of their plan. Later orders about pages are carried out
    at once, while a guess waits its turn. So whoever writes to pages first waits for all guesses of
    which the follower has heard.
    """

    def __init__(self, answer: Callable[[RankAnswer], None] = lambda _: None) -> None:
        """`answer`: tells the lead that a guess has been heard of."""
        self._answer = answer
        self._heard = self._begun = 0
        self._changed = threading.Condition()

    def hear(self) -> None:
        """Record that the lead begins a guess."""
        with self._changed:
            self._heard += 1
        self._answer(GuessHeard())

    def begin(self) -> None:
        """Record that a guess has begun here. A mark of the device follows it."""
        with self._changed:
            self._begun += 1
            self._changed.notify_all()

    def mark(self, last: Callable[[], Mark | None]) -> Mark | None:
        """Return a mark after all guesses heard of so far. `last` returns the mark after those that
        have begun.
        """
        with self._changed:
            return _Behind(self, self._heard, last) if self._heard else None

    def wait_until_begun(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._begun >= number)


@dataclass(frozen=True)
class _Behind:
    """The end of the first `number` guesses."""

    guesses: Guesses
    number: int
    last: Callable[[], Mark | None]

    def reached(self) -> None:
        self.guesses.wait_until_begun(self.number)
        if (mark := self.last()) is not None:
            mark.reached()


class Follower:
    """One rank's part of a model, and the pages over which it computes."""

    def __init__(
        self,
        model: KimiK2,
        group: Group,
        open_graphs: Callable[[], GraphPort | None] = lambda: None,
        moves: PageMoves | None = None,
        meter: MemoryMeter | None = None,
        copies: Copies | None = None,
        device_pages: Callable[[PageArray], PageMemory] | None = None,
        answer: Callable[[RankAnswer], None] = lambda _: None,
        guesses: Guesses | None = None,
        open_head: Callable[[], Eagle3Head | None] = lambda: None,
    ) -> None:
        """open_graphs: makes the port that captures decode steps over some pages. meter: measures
        memory. Both run on all ranks at once. None: neither this rank nor the lead can. moves:
        moves pages of this rank's own; None: the lead moves them for all. copies: to the device and
        back; None: the device is the host. device_pages: makes pages in the device's own memory;
        None: they are in the host's. answer: tells the lead which layers are written, from one
        thread at a time. guesses: the guesses of which the thread that listens to the lead has
        heard. open_head: returns what drafts, beside the same head of all ranks, if there is one.
        """
        self._model = model
        self._guesses = guesses or Guesses()
        self._moves = moves
        self._copies = copies
        self._copier = copies or HostCopies()
        self._device_pages = device_pages
        self._memory: PageMemory | None = None
        self._answer = answer
        self._reports: LayerReports[tuple[Progress, Written | None]] = LayerReports(self._report)
        stage = model.stage
        self._speaks = not stage.is_last and stage.ranks.rank == 0
        """Whether this rank reports the layers of its stage."""
        self._num_steps = 0
        self._group = group
        self._open_graphs = open_graphs
        self._meter = meter
        self._decoder: DecodeGraphs | None = None
        self._last: Sequence[StepSlot] = ()
        self.rank = group.rank
        self._reader = StepReader()
        self._forward: ForwardPass | None = None
        self._open_head = open_head
        self._head: Eagle3Head | None = None
        self._drafts: ModelDrafts | None = None
        self._reads: tuple[int, ...] = ()
        self._words: Iterator[Word] = iter(())
        self._later: collections.deque[Word] = collections.deque()
        """Messages that have come before they are due."""

    def use(
        self,
        kv: KvTensors,
        sizes: CapturedSizes,
        num_drafted: int = 0,
        reads: tuple[int, ...] = (),
    ) -> None:
        """Compute over these pages. No sequence is known any more. Steps of `sizes` are captured
        together with the lead's. num_drafted, reads: see `UsePages`.
        """
        self._reader = StepReader()
        self._num_steps = 0
        self._drafts = None  # frees what an engine in another role had
        self._reads = reads
        self._load_head(num_drafted)
        layer = draft_layer(self._model, self._head, kv, num_drafted, self._copier)
        if layer is not None:
            self._drafts = ModelDrafts(layer, self._copier, self._model.stage.ranks)
        self._group.meet()
        prompts = None
        if sizes.most_rows:
            graphs = self._open_graphs()
            assert graphs is not None, "the lead captures steps and this rank does not"
            captured = capture_steps(self._model, kv, graphs, sizes, self._copies, layer, reads)
            self._decoder, prompts = captured.decode, captured.prompts
            if self._memory is not None:
                last = lambda: captured.decode.last_guess  # noqa: E731
                self._memory.last_guess = lambda: self._guesses.mark(last)
        self._forward = ForwardPass(self._model, kv, prompts)

    def step(self, step: RankStep) -> None:
        """Compute this rank's part of a step, with all exchanges in the lead's order."""
        assert self._forward is not None, "a step came before pages"
        slots: Sequence[StepSlot] = self._reader.slots(step)
        self._last = slots
        self._num_steps += 1
        self._reached(0)
        if self._drafts is not None:
            self._drafts.forget(step.forgotten)
        if not slots:  # a step of other instances that share experts with this one
            with torch.inference_mode():
                (self._decoder or self._model).serve()
            self._model.stage.ranks.meet()
            self._reached(ALL_LAYERS)
            return
        with torch.inference_mode():
            slots = self._drafted(slots)
            if step.way is not Way.AS_IT_COMES:
                self._replay(slots, step.way)
            else:
                self._compute(slots, step)
        if step.way is not Way.AS_IT_COMES and self._drafts is None:
            self._reached(ALL_LAYERS)  # its last exchange came after all writes to pages
            return
        # Other ranks may be at later or earlier steps by now.
        self._model.stage.ranks.meet()
        self._reached(ALL_LAYERS)

    def _drafted(self, slots: Sequence[StepSlot]) -> Sequence[StepSlot]:
        """Return the slots of a step with the drafts that its plan left to the model."""
        if not any(BY_MODEL in slot.drafts for slot in slots):
            return slots
        if self._drafts is not None:
            return self._drafts.make(slots)
        while True:  # the last stage makes them, once it has sampled the tokens before them
            word = next(self._words)
            if isinstance(word[0], Drafted):
                return word[0].put_into(slots)
            self._later.append(word)

    def _compute(self, slots: Sequence[StepSlot], step: RankStep) -> None:
        """Compute a step without a captured one, as the lead's runner does."""
        assert self._forward is not None

        def after_write(layer: int) -> None:
            of_stage = self._speaks and layer in self._model.stage.layers
            self._reached(layer + 1, step.reported_as if of_stage else None)

        computed = ComputedStep(
            self._model, self._forward, self._copier, self._drafts, self._reads, slots,
            step.logprob_rows, after_write,
        )  # fmt: skip
        if self._model.stage.is_last:
            for _ in computed.prompt_logits():
                pass  # the lead reads them
            computed.sampled_logits()
        computed.keep(None, handed_on=step.reported_as is not None)

    def _reached(self, num_layers: int, reported_as: int | None = None) -> None:
        """Record that `num_layers` layers of this step are written. The lead hears of it if the
        step has a name.
        """
        progress = (self._num_steps, num_layers)
        written = None if reported_as is None else Written(reported_as, progress)
        if self._moves is not None or written is not None:
            self._reports.add((progress, written), self._copier.mark())

    def _report(self, reached: tuple[Progress, Written | None]) -> None:
        progress, written = reached
        if self._moves is not None:
            self._moves.reached(progress)
        if written is not None:
            self._answer(written)

    def _replay(self, slots: Sequence[StepSlot], way: Way) -> None:
        """Replay a step unless it has begun, as the lead's runner does."""
        assert self._decoder is not None, "no steps were captured"
        if way is Way.REPLAYED:
            self._decoder.replay(slots)
        if self._drafts is not None:
            self._drafts.keep(*self._decoder.read_rows(slots), None, handed_on=False)

    def ahead(self) -> None:
        """Begin the decode step after the last one."""
        assert self._decoder is not None, "no steps were captured"
        with torch.inference_mode():
            none = torch.zeros(len(self._last), dtype=torch.int64, device=self._model.device)
            tokens = self._group.gather(none)[: len(self._last)]
            self._decoder.run_ahead(self._last, tokens)
        self._guesses.begin()

    def _load_head(self, num_drafted: int) -> None:
        """Load the head unless it is loaded, or nothing is drafted."""
        if num_drafted and self._head is None:
            self._head = self._open_head()

    def follow(self, words: Iterable[Word]) -> None:
        """Carry out the lead's messages about steps and pages until it sends no more."""
        self._words = iter(words)
        while word := self._later.popleft() if self._later else next(self._words, None):
            message, descriptor = word
            if isinstance(message, RankStep):
                self.step(message)
            elif isinstance(message, Held):
                self.check(message)
            elif isinstance(message, Ahead):
                self.ahead()
            elif isinstance(message, Measure):
                self.measure(message)
            elif isinstance(message, UsePages):
                kv = self._pages(message, descriptor)
                self.use(kv, message.captured, message.num_drafted, message.reads)
                if message.num_threads is not None:
                    torch.set_num_threads(message.num_threads)

    def _pages(self, message: UsePages, descriptor: int | None) -> KvTensors:
        """Make this rank's own memory of pages, or map that of all. Return the tensors of
        its part.
        """
        if descriptor is None:
            assert self._moves is not None, "pages of its own are for a rank that can move them"
            layers = self._model.stage.kv_layers(message.pages.layout.num_layers)
            array = message.pages.of_rank(self.rank, layers)
            self._reports.drain()
            self._moves.close()
            if self._device_pages is None:
                return KvTensors.view(array, self._moves.open(array, message.transfer, None))
            if self._memory is not None:
                self._forward = self._decoder = None  # the device has no room for both
                self._memory.free()
            self._memory = self._device_pages(array)
            self._moves.open(array, message.transfer, self._memory)
            return self._memory.kv
        try:
            memory = mmap.mmap(descriptor, message.pages.num_bytes)
        finally:
            os.close(descriptor)
        return KvTensors.view(
            message.pages, memoryview(memory), self.rank % message.pages.num_homes
        )

    def measure(self, asked: Measure) -> None:
        """Measure the memory of this rank with the others."""
        assert self._meter is not None, "the lead measures memory and this rank does not"
        self._load_head(asked.num_drafted)
        drafts = drafts_over(self._model, self._head, asked.num_drafted, self._copier)
        measure_memory(self._model, self._meter, asked, self._group, open_drafts=drafts)
        self._group.meet()

    def check(self, held: Held) -> None:
        """Compare what this rank holds with what the lead says. Both errors of `StepReader.check`
        end this rank.
        """
        self._reader.check(held)
        self._group.meet()


def run(
    link: socket.socket,
    joined: Callable[[FollowerSettings], Group],
    shared: int | None,
    keys: Callable[[ModelOptions], KeyRing | None],
    lent: Callable[[FollowerSettings], LentFiles | None],
    open_moves: Callable[[Callable[[bytes], None]], PageMoves],
) -> None:
    """Run a follower until the lead goes.

    link: to the lead, whose first message is a `FollowerSettings`. joined: returns the group of all
    ranks. shared: the descriptor with which ranks of all instances that share experts join; None:
    there are no others. keys: finds the keys of encrypted weights. lent: returns the weights that
    an engine lends; None: the files are read. open_moves: makes the mover of pages, given the
    function that sends an answer to the lead.
    """
    first = receive(link)
    if first is None:
        return
    settings = msgspec.msgpack.decode(first, type=FollowerSettings)
    words: queue.SimpleQueue[Word | None] = queue.SimpleQueue()
    options = settings.options
    sending = threading.Lock()

    def say(answer: bytes) -> None:
        with sending:
            send(link, answer)

    moves, guesses = open_moves(say), Guesses(lambda answer: say(encode_answer(answer)))
    hearing = threading.Thread(
        target=_hear, args=(link, words, moves, guesses), name="lead", daemon=True
    )
    hearing.start()
    group = joined(settings)
    sharing = None
    if shared is not None:
        sharing = join_experts(options, settings.rank, settings.number, shared, settings.timeout_s)
    try:
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        device = RankDevice(options, SPEC_DTYPES[settings.dtype], settings.gpu)
        borrowed = lent(settings)
        checkpoint = Checkpoint.open(Path(settings.model), keys(options), borrowed)
        model = device.load(checkpoint, group, sharing)
        if borrowed is not None:
            borrowed.close()
        open_head = cache(partial(load_head, options.draft_model, model, device.backends))
        if options.head_at_start:
            open_head()
    except MooncakeError as error:
        say(msgspec.msgpack.encode(Loaded(error.message)))
        return
    say(msgspec.msgpack.encode(Loaded()))
    signs = VitalThread(_give_signs, "signs", say, settings.sign_s)
    signs.start()
    follower = Follower(
        model,
        group,
        device.open_graphs,
        moves,
        device.open_meter(),
        device.open_copies(),
        device.pages if device.owns_pages else None,
        lambda answer: say(encode_answer(answer)),
        guesses,
        open_head,
    )
    try:
        follower.follow(iter(words.get, None))
    except BaseException:
        group.fail()
        _log.exception("rank %d failed and cannot go on", settings.rank)
        os._exit(1)


def _give_signs(say: Callable[[bytes], None], every_s: float) -> None:
    """Show the lead that this process is alive, until the lead is gone."""
    with contextlib.suppress(OSError):
        while True:
            say(encode_answer(Alive()))
            time.sleep(every_s)


def join_experts(
    options: ModelOptions, rank: int, number: int, descriptor: int, timeout_s: float
) -> ExpertRanks:
    """Return the ranks of all instances that share experts, seen from `rank` of instance `number`.
    Ranks with the same part come one after the other. See `joining.join`.
    """
    shape = options.shape
    num_instances, device = shape.num_sharers, torch.device(options.device_of(rank))
    place = rank * num_instances + number
    ranks = join(options.group_kind, shape.tp * num_instances, place, descriptor, timeout_s)
    without = shape.dp if shape.experts else 0
    return ExpertRanks.of_instances(ranks, num_instances, device, without)


def heard(link: socket.socket, guesses: Guesses, silent_s: float = LEAD_SILENT_S) -> Iterator[Word]:
    """Yield the lead's messages until it goes. `guesses` hears them at once.

    Raises:
        GroupError: the lead has given a sign of life, and then sent nothing for `silent_s`. It has
            been stopped, and on a GPU a rank that waits for it in an exchange would wait for ever.
    """
    gives_signs = False
    while True:
        if gives_signs and not _speaks(link, silent_s):
            raise GroupError(f"the lead of this model gave no sign of life for {silent_s:g} s")
        if (data := receive(link)) is None:
            return
        message, descriptor = decode(data), None
        if isinstance(message, Alive):
            gives_signs = True
            continue
        if isinstance(message, Ahead):
            guesses.hear()
        if isinstance(message, UsePages) and not message.own:
            _, [descriptor], _, _ = socket.recv_fds(link, 1, 1)
        yield message, descriptor


def _speaks(link: socket.socket, silent_s: float) -> bool:
    """Return whether something comes within `silent_s`. The wait is cut into parts: when lead and
    follower are stopped together and go on, only one part is over.
    """
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return any(poll.poll(1000 * silent_s / _LOOKS) for _ in range(_LOOKS))


def _hear(
    link: socket.socket,
    words: queue.SimpleQueue[Word | None],
    moves: PageMoves,
    guesses: Guesses,
) -> None:
    """Take the lead's messages, whatever this rank is doing, and end this process when the lead's
    has ended.
    """
    try:
        for message, descriptor in heard(link, guesses):
            if isinstance(message, RankWord):
                moves.tell(message)
            else:
                words.put((message, descriptor))
    except OSError:  # the lead was killed
        pass
    except GroupError as error:
        _log.error("%s: this rank ends", error)
    except Exception:
        _log.exception("a message of the lead cannot be decoded")
    finally:
        os._exit(0)
