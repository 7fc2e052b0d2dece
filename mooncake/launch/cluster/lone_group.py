"""Runs workers that share their experts, each in a process of its own. They start and
end together; what runs the command starts all of them again.

Owns their processes and the order of ending.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mooncake.base import ConfigError, InternalError, MooncakeError
from mooncake.base.models.parallel import DP_FLAG
from mooncake.launch.cluster.facts import without_secret
from mooncake.launch.cluster.report import READY, Show
from mooncake.launch.cluster.supervision.worker_handle import (
    Begin,
    Told,
    WorkerHandle,
    end_left,
    fingerprint,
    place_of,
    start_at,
)
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.worker.settings import WorkerSettings

END_S = 15.0
"""Once one has ended, or its time to leave is over, the others end by then, or are killed."""
_SIGNAL = "signal"

_Word = tuple[str, Told | BaseException | None]
"""The name of a worker, and its word. None: it has ended. An exception: it cannot be heard."""


def run_group(
    config: ServeConfig,
    group: Sequence[WorkerSettings],
    show: Show,
    started: Callable[[WorkerSettings, int], None],
) -> None:
    """Be these workers until a signal. Then they leave, which takes `shutdown_timeout` at most; a
    second signal ends them now. `started` is called with each worker that serves, and the pid of
    its process.

    Raises:
        ConfigError: this machine has fewer GPUs than they have ranks.
        MooncakeError: one cannot start, or has ended by itself; then all end.
    """
    gpus = gpus_of(group)
    words: queue.SimpleQueue[_Word] = queue.SimpleQueue()
    places = {each.worker_id: place_of(f"group {os.getpid()}", each.worker_id) for each in group}
    handles: dict[str, WorkerHandle] = {}

    def attend(settings: WorkerSettings) -> None:
        name, end = settings.worker_id, None
        try:
            handle = handles[name] = WorkerHandle(
                places[name],
                _begin(config, settings),
                partial(start_at, changes=gpus.get(name, {})),
            )
            told: Told | None = handle.first
            while told is not None:
                words.put((name, told))
                told = handle.receive()
            handle.close()
        except BaseException as error:
            end = error
        words.put((name, end))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: words.put((_SIGNAL, None)))
    for each in group:
        threading.Thread(target=attend, args=(each,), name="attend-worker", daemon=True).start()
    try:
        problem = _watch(config, {each.worker_id: each for each in group}, words, handles, show,
                         started)  # fmt: skip
    finally:
        for place in places.values():
            end_left(place)
    if problem is not None:
        raise problem


def gpus_of(group: Sequence[WorkerSettings]) -> dict[str, dict[str, str]]:
    """Return the variable by which each worker on GPUs sees its own, one for each of its ranks, of
    those that this process sees.

    Raises:
        ConfigError: there are too few.
    """
    there = machine_facts.seen_gpus()
    ranks = {each.worker_id: each.options.shape.num_ranks for each in group if each.num_gpus}
    if sum(ranks.values()) > len(there):
        raise ConfigError(
            f"{DP_FLAG}: ranks of workers that share their experts have a GPU each: they need "
            f"{sum(ranks.values())}, and this machine has {len(there)}"
        )
    left = iter(there)
    return {
        name: {environment.SEEN_GPUS: ",".join(next(left) for _ in range(number))}
        for name, number in ranks.items()
    }


def _begin(config: ServeConfig, settings: WorkerSettings) -> Begin:
    file = config.cluster_secret_file
    return Begin(
        settings=without_secret(settings), secret=settings.cluster_secret,
        secret_file=None if file is None else str(Path(file).absolute()), advertise_host=None,
        fingerprint=fingerprint(settings), orphan_s=0.0,
    )  # fmt: skip


def _watch(
    config: ServeConfig,
    group: dict[str, WorkerSettings],
    words: queue.SimpleQueue[_Word],
    handles: dict[str, WorkerHandle],
    show: Show,
    started: Callable[[WorkerSettings, int], None],
) -> MooncakeError | None:
    """Hear the workers until all have ended, or have to be killed; return why they ended, if it was
    not by a signal.
    """
    living, serving = set(group), set[str]()
    problem: MooncakeError | None = None
    limits_s = [config.shutdown_timeout]
    end_s: float | None = None
    while living:
        try:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            name, word = words.get(timeout=left_s)
        except queue.Empty:
            break
        if name == _SIGNAL:
            if serving != set(group):
                break
            limit_s = limits_s.pop() if limits_s else 0.0
            end_s = time.monotonic() + limit_s + END_S
            for handle in handles.values():
                handle.leave(limit_s, waits=True)
        elif isinstance(word, Told) and not word.refusal:
            show(name, READY if word.ready else word.what, word.done, word.whole)
            if word.ready and name not in serving:
                serving.add(name)
                started(group[name], word.pid)
        else:
            if not isinstance(word, Told):
                living.discard(name)
            if end_s is None:
                problem, end_s = _why(name, word), time.monotonic() + END_S
    return problem


def _why(name: str, word: Told | BaseException | None) -> MooncakeError:
    if isinstance(word, Told):
        return InternalError(f"{name}: {word.refusal}")
    if isinstance(word, MooncakeError):
        return InternalError(f"{name}: {word.message}")
    if word is not None:
        return InternalError(f"{name}: {word!r}")
    return InternalError(f"{name} has ended, and with it those that share its experts")
