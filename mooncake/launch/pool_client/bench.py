"""Measures how fast a client puts blocks and gets them back, with what latency, over which links.

It uses blocks of its own, compares them byte for byte and removes them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake.base import BlockKey, IdSource, MooncakeError, Unavailable, format_bytes
from mooncake.base.blocks import chain_root, extend_chain
from mooncake.launch.pool_client.session import PoolSession, PoolSessionConfig
from mooncake.telemetry.stats import percentile
from mooncake.transfer.link_stats import LinkSnapshot


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of all calls of one kind."""

    gigabytes_per_s: float
    """Rate in 1e9 bytes a second while a call was under way."""
    p50_s: float
    p99_s: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The figures measured with calls of `batch` blocks each."""

    block_bytes: int
    batch: int
    rounds: int
    put: Way
    get: Way
    missing_blocks: int
    """Blocks that did not come back: they were evicted meanwhile, or arrived damaged."""
    wrong_blocks: int
    """Blocks that came back with other bytes although checksums passed."""
    links: list[LinkSnapshot]

    def document(self) -> dict[str, Any]:
        """Return the document that `mooncake pool bench --json` prints."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for link, snapshot in zip(shown["links"], self.links, strict=True):
            link["gigabytes_per_s"] = snapshot.gigabytes_per_s
        return shown

    def words(self) -> str:
        size = format_bytes(self.block_bytes)
        lines = [f"{self.rounds} calls of {self.batch} blocks of {size} each way"]
        lines += [
            f"{name}  {way.gigabytes_per_s:8.3f} GB/s   p50 {way.p50_s * 1e3:9.3f} ms   "
            f"p99 {way.p99_s * 1e3:9.3f} ms"
            for name, way in (("put", self.put), ("get", self.get))
        ]
        lines += [
            f"by {link.protocol} over {link.nic} with {link.peer}: {format_bytes(link.num_bytes)}, "
            f"{link.gigabytes_per_s:.3f} GB/s while busy, {link.num_retries} slices sent again, "
            f"{link.num_failures} failures"
            for link in self.links
        ]
        lines.append(f"blocks missing: {self.missing_blocks}, wrong: {self.wrong_blocks}")
        return "\n".join(lines)


def measure(
    config: PoolSessionConfig, batch: int, rounds: int, clock: Callable[[], float], ids: IdSource
) -> Measured:
    """Put and get `batch` blocks at a time, `rounds` times, after one round that is not timed.

    Raises:
        Unavailable: there is no room for a batch without evicting blocks of others.
        MooncakeError: the pool does not answer, or bytes do not arrive.
    """
    name = ids.hex(16)
    with PoolSession(config) as session:
        num_free = session.stat().load.num_free_blocks
    if batch > num_free:
        raise Unavailable(f"batch: {batch} blocks, and {num_free} are free: give a smaller one")
    with PoolSession(msgspec.structs.replace(config, num_places=2 * batch)) as session:
        bench = _Bench(session, batch, clock)
        for number in range(rounds + 1):
            root = chain_root(config.layout.fingerprint, "", f"bench {name} {number}")
            bench.round(extend_chain(root, range(batch), 1), number)
        return Measured(
            block_bytes=session.block_bytes,
            batch=batch,
            rounds=rounds,
            put=bench.way(bench.puts_s),
            get=bench.way(bench.gets_s),
            missing_blocks=bench.num_missing,
            wrong_blocks=bench.num_wrong,
            links=list(session.links()),
        )


class _Bench:
    """Measures rounds with one session. Blocks are put from the first half of its memory and read
    into the second.
    """

    def __init__(self, session: PoolSession, batch: int, clock: Callable[[], float]) -> None:
        self._session = session
        self._clock = clock
        memory = np.frombuffer(session.memory, dtype=np.uint8).reshape(2 * batch, -1)
        self._sent, self._got = memory[:batch], memory[batch:]
        self._sent[:] = np.random.default_rng(0).integers(0, 256, self._sent.shape, np.uint8)
        size = session.block_bytes
        self._from = [place * size for place in range(batch)]
        self._to = [place * size for place in range(batch, 2 * batch)]
        self.puts_s: list[float] = []
        self.gets_s: list[float] = []
        self.num_missing = 0
        self.num_wrong = 0

    def round(self, keys: Sequence[BlockKey], number: int) -> None:
        """Put blocks with new content, get them, compare them and remove them."""
        self._sent ^= np.uint8(1 + number % 255)
        self._got[:] = 0
        try:
            began_s = self._clock()
            written = self._session.put_from(keys, self._from)
            put_s = self._clock()
            if len(written) < len(keys):
                raise Unavailable(f"there was room for {len(written)} of {len(keys)} blocks")
            asked_s = self._clock()
            found = self._session.get_into(keys, self._to)
            got_s = self._clock()
        finally:
            with contextlib.suppress(MooncakeError):
                self._session.remove(keys)
        if number:
            self.puts_s.append(put_s - began_s)
            self.gets_s.append(got_s - asked_s)
        right = (self._sent == self._got).all(axis=1)
        self.num_missing += len(keys) - found
        self.num_wrong += found - int(right[:found].sum())

    def way(self, calls_s: Sequence[float]) -> Way:
        """Return the figures of calls with these durations."""
        num_bytes = len(calls_s) * self._sent.nbytes
        return Way(
            gigabytes_per_s=num_bytes / sum(calls_s) / 1e9,
            p50_s=percentile(calls_s, 50),
            p99_s=percentile(calls_s, 99),
        )
