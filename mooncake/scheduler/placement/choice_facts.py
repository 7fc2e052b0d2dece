"""What was known when a pair of workers was chosen, kept for a receipt: references to what does not
change, and copies of the numbers that do.

Made by the Conductor for each placement, so it is quick to make; `choice_replay` makes the rest of
it when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from mooncake.base import WorkerHello
from mooncake.kvstore.index.prefix_index import slots_of
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.choice_replay import (
    BundledPlacement,
    BundledWorker,
    EngineLoad,
    estimates,
)
from mooncake.scheduler.placement.views import Column, FleetFacts
from mooncake.scheduler.placement.worker_choice import Wanted
from mooncake.telemetry.receipt import Choice

FIXED_BYTES = 2_000
RUN_BYTES = 120
"""Of each run of blocks that the same workers hold, without a bit for each worker."""
NAMED_BYTES = 120
"""Of each number that is kept with the name of a worker."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChoiceFacts:
    """The facts of one choice."""

    config: SchedulerConfig
    wanted: Wanted
    prefills: FleetFacts
    decodes: FleetFacts
    pools: tuple[WorkerHello, ...]
    blocks_asked: Mapping[str, int]
    """Pool -> blocks that are being fetched from it, if any."""
    local_bytes_per_s: float
    remote_bytes_per_s: float
    num_blocks: int
    """Full blocks of prompt and output so far."""
    holders: tuple[tuple[int, int], ...]
    """(Stop, workers) for runs of these blocks, as far as they were looked up."""
    names: tuple[str, ...]
    """The workers that the bits of `holders` stand for."""
    inflight: Mapping[str, int]
    prefill: str | None
    """Who was chosen; None: `decode` does it all."""
    decode: str

    @property
    def num_bytes(self) -> int:
        """About how much memory this holds, without what all placements share."""
        columns = self.prefills.columns.nbytes + self.decodes.columns.nbytes
        runs = sum(RUN_BYTES + (mask.bit_length() >> 3) for _, mask in self.holders)
        named = NAMED_BYTES * (len(self.blocks_asked) + len(self.inflight))
        return FIXED_BYTES + columns + runs + named

    def choice(self) -> Choice:
        """Return the estimates of all workers; slow where these are many."""
        return estimates(self.bundled())

    def bundled(self) -> BundledPlacement:
        """Return the same as a value that can be written."""
        engines = {**_engines(self.prefills), **_engines(self.decodes)}
        pools = {hello.worker.worker_id for hello in self.pools}
        workers: dict[str, BundledWorker] = {}
        for hello in (*self.prefills.hellos, *self.decodes.hellos, *self.pools):
            name = hello.worker.worker_id
            workers[name] = BundledWorker(
                id=name,
                role=hello.role,
                node=hello.node_id,
                num_blocks=hello.num_blocks,
                block_bytes=hello.block_bytes,
                max_num_seqs=hello.max_num_seqs,
                max_batched_tokens=hello.max_batched_tokens,
                num_stages=hello.num_stages,
                load=engines.get(name),
                is_pool=name in pools,
                num_blocks_asked=self.blocks_asked.get(name, 0),
            )
        return BundledPlacement(
            config=msgspec.structs.replace(
                self.config,
                local_bytes_per_s=self.local_bytes_per_s,
                remote_bytes_per_s=self.remote_bytes_per_s,
            ),
            wanted=self.wanted,
            workers=list(workers.values()),
            num_blocks=self.num_blocks,
            holders=[
                (stop, [self.names[at] for at in slots_of(mask)]) for stop, mask in self.holders
            ],
            inflight=dict(self.inflight),
            prefill=self.prefill,
            decode=self.decode,
        )


def _engines(facts: FleetFacts) -> dict[str, EngineLoad]:
    """Return what is known of each engine, by name."""
    rows: list[list[float]] = facts.columns.T.tolist()
    return {
        hello.worker.worker_id: EngineLoad(
            queue_s=row[Column.QUEUE_S],
            num_assigned=int(row[Column.ASSIGNED]),
            coefficients=tuple(row[Column.FIXED : Column.READ + 1]),
            stream_coefficients=tuple(row[Column.STREAM_FIXED : Column.STREAM_READ + 1]),
            is_usable=row[Column.USABLE] > 0,
            num_free_blocks=int(row[Column.FREE_BLOCKS]),
            num_sequences=int(row[Column.SEQUENCES]),
            num_context_tokens=int(row[Column.CONTEXT]),
            num_prompts=int(row[Column.PROMPTS]),
            num_queued_tokens=int(row[Column.QUEUED_TOKENS]),
        )
        for hello, row in zip(facts.hellos, rows, strict=True)
    }
