"""An instance: one engine with its membership in the cluster and its fetches, pushes and puts of
blocks. Prefill and decode workers own one each.

The roles decide what happens to finished blocks and sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import KvLayout, PageArray
from mooncake.base.large_settings import KeptSettings
from mooncake.base.messages import (
    NO_HEAD,
    Answer,
    BorrowWeights,
    ChainHead,
    Drain,
    NextLife,
    PeerLost,
    PinBlocks,
    PinGranted,
    Prefetch,
    PutGranted,
    RequestTask,
    Restart,
    StepOutputs,
    Tier,
    Unpin,
    WeightsLent,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.request import Failure, FinishInfo, FinishReason, RequestOutput
from mooncake.engine.engine import Engine
from mooncake.engine.plan import Counted, LayerDone, StepResult
from mooncake.engine.ranks.kv_moves import Fenced, Hashed, Moved, OfRank
from mooncake.engine.sequence import Made
from mooncake.instance.config import InstanceConfig
from mooncake.instance.mover import (
    BlockChecksums,
    Hasher,
    OwnPages,
    RankPages,
    Reservations,
    SliceMover,
)
from mooncake.instance.page_pins import PagePins
from mooncake.instance.push import Push
from mooncake.instance.reuse import Fetches, ReadAhead
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult
from mooncake.kvstore.client.block_writer import BlockWriter
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Region, Transfer, TransferDone


class InstancePorts(msgspec.Struct, frozen=True):
    """The ports by which an instance reaches the world."""

    channel: Channel
    transfer: Transfer
    pages: Region
    """The engine's pages in this process's memory, a `PageArray`."""
    gateway_address: str
    hasher: Hasher | None = None
    """Hashes the blocks in `pages`."""
    held: PageArray | None = None
    """The part of the engine's pages that lies in `pages`; None: all of them."""
    followers: Sequence[RankPages] = ()
    """The pages of the other ranks, if each has its own memory."""
    seeds: Sequence[str] = ()
    """See `Membership`."""
    lend: Callable[[BorrowWeights], None] | None = None
    """Answers workers that want to read this one's weights; None: they are told that it lends
    none.
    """


