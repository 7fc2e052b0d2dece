"""Write-through: full blocks of this instance go to the pool of its own node, besides any other
push.

The `BlockWriter` asks for room and reports when the blocks are complete. The push of the sequence
fills the granted memory, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mooncake.base.blocks import BlockKey
from mooncake.base.errors import MooncakeError
from mooncake.base.kv_layout import BlockPlaces
from mooncake.base.kv_parts import KvPart
from mooncake.base.messages import NO_HEAD, ChainHead, WorkerRef
from mooncake.instance.push import Destination, Push
from mooncake.kvstore.client.block_writer import BlockWrite, BlockWriter

Settled = Callable[[float], None]


class _Put:
    """One put, and the destination of its push once the pool node has given room."""

    def __init__(self, push: Push, indexes: dict[BlockKey, int], settled: Settled) -> None:
        self.push = push
        self.indexes = indexes
        """Key -> index of the block in its sequence."""
        self.settled = settled
        self.ticket = 0
        self.granted: Sequence[BlockKey] = ()
        self.destination: Destination | None = None


class WriteThrough:
    """All puts of one worker."""

    def __init__(self, writer: BlockWriter, num_layers: int, grant_timeout_s: float) -> None:
        """`num_layers`: the layers of a block, all of which pool nodes hold."""
        self._writer = writer
        self._num_layers = num_layers
        self._grant_timeout_s = grant_timeout_s
        self._puts: dict[int, _Put] = {}
        """Puts by ticket."""
        self.num_blocks_put = 0
        self.num_puts_failed = 0

    def put(
        self,
        store: WorkerRef,
        push: Push,
        blocks: dict[BlockKey, int],
        tenant: str,
        settled: Settled,
        head: ChainHead = NO_HEAD,
    ) -> None:
        """Ask `store` for room for `blocks` (key -> index in the sequence); `push` will fill it.
        `head` lies before them, and is used as they are.

        `settled` is called with now when the put has ended, successfully or not.
        """
        put = _Put(push, blocks, settled)
        write = BlockWrite(
            store=store, keys=list(blocks), timeout_s=self._grant_timeout_s,
            fill=partial(self._fill, put), stop=partial(self._stop, put),
            ended=partial(self._on_ended, put),
        )  # fmt: skip
        put.ticket = self._writer.start(write, tenant, head)
        self._puts[put.ticket] = put

    def is_open(self, push: Push) -> bool:
        """Return whether a put of this push has not ended yet."""
        return any(put.push is push for put in self._puts.values())

    def abandon(self, push: Push, now: float) -> None:
        """End the open puts of a push that is closed and has nothing in flight."""
        for put in [put for put in self._puts.values() if put.push is push]:
            self._end(put, now)

    def _fill(self, put: _Put, keys: Sequence[BlockKey], places: BlockPlaces, now: float) -> None:
        if put.push.closed:
            self._end(put, now)
            return
        put.granted = keys

        def progress(_destination: Destination, _whole: list[int], at: float) -> None:
            self._advance(put, at)

        indexes = [put.indexes[key] for key in keys]
        part = KvPart(places, indexes, 0, self._num_layers)
        put.destination = put.push.add_destination([part], progress, now)
        self._advance(put, now)

    def _advance(self, put: _Put, now: float) -> None:
        destination = put.destination
        if destination is None or put.ticket not in self._puts:
            return
        if destination.complete or (destination.error is not None and not destination.moves):
            self._end(put, now)

    def _stop(self, put: _Put, now: float) -> None:
        """End a put to a lost node, unless batches are under way, which fail by themselves."""
        if put.destination is None or not put.destination.moves:
            self._end(put, now)

    def _end(self, put: _Put, now: float) -> None:
        whole = put.destination.whole if put.destination is not None else set()
        written = [key for key in put.granted if put.indexes[key] in whole]
        self.num_blocks_put += len(written)
        self.num_puts_failed += len(written) < len(put.granted)
        self._writer.end(put.ticket, written, now)

    def _on_ended(self, put: _Put, _answer: list[BlockKey] | MooncakeError, now: float) -> None:
        del self._puts[put.ticket]
        put.settled(now)
