"""Placement over other people's engines on a published trace, against round robin:
`python -m benchmarks engine-routing-simulated --trace FILE`.

The gateway's own code places the trace's requests over simulated engines, each of which computes
one prompt after another, keeps the blocks used last, and publishes what becomes of them. A block of
the trace, 512 tokens, stands for 16 tokens here, and everything else is smaller in proportion.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain

from rich.console import Console
from rich.table import Table

from mooncake.base import pack_tokens
from mooncake.base.block_events.engine_events import EngineEvent, RemovedBlocks, StoredBlocks
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.fleet import Fleet
from mooncake.scheduler.engines.prefixes import Prompt
from mooncake.sim.files import read_trace
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine

BLOCK_TOKENS = 16
SCALE = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
CONSTANT_S = 0.02
OUTPUT_TOKEN_S = 0.02
WAYS: Mapping[str, tuple[str, bool]] = {
    "block events": ("kvcache-centric", True),
    "what was sent": ("kvcache-centric", False),
    "fewest running": ("load-balance", False),
    "round robin": ("round-robin", False),
}
"""Name -> (policy, whether block events are read)."""


class SimulatedEngine:
    """Computes prompts one after another; keeps so many blocks, and publishes what becomes of
    them.
    """

    def __init__(
        self, tell: Callable[[EngineEvent], None], *, num_blocks: int, token_s: float
    ) -> None:
        """`tell` gets the block events. `token_s`: seconds to compute a token."""
        self._tell = tell
        self._num_blocks = num_blocks
        self._token_s = token_s
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Names made of a block's tokens and of all before it; the one used last is last."""
        self._free_s = 0.0

    def compute(self, tokens: Sequence[int], now: float) -> tuple[float, int]:
        """Return when the first token comes, and how many tokens were cached."""
        parent: int | None = None
        num_cached, is_known = 0, True
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            own = tuple(tokens[start : start + BLOCK_TOKENS])
            name = hash((parent, own)) % 2**64
            is_known = is_known and name in self._blocks
            num_cached += BLOCK_TOKENS * is_known
            if name in self._blocks:
                self._blocks.move_to_end(name)
            else:
                self._blocks[name] = None
                self._tell(StoredBlocks(
                    block_hashes=[name], parent_block_hash=parent, token_ids=list(own),
                    block_size=BLOCK_TOKENS, medium="GPU",
                ))  # fmt: skip
            parent = name
        while len(self._blocks) > self._num_blocks:
            gone, _ = self._blocks.popitem(last=False)
            self._tell(RemovedBlocks(block_hashes=[gone], medium="GPU"))
        took_s = CONSTANT_S + self._token_s * (len(tokens) - num_cached)
        self._free_s = max(now, self._free_s) + took_s
        return self._free_s, num_cached


@lru_cache(maxsize=1 << 16)
def _words(hash_id: int) -> list[int]:
    return random.Random(hash_id).choices(range(1000), k=BLOCK_TOKENS)


def words_of(line: TraceLine) -> list[int]:
    """Return a request's tokens, so many for each of its blocks."""
    tokens = list(chain.from_iterable(map(_words, line.hash_ids)))
    return tokens[: max(1, line.input_length // SCALE)]


def play(
    lines: Sequence[TraceLine], way: str, num_engines: int, cache_tokens: int, tokens_per_s: float
) -> tuple[float, list[float]]:
    """Return the part of prompt tokens that was cached, and the times to first tokens."""
    policy, reads_events = WAYS[way]
    names = [f"http://{number}" for number in range(num_engines)]
    config = SchedulerConfig(policy=policy, max_inflight=len(lines))
    fleet = Fleet(names, config, names if reads_events else ())

    def engine(name: str) -> SimulatedEngine:
        fleet.up(name, ["m"])
        return SimulatedEngine(
            lambda event: fleet.on_events(name, "p", [event]),
            num_blocks=cache_tokens // TRACE_BLOCK_TOKENS, token_s=SCALE / tokens_per_s,
        )  # fmt: skip

    engines = {name: engine(name) for name in names}
    coming: list[tuple[float, bool, str, str]] = []
    ttft_s, num_cached, num_tokens = [], 0, 0
    for number, line in enumerate(lines):
        now = line.timestamp / 1000
        while coming and coming[0][0] <= now:
            at_s, is_end, name, placed = heapq.heappop(coming)
            if is_end:
                fleet.ended(name, placed)
            else:
                fleet.first_token(name, placed, at_s)
        tokens = words_of(line)
        packed = pack_tokens(tokens)
        prompt = Prompt(packed, tokens=packed)
        chosen = fleet.place(str(number), prompt, "m", now, is_streamed=True).engine
        first_s, cached = engines[chosen].compute(tokens, now)
        end_s = first_s + OUTPUT_TOKEN_S * line.output_length
        heapq.heappush(coming, (first_s, False, str(number), chosen))
        heapq.heappush(coming, (end_s, True, str(number), chosen))
        ttft_s.append(first_s - now)
        num_cached, num_tokens = num_cached + cached, num_tokens + len(tokens)
    fleet.check_integrity()
    return num_cached / num_tokens, ttft_s


def main(argv: Sequence[str] | None = None) -> int:
    """Play the trace in each way and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks engine-routing-simulated", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--trace", required=True)
    parser.add_argument("--limit", type=int, default=4000, help="requests of the trace")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=1_000_000, help="of each engine")
    parser.add_argument("--tokens-per-s", type=float, default=8000.0, help="that one computes")
    args = parser.parse_args(argv)
    lines = read_trace(args.trace)[: args.limit]
    table = Table("placed by", "tokens from cache", "mean TTFT", "median", "p90")
    for way in WAYS:
        share, ttft_s = play(lines, way, args.engines, args.cache_tokens, args.tokens_per_s)
        table.add_row(
            way, f"{share:.1%}", f"{statistics.mean(ttft_s):.2f} s",
            f"{statistics.median(ttft_s):.2f} s", f"{statistics.quantiles(ttft_s, n=10)[-1]:.2f} s",
        )  # fmt: skip
    Console().print(table)
    return 0
