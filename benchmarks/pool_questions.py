"""Small values: gets by one question beside gets by pins, and puts, over TCP.

A get of up to 4 MiB asks the node once and gets the blocks behind the answer. `pins` is the way of
larger gets and of older nodes: the node is asked to pin, the bytes are read, and an unpin follows.
Both ways take turns in every round, through one session and one connection, over the same values. A
value has one key, or is cut into several. A client process and a node process each, on one machine.
Ours hashes every block at both ends, and the client looks at the hashes of what it gets; upstream
hashes none. Upstream's store takes its turn in the same rounds where it can be installed and run,
which takes a network that holds nothing but the loopback. With `--protected` pools whose bytes have
MACs, or are encrypted, take their turns, too.

Shown are medians over the rounds: milliseconds, the speed of one way as a multiple of the other's,
and CPU time of client and node together. With `--profile` the CPU time of each thread is shown,
too, and how often it waits, for one get of each value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from unittest import mock

from benchmarks.pool_values import CLIENT_BYTES, Ours, Theirs, our_pool, speedup, upstream_store
from benchmarks.support import thread_times, upstream
from benchmarks.support.cores import Ends
from benchmarks.support.servers import load, machine
from mooncake.base import ConfigError
from mooncake.base.memory import format_bytes, parse_bytes
from mooncake.kvstore.client import block_reader
from mooncake.transfer.engine import MAX_ANSWER_BYTES

LEAST_BLOCK = 2**10
PROTECTED = ("mac", "encrypt")
EXAMPLES = """examples:
  python -m benchmarks pool-questions
  python -m benchmarks pool-questions --sizes 64KiB,1MiB --keys 1 --rounds 100 --no-upstream
  python -m benchmarks pool-questions --apart --json build/benchmarks/pool_questions.json
