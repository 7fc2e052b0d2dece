"""Up to how many rows compiled code is faster than a library. This is measured here and kept with
the code.

It is kept for the same CPU, torch, compiled code and number of threads. When one of these changes,
it is measured anew. Delete `timings.json` in the folder to forget all of it.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from mooncake_kernels.native import build

_TRIED_TOKENS = (1, 8, 32, 128, 512, 2048)
_SHORT_TRIALS, _TRIALS = 6, 2
_SHORT_TOKENS = 64
_LONG_TRIAL_S = 0.5
"""No larger number is tried after one that took this long, because models should start soon."""
_LOST = 1.1
"""Compiled code counts as slower only beyond this factor, because less may be noise."""
_TRIED_CHOICES = 4

Kind = tuple[str, int, int, int]
"""(function, experts, hidden, inner)."""
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, experts, weights) -> each token's sum; see `reference.experts.StackedExperts`"""


@dataclass(frozen=True)
class Timing:
    """The CPU time that one layer took in both ways, the best of a few runs. Both ways use the same
    threads, and how long these waited for a busy machine says nothing of the code.
    """

    kind: str
    tokens: int
    few_s: float
    many_s: float

    @property
    def won(self) -> bool:
        """Whether compiled code was not slower."""
        return self.few_s <= _LOST * self.many_s


_measured: dict[tuple[Kind, int], list[Timing]] = {}


def timings() -> list[Timing]:
    """Return the times that this process measured, or read, to choose between the two ways."""
    return [timing for found in _measured.values() for timing in found]


def measured(kind: Kind) -> list[Timing]:
    """Return the times on which `few_tokens` is based."""
    return _measured[kind, torch.get_num_threads()]


def few_tokens(kind: Kind, few: Experts, many: Experts) -> float:
    """Return up to how many tokens `few` is faster. Measured once for each `kind`.

    Above some number, oneDNN's larger tiles may multiply faster. With AMX, compiled code multiplies
    many rows of bfloat16 by the instructions that oneDNN uses. So if it never lost, it takes any
    number.
    """
    wanted = kind, torch.get_num_threads()
    if wanted not in _measured:
        file, key = _file(), _key(kind)
        found = None if file is None else _read(file).get(key)
        if found is None:
            found = _measure(kind, few, many)
            if file is not None:
                _keep(file, key, found)
        _measured[wanted] = found
    limit = 0
    for timing in _measured[wanted]:
        if not timing.won:
            return limit
        limit = timing.tokens
    by_tiles = kind[0].endswith("_bf16") and build.isa() is build.AMX
    return math.inf if by_tiles else limit


def _measure(kind: Kind, few: Experts, many: Experts) -> list[Timing]:
    """Time both ways with more and more tokens until `few` is slower."""
    name, num, hidden, _ = kind
    generator = torch.Generator().manual_seed(0)
    found: list[Timing] = []
    for tokens in _TRIED_TOKENS:
        started = time.perf_counter()
        x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
        choices = min(num, _TRIED_CHOICES)
        chosen = torch.rand(tokens, num, generator=generator).topk(choices, dim=-1).indices
        weights = torch.ones(chosen.shape)
        best = [math.inf, math.inf]
        for _ in range(_SHORT_TRIALS if tokens <= _SHORT_TOKENS else _TRIALS):
            for way in (0, 1):
                begin = time.process_time()
                (many if way else few)(x, chosen, weights)
                best[way] = min(best[way], time.process_time() - begin)
        found.append(Timing(name, tokens, *best))
        if not found[-1].won or time.perf_counter() - started > _LONG_TRIAL_S:
            break
    return found


def _file() -> Path | None:
    folder = build.kept_in()
    return None if folder is None else folder / "timings.json"


def machine() -> str:
    """Return what computes here: the CPU, torch, the compiled code and the number of threads."""
    try:
        code = build.digest()
    except build.CannotBuild:
        code = "none"
    parts = (build.cpu_name(), torch.__version__, code, torch.get_num_threads())
    return " | ".join(map(str, parts))


def _key(kind: Kind) -> str:
    return " | ".join(map(str, (machine(), *kind)))


def _read(file: Path) -> dict[str, list[Timing]]:
    """Return the kept times; none from a file that cannot be read or has another form."""
    try:
        stored = json.loads(file.read_bytes())
        return {
            str(key): [
                Timing(str(kind), int(n), float(few), float(many)) for kind, n, few, many in rows
            ]
            for key, rows in stored.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(file: Path, key: str, found: list[Timing]) -> None:
    """Add to the kept times. If the folder cannot be written to, nothing is kept."""
    kept = {**_read(file), key: found}
    rows = {name: [astuple(timing) for timing in each] for name, each in kept.items()}
    try:
        descriptor, made = tempfile.mkstemp(suffix=".json", dir=file.parent)
        with os.fdopen(descriptor, "w") as opened:
            json.dump(rows, opened, indent=1)
        os.replace(made, file)
    except OSError:
        return
