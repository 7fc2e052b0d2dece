"""Keeps the self-profile of an engine on a CPU, so that later starts time few of its steps.

A later start times the first steps again and scales the kept times of all by how fast these are
now. If the first steps disagree about that, all are timed anew. Times are kept only if nothing
disturbed them. Delete `steps-*.json` in the cache folder to forget all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mooncake import __version__
from mooncake.base import CostSample
from mooncake.engine.config import EngineConfig
from mooncake.launch.host.build import revision
from mooncake.launch.worker.profile import Shape
from mooncake.launch.worker.settings import WorkerSettings

NUM_VERIFIED = 3
"""A later start times this many steps again."""
AGREE = 2.0
"""These agree if the factor by which one has become slower is at most this many times that of
another: on a busy machine, equal steps differ as much.
"""
UNDISTURBED = 0.8
"""Times are kept if the process got at least this share of a core while it took them."""
MAX_AGE_S = 24 * 3600.0
"""Older times are not used."""

TimeSteps = Callable[[Sequence[Shape]], list[CostSample]]
"""Returns how long steps of these shapes take, or the first ones if there is no time for all."""


def place_of_profile(settings: WorkerSettings, config: EngineConfig, machine: str) -> Path | None:
    """Return the file for the profile of an engine that `machine` computes; None: nothing is kept.
    Nothing is kept for a GPU: timed steps also compile its kernels.
    """
    options = settings.options
    if options.cache_dir is None or options.device != "cpu":
        return None
    config = dataclasses.replace(config, num_blocks=config.num_homes)  # it makes no difference
    of = (
        __version__, revision(), machine, settings.role, settings.dtype, settings.weights_revision,
        options, config,
    )  # fmt: skip
    digest = hashlib.sha256(repr(of).encode()).hexdigest()
    return Path(options.cache_dir) / f"steps-{digest[:16]}.json"


def timed_or_kept(
    shapes: Sequence[Shape],
    time_steps: TimeSteps,
    place: Path | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    cpu_clock: Callable[[], float] = time.process_time,
) -> list[CostSample]:
    """Return how long steps of `shapes` take: kept at `place` and verified, or else timed now."""
    kept = [] if place is None else _read(place)
    if kept:
        factors = [
            now.seconds / before.seconds
            for now, before in zip(time_steps(shapes[:NUM_VERIFIED]), kept, strict=False)
        ]
        if max(factors) <= AGREE * min(factors):
            slower = statistics.median(factors)
            return [msgspec.structs.replace(each, seconds=each.seconds * slower) for each in kept]
    began_s, began_cpu_s = clock(), cpu_clock()
    samples = time_steps(shapes)
    got_core = cpu_clock() - began_cpu_s >= UNDISTURBED * (clock() - began_s)
    if place is not None and len(samples) > NUM_VERIFIED and got_core:
        _keep(place, samples)
    return samples


def _read(place: Path) -> list[CostSample]:
    """Return the kept samples; none from a file that is old or has another form."""
    try:
        if time.time() - place.stat().st_mtime > MAX_AGE_S:
            return []
        samples = msgspec.json.decode(place.read_bytes(), type=list[CostSample])
    except (OSError, ValueError):
        return []
    usable = len(samples) > NUM_VERIFIED and all(each.seconds > 0 for each in samples)
    return samples if usable else []


def _keep(place: Path, samples: Sequence[CostSample]) -> None:
    """Write the file anew and remove those that are too old. If the folder cannot be written to,
    nothing is kept.
    """
    with contextlib.suppress(OSError):
        for other in place.parent.glob("steps-*"):
            if time.time() - other.stat().st_mtime > MAX_AGE_S:
                other.unlink()
        descriptor, made = tempfile.mkstemp(prefix="steps-", suffix=".part", dir=place.parent)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(msgspec.json.encode(samples))
        os.replace(made, place)