"""

Case = tuple[int, int]
"""(bytes of a value, keys that it is cut into)."""
Rounds = dict[str, list[float]]
"""What was done ("question get", "put", ...) -> seconds of each round; with " cpu" behind the name,
CPU seconds.
"""


@contextmanager
def pins_alone() -> Iterator[None]:
    """No get that begins within asks a question."""
    with mock.patch.object(block_reader, "MAX_UNANSWERED", 0):
        yield


class Turns:
    """The turns of one case, and their figures."""

    def __init__(
        self,
        case: Case,
        ours: Ours,
        theirs: Theirs | None,
        protected: Mapping[str, Ours] = MappingProxyType({}),
    ) -> None:
        """`protected`: the kind of protection -> a pool that has it."""
        self.case = case
        self.rounds: Rounds = {}
        self._protected = protected
        self._ours = ours
        self._theirs = theirs

    def warm_up(self) -> None:
        """Take a round that does not count."""
        self._round("warm", 0)
        self.rounds = {}

    def run(self, num_rounds: int) -> None:
        """Take so many rounds. Which way of getting comes first changes with each."""
        self.warm_up()
        for number in range(num_rounds):
            self._round(f"v{number}", number)

    def _round(self, name: str, number: int) -> None:
        size, num_keys = self.case
        start = (number * size) % (CLIENT_BYTES - size + 1) // LEAST_BLOCK * LEAST_BLOCK
        self._note("put", lambda: self._ours.put(name, start, size))
        # By this get's answer the client learns that the node takes questions, and the node has the
        # value: a question could come before the end of the put.
        with pins_alone():
            self._ours.get(name, start, size)
        ways = ["question get", "pins get"]
        for way in ways if number % 2 else ways[::-1]:
            self._note(way, lambda: self._ours.get(name, start, size), way)
        self._ours.remove(name, size)
        for kind, pool in self._protected.items():
            self._add(f"{kind} put", pool.put(name, start, size))
            pool.get(name, start, size)
            self._add(f"{kind} get", pool.get(name, start, size))
            pool.remove(name, size)
        if self._theirs is not None:
            # A name that was removed is not used again: its lease may still run.
            other = f"{name}.{size}.{num_keys}"
            self._add("upstream put", self._theirs.put(other, start, size))
            self._add("upstream get", self._theirs.get(other, start, size))
            self._theirs.remove(other, size)

    def _note(self, what: str, call: Callable[[], float], way: str = "") -> None:
        cpu_s, num_asked = self._ours.figures()
        with ExitStack() as entered:
            if way == "pins get":
                entered.enter_context(pins_alone())
            took = call()
        after_s, now_asked = self._ours.figures()
        expected = way == "question get" and self.case[0] <= MAX_ANSWER_BYTES
        if now_asked - num_asked != expected:
            raise RuntimeError(
                f"{what} of {title(self.case)}: the node had {now_asked - num_asked} questions "
                f"instead of {int(expected)}, so this would be no figure of that way"
            )
        self._add(what, took)
        self._add(f"{what} cpu", after_s - cpu_s)

    def _add(self, what: str, value: float) -> None:
        self.rounds.setdefault(what, []).append(value)


def profile(pool: Ours | Theirs, case: Case, num_gets: int, who: str) -> str:
    """Return rows of what each thread takes for one get."""
    size = case[0]
    name = f"p{size}.{case[1]}"
    pool.put(name, 0, size)
    for _ in range(3):  # by then the client knows the way
        pool.get(name, 0, size)
    took = thread_times.measure(lambda: pool.get(name, 0, size), num_gets, pool.pids)
    names = pool.names() if isinstance(pool, Ours) else {}
    pool.remove(name, size)
    return "\n".join(
        f"| {title(case)} | {who} {end}: {names.get(thread, 'a thread')} | "
        f"{1e6 * spent.cpu_s:.0f} | {1e6 * spent.kernel_s:.0f} | {spent.num_waits:.1f} |"
        for (end, thread), spent in took.items()
    )


def title(case: Case) -> str:
    """Return how a case is called."""
    size, num_keys = case
    if num_keys == 1:
        return format_bytes(size)
    return f"{num_keys} x {format_bytes(size // num_keys)}"


def table(figures: dict[Case, Rounds]) -> str:
    """Return the table, a row for each case."""
    columns: dict[str, Callable[[Rounds], str]] = {
        "question get ms": lambda row: _ms(row, "question get"),
        "pins get ms": lambda row: _ms(row, "pins get"),
        "speed of question / pins": lambda row: _ratio(row, "question get", "pins get"),
        "CPU of question / pins": lambda row: _ratio(row, "pins get cpu", "question get cpu"),
        "put ms": lambda row: _ms(row, "put"),
    }
    if all("upstream get" in row for row in figures.values()):
        columns |= {
            "upstream get ms": lambda row: _ms(row, "upstream get"),
            "speed of question get / upstream": lambda row: _ratio(
                row, "question get", "upstream get"
            ),
            "upstream put ms": lambda row: _ms(row, "upstream put"),
            "speed of put / upstream": lambda row: _ratio(row, "put", "upstream put"),
        }
    for kind in PROTECTED:
        if all(f"{kind} get" in row for row in figures.values()):
            columns |= {
                f"speed of get with {kind} / without": partial(
                    _ratio, ours=f"{kind} get", theirs="question get"
                ),
                f"speed of put with {kind} / without": partial(
                    _ratio, ours=f"{kind} put", theirs="put"
                ),
            }
    lines = ["| value | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for case, row in figures.items():
        cells = " | ".join(show(row) for show in columns.values())
        lines.append(f"| {title(case)} | {cells} |")
    return "\n".join(lines)


def _ms(row: Rounds, what: str) -> str:
    return f"{1e3 * statistics.median(row[what]):.2f}"


def _ratio(row: Rounds, ours: str, theirs: str) -> str:
    """Return the median over the rounds of their time by ours."""
    return f"{speedup(row[ours], row[theirs]):.2f}x"


def main(argv: Sequence[str]) -> int:
    """See the module."""
    args = _arguments(argv)
    reason = "not asked for" if args.no_upstream else upstream.prepare("pool-questions", list(argv))
    about, ends = machine(), Ends(apart=args.apart)
    figures: dict[Case, Rounds] = {}
    profiles: list[str] = []
    with ExitStack() as opened:
        store = None if reason is not None else opened.enter_context(upstream_store(ends))
        for case in args.cases:
            theirs = None if store is None else store.cut(case[1])
            with ExitStack() as of_case:
                pools = {
                    kind: of_case.enter_context(our_pool("tcp", ends, case[0] // case[1], kind))
                    for kind in ("none", *(PROTECTED if args.protected else ()))
                }
                ours = pools.pop("none")
                turns = Turns(case, ours, theirs, pools)
                turns.run(args.rounds)
                if args.profile:
                    profiles.append(profile(ours, case, args.profile, "our"))
                    if theirs is not None:
                        profiles.append(profile(theirs, case, args.profile, "upstream's"))
            figures[case] = turns.rounds
            print(f"{title(case)} done", file=sys.stderr)
    peer = f"upstream {upstream.VERSION}" if reason is None else f"without upstream ({reason})"
    print(f"{about}; {args.rounds} rounds, load {load()}; {peer}\n\n{table(figures)}")
    if profiles:
        print("\n| value | thread | CPU us of a get | of it the kernel's | waits |")
        print("\n".join(["|---|---|---|---|---|", *profiles]))
    if any(size > MAX_ANSWER_BYTES for size, _ in figures):
        print(f"\nValues of more than {format_bytes(MAX_ANSWER_BYTES)} go by pins in both ways.")
    if args.json is not None:
        text = {title(case): rounds for case, rounds in figures.items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(text, indent=2) + "\n")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pool-questions", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--sizes", default="64KiB,256KiB,1MiB,2MiB,4MiB,8MiB",
        help="bytes of the values (64KiB,256KiB,1MiB,2MiB,4MiB,8MiB)",
    )  # fmt: skip
    parser.add_argument("--keys", default="1,8", help="keys that a value is cut into (1,8)")
    parser.add_argument("--rounds", type=int, default=40, help="of each value (40)")
    parser.add_argument("--no-upstream", action="store_true", help="measure ours alone")
    parser.add_argument(
        "--apart", action="store_true", help="each end has cores of its own, as on two machines"
    )
    parser.add_argument(
        "--protected", action="store_true", help="measure gets and puts with protection, too"
    )
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N",
        help="show what each thread takes for one of N gets",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write seconds of every round to this file")
    args = parser.parse_args(argv)
    try:
        sizes = [parse_bytes(text) for text in args.sizes.split(",")]
        keys = [int(text) for text in args.keys.split(",")]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    args.cases = [(size, num_keys) for num_keys in keys for size in sizes]
    for size, num_keys in args.cases:
        if num_keys < 1 or size > CLIENT_BYTES or size % (num_keys * LEAST_BLOCK):
            parser.error(
                f"{format_bytes(size)} cannot be cut into {num_keys} keys: each needs a multiple "
                f"of {format_bytes(LEAST_BLOCK)}, and a value has {format_bytes(CLIENT_BYTES)} at "
                "most"
            )
    return args