class Instance:
    """Engine, membership, fetches, pushes and puts of one worker."""

    def __init__(
        self,
        config: InstanceConfig,
        layout: KvLayout,
        engine: Engine,
        hello: WorkerHello,
        ports: InstancePorts,
    ) -> None:
        self.config = config
        self.layout = layout
        self.engine = engine
        self.pool = engine.pool
        self.worker = hello.worker
        self._channel = ports.channel
        self._transfer = ports.transfer
        self._lend = ports.lend
        array = PageArray(layout, engine.config.num_blocks, engine.config.num_homes)
        array = ports.held or array
        self._own_pages = OwnPages(array, ports.transfer, ports.pages, ports.hasher)
        ranks = [self._own_pages, *ports.followers]
        self.mover = SliceMover(self._own_pages, ports.followers)
        verify = config.verify_fetches and _has_bytes(ports.pages)
        self._reader = BlockReader(self.worker, ports.channel, self.mover, verify=verify)
        self._writer = BlockWriter(self.worker, ports.channel)
        self.fetches = Fetches(self._reader, config.fetch_timeout_s, self._count_fetch)
        self._read_ahead = ReadAhead(self.pool, self.fetches, layout.block_bytes)
        self.checksums = BlockChecksums(ranks if ports.hasher is not None else [])
        self.page_pins = PagePins(
            hello.worker, ports.channel, self.pool, self._own_pages.places, self.checksums,
            config.ask_again_s,
        )  # fmt: skip
        self.reservations = Reservations(ports.transfer, self.mover, self.pool, config.quarantine_s)
        self.draining = False
        """True if the worker wants to leave."""
        self.next_life: NextLife | None = None
        """How the worker comes back once nothing is in progress here; None: it does not."""
        self.membership = Membership(
            hello,
            ports.channel,
            ports.gateway_address,
            Tier.HBM,
            self.pool.inventory,
            config.report_interval_s,
            ports.seeds,
        )
        self.kept_settings = KeptSettings()
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._num_open_pushes = 0
        self._last_sequence_id = 0
        self.counters: dict[str, float] = {"blocks_fetched": 0, "fetches_failed": 0}

    # ------------------------------------------ events that both roles treat alike

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Handle an event that both roles treat alike. Other events are ignored, and so are answers
        to an earlier boot.
        """
        if isinstance(event, Answer) and event.asker != self.worker:
            return
        match event:
            case LayerDone():
                self.engine.on_progress()
            case Counted():
                self.engine.on_counted(event)
            case TransferDone():
                self.mover.on_done(event, now)
            case Hashed():
                self.checksums.on_done(event, now)
            case OfRank(rank=rank, answer=Moved() as moved):
                self.mover.on_done(moved.done, now, rank, moved.checksums)
            case OfRank(rank=rank, answer=Fenced() as fenced):
                self.mover.on_fenced(rank, fenced.grant, fenced.fence)
            case OfRank(rank=rank, answer=Hashed() as hashed):
                self.checksums.on_done(hashed, now, rank)
            case PutGranted():
                self._writer.on_granted(event, now)
            case PinGranted():
                self._reader.on_granted(event, now)
            case PinBlocks():
                self.page_pins.on_pin(event, now)
            case Unpin():
                self.page_pins.on_unpin(event)
            case Prefetch() if self.engine.config.enable_prefix_caching:
                self._read_ahead.add(event)
            case Drain():
                self.draining = True
                if event.next_role is not None:
                    self.next_life = NextLife(role=event.next_role)
            case Restart() if event.worker == self.worker:
                self.draining = True
                self.next_life = NextLife(mode=event.mode)
            case BorrowWeights():
                self._on_borrow(event)
            case PeerLost():
                self.membership.handle(event)
                self._reader.on_peer_lost(event.worker, now)
                self._writer.on_peer_lost(event.worker, now)
                self.page_pins.on_peer_lost(event.worker)
            case _:
                self.membership.handle(event)

    def come_back(self) -> None:
        """Want to leave, and to come back as it is unless it was told otherwise."""
        self.draining = True
        self.next_life = self.next_life or NextLife()

    def _on_borrow(self, question: BorrowWeights) -> None:
        """Have a worker that wants to read the weights answered."""
        if self._lend is not None:
            self._lend(question)
            return
        refusal = WeightsLent(
            asker=question.asker, ticket=question.ticket, lender=self.worker.worker_id,
            error="this worker has no files of weights",
        )  # fmt: skip
        self._channel.send(question.asker.address, refusal)

    def on_step(self, result: StepResult, now: float) -> list[Made]:
        """Commit a step to the engine and report its cost; return what its sequences produced."""
        outputs = self.engine.on_step(result, now)
        sample = self.engine.cost_sample()
        if sample is not None:
            self.membership.add_sample(sample)
        return outputs

    def tick(self, now: float) -> float:
        """Give up overdue transfers, send outputs and reports. Return when to call again."""
        self._read_ahead.advance(now, leaving=self.draining)
        wakes = [self._reader.tick(now), self._writer.tick(now), self.reservations.tick(now)]
        readers, wake_s = self.page_pins.tick(now)
        self.membership.ask_about(readers)
        wakes.append(wake_s)
        self.membership.send_blocks(*self.pool.drain_events())
        self._flush()
        wakes.append(self.membership.tick(now, self.load))
        return min(wake for wake in wakes if wake is not None)

    # ------------------------------------------------------------ what roles do

    @property
    def kvstore(self) -> WorkerRef | None:
        """The pool node of this machine, if one is known."""
        return self.membership.kvstore

    def next_sequence_id(self) -> int:
        self._last_sequence_id += 1
        return self._last_sequence_id

    def send(self, worker: WorkerRef, message: AnyMessage) -> None:
        self._channel.send(worker.address, message)

    def queue_output(self, gateway: WorkerRef, output: RequestOutput) -> None:
        """Send an output with the next tick; all outputs of a tick leave in one message."""
        self._outputs.setdefault(gateway.address, []).append(output)

    def fail(self, task: RequestTask, failure: Failure) -> None:
        """Queue a final output: this attempt failed here."""
        output = RequestOutput(
            request_id=task.request.request_id,
            attempt=task.attempt,
            start=len(task.output_tokens),
            finish=FinishInfo(reason=FinishReason.ERROR, failure=failure),
        )
        self.queue_output(task.gateway, output)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the load report."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def open_push(self) -> Push:
        """Return a push for one sequence, to be closed by `close_push`."""
        self._num_open_pushes += 1
        return Push(self.mover, self.pool, self.config.push_timeout_s)

    def put(
        self,
        push: Push,
        blocks: dict[BlockKey, int],
        tenant: str,
        settled: Callable[[float], None],
        head: ChainHead = NO_HEAD,
    ) -> None:
        """Write blocks (key -> index in the sequence) through to this machine's pool node, if there
        is one. `head` lies before them and counts as used too. `settled` is called with now when
        the put has ended, successfully or not.
        """
        if blocks and self.kvstore is not None:
            push.put(self._writer, self.kvstore, blocks, tenant, settled, head)

    def report_use(self, head: ChainHead) -> None:
        """Tell this machine's pool node that a chain is used, and how much of it is to be kept.
        Called when no block of it has to be written.
        """
        is_news = head.num_counted < len(head.keys) or head.num_kept
        if is_news and self.kvstore is not None:
            self._writer.report_use(self.kvstore, head)

    def close_push(
        self, push: Push, now: float, then: Callable[[float], None] | None = None
    ) -> None:
        """End a push. `then` is called with now when nothing of it touches memory any more."""

        def released(at: float) -> None:
            self._num_open_pushes -= 1
            if then is not None:
                then(at)

        push.close(now, released)

    def _count_fetch(self, store: WorkerRef, result: ReadResult) -> None:
        """Count what fetches move, from this machine's pool node and from others. The Conductor
        learns their speed from it.
        """
        self.count("blocks_fetched", result.num_blocks)
        self.count("fetches_failed", result.num_blocks == 0)
        place = "local" if store == self.kvstore else "remote"
        self.count(f"fetch_{place}_bytes", result.carried.num_bytes)
        self.count(f"fetch_{place}_seconds", result.carried.seconds)

    def load(self) -> WorkerLoad:
        """Return the figures for a load report."""
        load = self.engine.load()
        counters = {
            **load.counters,
            **self.counters,
            **self._transfer.counters(),
            **self._channel.figures(),
            "blocks_fetched_corrupt": self._reader.num_corrupt,
            "blocks_put": self._writer.num_blocks_put,
            "puts_failed": self._writer.num_puts_failed,
            "blocks_handed_over": self.page_pins.num_blocks_read,
            "blocks_prefetched": self._read_ahead.num_blocks_read,
            "pages_rested": self.reservations.num_rested,
        }
        return msgspec.structs.replace(
            load, counters=counters, draining=self.draining, lends=self._lends
        )

    @property
    def _lends(self) -> bool:
        """True if others may read this instance's cached blocks. A draining instance ends when no
        other reads them any more. One that comes back keeps none for others.
        """
        return self.draining and self.next_life is None and self._own_pages.has_whole_blocks

    @property
    def quiet(self) -> bool:
        """True if nothing runs, moves or waits here, so that every page is free or cached."""
        return (
            self.engine.idle
            and self._num_open_pushes == 0
            and self._reader.num_open == 0
            and self._writer.num_open == 0
            and self.page_pins.num_open == 0
            and self.reservations.num_resting == 0
            and self.mover.num_in_flight == 0
        )

    def check_integrity(self, *, role_quiet: bool) -> None:
        """Raise AssertionError when pages were lost or freed twice. Also raise it when pages are
        held although neither the instance nor its role (`role_quiet`) has anything in progress.
        """
        self.engine.check_integrity()
        self.kept_settings.check_integrity()
        self.mover.check_integrity()
        if role_quiet and self.quiet:
            assert self.pool.num_held == 0, f"{self.pool.num_held} pages are held for nothing"

    def _flush(self) -> None:
        for address, outputs in self._outputs.items():
            self._channel.send(address, StepOutputs(worker=self.worker, outputs=outputs))
        self._outputs = {}


def _has_bytes(pages: Region) -> bool:
    """Return whether there are bytes to move; False in a simulated world."""
    try:
        list(pages.read([(0, 1)]))
    except ValueError:
        return False
    return True
