"""One campaign on one target: starts the process that explores, again after it died, and makes what
it finds small.
"""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from tests.support.fuzz.execution import Execution, Problem, Slate
from tests.support.fuzz.exploring import Explorer, Figures, Told
from tests.support.fuzz.target import Target

CORPUS = Path(__file__).resolve().parents[2] / "fuzz" / "corpus"
STUCK_S = 120.0
"""A process that runs one input for so long, in real time, waits for something."""
MAX_DEATHS = 8
"""Findings that end the process are dear: after so many, a target's campaign is over."""
MAX_SMALLER = 5000
"""Runs to make a finding small."""
MAX_SMALLER_APART = 40
"""The same where each run needs a process of its own."""
SMALLER_S = 30.0
SLACK = 1.5
"""An input is made smaller only as long as it clearly exceeds its limit."""

T = TypeVar("T")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Finding:
    """An input and what is wrong with it."""

    target: str
    problem: Problem
    data: bytes
    path: Path


@dataclass
class Campaign:
    """What came of one target."""

    target: type[Target]
    figures: Figures = field(default_factory=Figures)
    findings: dict[str, Finding] = field(default_factory=dict)
    """Signature -> finding."""
    num_repeated: int = 0
    """Findings of a signature that was known."""
    num_deaths: int = 0
    elapsed_s: float = 0.0

    def run(
        self,
        seed: int,
        out: Path,
        progress: Callable[[Campaign], None],
        num_inputs: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Explore for a number of inputs or seconds; findings are written below `out`."""
        began_s = time.monotonic()
        corpus = corpus_of(self.target)
        out.mkdir(parents=True, exist_ok=True)
        log = out / f"{self.target.name}.log"
        done = False
        while not done and self.num_deaths < MAX_DEATHS:
            self.elapsed_s = time.monotonic() - began_s
            inputs_left = None if num_inputs is None else num_inputs - self.figures.num_inputs
            seconds_left = None if seconds is None else seconds - self.elapsed_s
            if (inputs_left or 1) <= 0 or (seconds_left or 1) <= 0:
                break
            slate = Slate(self.target.max_bytes)
            listen, tell = _FORK.Pipe(duplex=False)
            explorer = Explorer(
                self.target, slate, tell, corpus,
                f"{self.target.name} {seed} {self.num_deaths}", inputs_left, seconds_left,
            )  # fmt: skip
            process = _FORK.Process(target=_quietly, args=(explorer.run, log), daemon=True)
            process.start()
            tell.close()
            done = self._listen(process, listen, slate, corpus, out, progress)
        self.elapsed_s = time.monotonic() - began_s

    def _listen(
        self,
        process: BaseProcess,
        listen: Connection,
        slate: Slate,
        corpus: list[bytes],
        out: Path,
        progress: Callable[[Campaign], None],
    ) -> bool:
        """Take what the process tells until it ends; return whether it has done all."""
        before, told = self.figures, None
        earlier_s, began_s = self.elapsed_s, time.monotonic()
        self.figures = Figures()
        moved, moved_s = slate.count, time.monotonic()
        while True:
            try:
                news: Told | None = listen.recv() if listen.poll(1.0) else None
            except EOFError:
                break
            if slate.count != moved:
                moved, moved_s = slate.count, time.monotonic()
            elif time.monotonic() - moved_s > STUCK_S:
                process.kill()
            if news is None:
                continue
            told = news
            corpus += news.kept
            for data, problem in news.findings:
                self._found(data, problem, out)
            self.figures = Figures()
            self.figures.add(before)
            self.figures.add(news.figures)
            self.elapsed_s = earlier_s + time.monotonic() - began_s
            progress(self)
            moved_s = time.monotonic()
        process.join()
        if told is None:
            self.figures = before
        if told is not None and told.done:
            return True
        self.num_deaths += 1
        self.figures.num_inputs = max(self.figures.num_inputs, before.num_inputs + slate.count)
        if process.exitcode == 1:
            raise RuntimeError(f"the exploring process failed: see {out}/{self.target.name}.log")
        self._found(slate.read(), death(process.exitcode), out)
        return False

    def _found(self, data: bytes, problem: Problem, out: Path) -> None:
        if problem.signature in self.findings:
            self.num_repeated += 1
            return
        small = data if problem.kind == "growth" else smaller(self.target, data, problem)
        name = hashlib.sha256(small).hexdigest()[:12]
        path = out / f"{self.target.name}-{problem.kind}-{name}"
        path.write_bytes(small)
        problem = replay(self.target, small) or problem
        self.findings.setdefault(problem.signature, Finding(self.target.name, problem, small, path))


def _quietly(work: Callable[[], None], log: Path) -> None:
    """Run `work` with what it prints, and what libraries print when they fail, in a file."""
    logging.disable(logging.CRITICAL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        if faulthandler.is_enabled():  # pytest's writes to a copy of its own stderr
            faulthandler.enable(file)
        work()


def corpus_of(target: type[Target]) -> list[bytes]:
    """Return the seeds of a target. Raises FileNotFoundError when none are recorded."""
    found = target.seeds or [path.read_bytes() for path in sorted((CORPUS / target.name).iterdir())]
    return [data[: target.max_bytes] for data in found]


def death(exit_code: int | None) -> Problem:
    """Return what the end of a process says of the input that it ran."""
    number = -(exit_code or 0)
    if number == signal.SIGPROF:
        return Problem(
            "death", "time without end", "ran until it was ended: too much processor time"
        )
    if number == signal.SIGKILL:
        text = f"stood still for {STUCK_S:.0f} s, or the machine had no memory left"
        return Problem("death", "stuck", text)
    name = signal.Signals(number).name if number > 0 else f"exit code {exit_code}"
    return Problem("death", f"death by {name}", f"the process ended: {name}")


def replay(target: type[Target], data: bytes, slack: float = 1.0) -> Problem | None:
    """Run one input in a process of its own; return what is wrong with it, None = nothing.

    slack: so many times the limits of time and memory are allowed.
    """
    slate = Slate(max(target.max_bytes, len(data)))
    problem: Problem | None
    problem, exit_code = _apart(lambda: Execution(target, slate, slack).cpu_s(data)[1])
    return death(exit_code) if exit_code else problem


def smaller(target: type[Target], data: bytes, problem: Problem) -> bytes:
    """Return a shorter input with the same fault: pieces are left out as long as it stays."""
    if problem.kind == "error":  # which its process survives: one is enough for all tries
        slate = Slate(target.max_bytes)
        signature = problem.signature

        def shorten() -> bytes:
            execution = Execution(target, slate)

            def fails(tried: bytes) -> bool:
                found = execution.run(tried).problem
                return found is not None and found.signature == signature

            return _shortened(data, fails, MAX_SMALLER)

        found, _ = _apart(shorten)
        return data if found is None else found

    def still(tried: bytes) -> bool:
        found = replay(target, tried, SLACK)
        return found is not None and found.signature == problem.signature

    return _shortened(data, still, MAX_SMALLER_APART) if still(data) else data


def _apart(work: Callable[[], T]) -> tuple[T | None, int]:
    """Run `work` in a process of its own; return its value, and how the process ended."""
    listen, tell = _FORK.Pipe(duplex=False)
    process = _FORK.Process(
        target=_quietly, args=(lambda: tell.send(work()), Path(os.devnull)), daemon=True
    )
    process.start()
    tell.close()
    value: T | None = None
    try:
        if listen.poll(STUCK_S):
            value = listen.recv()
        else:
            process.kill()
    except EOFError:
        pass
    process.join()
    return value, process.exitcode or 0


def _shortened(data: bytes, fails: Callable[[bytes], bool], num_tries: int) -> bytes:
    deadline_s = time.monotonic() + SMALLER_S
    size = max(1, len(data) // 2)
    while size >= 1:
        at = 0
        while at < len(data):
            num_tries -= 1
            if num_tries < 0 or time.monotonic() > deadline_s:
                return data
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data = shorter
            else:
                at += max(1, size // 2)
        size //= 2
    return data
