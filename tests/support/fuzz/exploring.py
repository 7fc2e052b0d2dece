"""The process that explores a target: mutates, runs, keeps what takes a new way, tells of findings.

It is deterministic for a number of inputs: what is kept depends on ways taken, never on time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random

from tests.support.fuzz.execution import Execution, Outcome, Problem, Slate
from tests.support.fuzz.mutate import Mutator
from tests.support.fuzz.target import Make

GROWTH_EVERY = 64
"""One in so many inputs is grown: a piece of it repeated to a quarter, half and all of the size."""
GROWTH_FLOOR_S = 0.1
"""Inputs that take less processor time than this at full size may grow as they like."""
GROWTH_FACTOR = 3.0
"""Twice the input may take so many times the processor time; squares take 4."""
KEPT_BYTES = 32_768
"""Longer inputs are not kept, however new: all that is made of them would be slow."""
TELL_EVERY_S = 2.0


@dataclass
class Figures:
    """What a process has done."""

    num_inputs: int = 0
    num_kept: int = 0
    num_ways: int = 0
    num_words: int = 0
    worst_cpu_s: float = 0.0
    worst_memory: int = 0

    def add(self, other: Figures) -> None:
        """Add what another process has done on the same target."""
        self.num_inputs += other.num_inputs
        self.num_kept += other.num_kept
        self.num_ways = max(self.num_ways, other.num_ways)
        self.num_words = max(self.num_words, other.num_words)
        self.worst_cpu_s = max(self.worst_cpu_s, other.worst_cpu_s)
        self.worst_memory = max(self.worst_memory, other.worst_memory)


@dataclass(frozen=True)
class Told:
    """What the exploring process tells: its figures, and what is new since the last time."""

    figures: Figures
    kept: list[bytes]
    findings: list[tuple[bytes, Problem]]
    done: bool


@dataclass
class Explorer:
    """Explores until it has run `num_inputs`, or for `seconds`, whichever is given."""

    make: Make
    slate: Slate
    tell: Connection
    corpus: list[bytes]
    seed: str
    num_inputs: int | None
    seconds: float | None
    figures: Figures = field(default_factory=Figures)
    _kept: list[bytes] = field(default_factory=list)
    _findings: list[tuple[bytes, Problem]] = field(default_factory=list)

    def run(self) -> None:
        """Explore; tells as it goes, and at the end."""
        execution = Execution(self.make, self.slate)
        target = execution.target
        random = Random(self.seed)
        mutator = Mutator(random, type(target))
        seen: set[object] = set()
        words: set[str] = set()
        began_s = told_s = time.monotonic()
        given = list(self.corpus)
        pool = list(self.corpus)
        while True:
            now = time.monotonic()
            if self.num_inputs is not None and self.figures.num_inputs >= self.num_inputs:
                break
            if self.seconds is not None and now - began_s >= self.seconds:
                break
            if now - told_s > TELL_EVERY_S:
                told_s = now
                self._tell(done=False)
            if given:
                data, is_new = given.pop(0), False
            else:
                data, is_new = mutator.mutate(pool), True
                if random.random() < 0.5:
                    data = target.repair(data)[: target.max_bytes]
                if self.figures.num_inputs % GROWTH_EVERY == 0:
                    self._grow(execution, random, random.choice(pool))
            outcome = execution.run(data)
            self._note(data, outcome)
            ways: set[object] = {*outcome.edges, outcome.word}
            if not ways <= seen:
                seen |= ways
                words.add(outcome.word)
                self.figures.num_words = len(words)
                self.figures.num_ways = len(seen)
                if is_new and outcome.problem is None and len(data) <= KEPT_BYTES:
                    pool.append(data)
                    self._kept.append(data)
                    self.figures.num_kept += 1
        self._tell(done=True)

    def _note(self, data: bytes, outcome: Outcome) -> None:
        figures = self.figures
        figures.num_inputs += 1
        figures.worst_cpu_s = max(figures.worst_cpu_s, outcome.cpu_s)
        figures.worst_memory = max(figures.worst_memory, outcome.memory)
        if outcome.problem is not None:
            self._found(data, outcome.problem)

    def _found(self, data: bytes, problem: Problem) -> None:
        self._findings.append((data, problem))
        self._tell(done=False)  # at once: the next input may end this process

    def _grow(self, execution: Execution, random: Random, data: bytes) -> None:
        """Repeat a piece of an input up to three sizes and compare what they take."""
        target = execution.target
        begin = random.randrange(len(data) + 1)
        end = min(len(data), begin + random.choice((1, 2, 3, 4, 8, 32)))
        piece = data[begin:end]
        if target.tokens and (not piece or random.random() < 0.3):
            piece = random.choice(target.tokens)
        if not piece:
            return
        tail = data[end:] if random.random() < 0.7 else b""
        taken_s: list[float] = []
        for parts in (4, 2, 1):
            room = target.max_bytes // parts - begin - len(tail)
            grown = data[:begin] + piece * max(1, room // len(piece)) + tail
            grown = target.repair(grown)[: target.max_bytes]
            cpu_s, problem = execution.cpu_s(grown)
            self._note(grown, Outcome("", problem, set(), cpu_s, 0))
            if problem is not None:
                return
            taken_s.append(cpu_s)
        if grows_faster(taken_s):
            # Once more: one slow moment is no proof.
            again = [execution.cpu_s(grown)[0] for _ in range(2)]
            taken_s[-1] = min(taken_s[-1], *again)
            if grows_faster(taken_s):
                shown = ", ".join(f"{each:.3f}" for each in taken_s)
                text = f"a quarter, half and all of {len(grown)} bytes take {shown} s"
                self._found(grown, Problem("growth", "growth", text))

    def _tell(self, *, done: bool) -> None:
        self.tell.send(Told(self.figures, self._kept, self._findings, done))
        self._kept, self._findings = [], []


def grows_faster(taken_s: list[float]) -> bool:
    """Return whether what a quarter, half and all of an input take grows faster than its size."""
    quarter_s, half_s, all_s = taken_s
    return (
        all_s > GROWTH_FLOOR_S
        and all_s > GROWTH_FACTOR * half_s
        and half_s > GROWTH_FACTOR * quarter_s
    )
