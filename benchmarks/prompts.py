"""What a packed prompt saves: `python -m benchmarks prompts`.

131,072 tokens as a list of numbers and packed (`base.pack_tokens`), in turn: memory, messages there
and back, full collections while 100 of them are under way. The best of many rounds.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.support.servers import load, machine
from mooncake.base import pack_tokens

NUM_TOKENS = 1 << 17
ROUNDS = 30
UNDER_WAY = 100


class Listed(msgspec.Struct, frozen=True):
    prompt: list[int]


class Packed(msgspec.Struct, frozen=True):
    prompt: bytes


def best_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the milliseconds of the fastest round."""
    taken_s = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - begin_s)
    return 1e3 * min(taken_s)


def figures(request: Listed | Packed) -> dict[str, float]:
    """Return what one form costs."""
    data = msgspec.msgpack.encode(request)
    decoder = msgspec.msgpack.Decoder(type(request))
    tracemalloc.start()
    kept = [decoder.decode(data)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    kept += [decoder.decode(data) for _ in range(UNDER_WAY - 1)]
    return {
        "MB held": held / 1e6,
        "MB sent": len(data) / 1e6,
        "encode ms": best_ms(lambda: msgspec.msgpack.encode(request)),
        "decode ms": best_ms(lambda: decoder.decode(data)),
        f"full collection with {len(kept)} ms": best_ms(gc.collect, 5),
    }


def main(argv: Sequence[str]) -> int:
    """Print both forms, twice in turn."""
    del argv
    source = random.Random(1)
    tokens = [source.randrange(163_840) for _ in range(NUM_TOKENS)]
    gc.freeze()  # collections walk the requests alone
    print(f"{machine()}; load {load()}")
    for _ in range(2):
        for request in (Listed(tokens), Packed(pack_tokens(tokens))):
            shown = ", ".join(f"{name} {value:.3f}" for name, value in figures(request).items())
            print(f"{type(request).__name__}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
