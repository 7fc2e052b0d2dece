"""Runs inputs on a target in this process, under limits of processor time and memory.

What cannot be survived (a crash, a loop in C, too much memory at once) ends the process: the one
that started it finds the input in shared memory (`Slate`). Time is processor time, so that a busy
machine changes nothing.
"""

from __future__ import annotations

import mmap
import re
import resource
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.support.fuzz.target import Make, Target, refusal_word
from tests.support.fuzz.tracing import Edge, Tracing

ADDRESS_BYTES = 3 * 2**30
"""What a process may map beyond what it has when its target is made."""
HARD_FACTOR = 8
"""A process is ended when an input takes so many times its limit of processor time."""
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Slate:
    """Shared memory that holds the input in hand, and counts inputs."""

    def __init__(self, max_bytes: int) -> None:
        self._memory = mmap.mmap(-1, max_bytes + 16)

    def write(self, data: bytes) -> None:
        """Note the input that is about to run."""
        self._memory[16 : 16 + len(data)] = data
        self._memory[8:16] = len(data).to_bytes(8, "little")
        self._memory[:8] = (self.count + 1).to_bytes(8, "little")

    @property
    def count(self) -> int:
        """How many inputs were written."""
        return int.from_bytes(self._memory[:8], "little")

    def read(self) -> bytes:
        """Return the last input."""
        return self._memory[16 : 16 + int.from_bytes(self._memory[8:16], "little")]


@dataclass(frozen=True)
class Problem:
    """What is wrong with an input. Two of one `signature` are the same fault."""

    kind: str
    """"error", "time", "memory", "growth", or how the process ended: "death"."""
    signature: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What came of one input."""

    word: str
    problem: Problem | None
    edges: set[Edge]
    cpu_s: float
    memory: int
    """Bytes by which the process grew meanwhile, at its peak."""


class Execution:
    """A target in this process, and what guards it."""

    def __init__(self, make: Make, slate: Slate, slack: float = 1.0) -> None:
        """Make the target; `slack` times its limits are allowed."""
        self._slack = slack
        self.target: Target = make()
        self._slate = slate
        self._tracing = Tracing(self.target.modules)
        self._measures_peak = _resets_peak()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        limit = _mapped_bytes() + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def run(self, data: bytes) -> Outcome:
        """Run an input once, traced; what seems slow or large runs again without tracing."""
        with self._tracing:
            word, problem, cpu_s, memory = self._measured(data)
        edges = self._tracing.edges
        target = self.target
        if problem is None and (
            cpu_s > target.max_cpu_s(len(data)) or memory > target.max_memory(len(data))
        ):
            word, problem, cpu_s, memory = self._measured(data)
            problem = problem or self._excess(len(data), cpu_s, memory)
        return Outcome(word, problem, edges, cpu_s, memory)

    def cpu_s(self, data: bytes) -> tuple[float, Problem | None]:
        """Return the processor time that an input takes without tracing, and what is wrong."""
        _, problem, cpu_s, memory = self._measured(data)
        return cpu_s, problem or self._excess(len(data), cpu_s, memory)

    def _excess(self, num_bytes: int, cpu_s: float, memory: int) -> Problem | None:
        limit_s = self._slack * self.target.max_cpu_s(num_bytes)
        if cpu_s > limit_s:
            text = f"{num_bytes} bytes took {cpu_s:.2f} s of processor time, limit {limit_s:.2f} s"
            return Problem("time", "time", text)
        limit = self._slack * self.target.max_memory(num_bytes)
        if memory > limit:
            mib = memory / 2**20, limit / 2**20
            text = f"{num_bytes} bytes took {mib[0]:.0f} MiB of memory, limit {mib[1]:.0f} MiB"
            return Problem("memory", "memory", text)
        return None

    def _measured(self, data: bytes) -> tuple[str, Problem | None, float, int]:
        self._slate.write(data)
        hard_s = HARD_FACTOR * self.target.max_cpu_s(len(data))
        before = _peak_bytes() if self._measures_peak and _reset_peak() else 0
        signal.setitimer(signal.ITIMER_PROF, hard_s)
        began_s = time.process_time()
        word, problem = self._fed(data)
        cpu_s = time.process_time() - began_s
        signal.setitimer(signal.ITIMER_PROF, 0)
        after = _peak_bytes() if self._measures_peak else 0
        return word, problem, cpu_s, after - before

    def _fed(self, data: bytes) -> tuple[str, Problem | None]:
        try:
            return self.target.run(data), None
        except self.target.allowed as error:
            try:
                return refusal_word(error, self.target.word_chars), None
            except AssertionError as problem:
                return "finding", problem_of(problem)
        except BaseException as error:  # a panic of a library, too
            if isinstance(error, KeyboardInterrupt):
                raise
            return "finding", problem_of(error)


def problem_of(error: BaseException) -> Problem:
    """Return an error that should not have been raised, by where it was."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if "mooncake" in frame.filename and "/fuzz/" not in frame.filename
    ]
    place = ours[-1] if ours else frames[-1]
    where = f"{place.filename.rpartition('mooncake/')[2]}:{place.name}"
    what = re.sub(r"[0-9]+", "_", str(error))[:80] if isinstance(error, AssertionError) else ""
    text = "".join(traceback.format_exception(error))[-4000:]
    return Problem("error", f"{type(error).__name__} {where} {what}".strip(), text)


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE


def _resets_peak() -> bool:
    """Whether the kernel lets a process forget its peak of memory."""
    try:
        return _reset_peak()
    except OSError:
        return False


def _reset_peak() -> bool:
    _CLEAR_REFS.write_text("5")
    return True


def _peak_bytes() -> int:
    text = _STATUS.read_text()
    at = text.index("VmHWM:")
    return int(text[at + 6 : text.index("kB", at)]) * 1024
