"""One process of the upstream transfer engine or store, for `benchmarks/upstream.py`.

Run by the environment that holds `mooncake-transfer-engine-non-cuda`, whose package is called like
ours: nothing of this repository can be imported here. Reads one JSON list a line, `[name, *args]`,
answers with one JSON value a line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HOST = "127.0.0.1"


def refuse_networks() -> None:
    """Upstream listens on all interfaces: end unless there is only the loopback."""
    names = [name for _, name in socket.if_nameindex()]
    if names != ["lo"]:
        raise SystemExit(f"not here: upstream would listen on {', '.join(names)}")


def batches(work: list[int], room: int) -> list[list[int]]:
    """Return where the blocks of each batch start, the last first: round and round the memory.

    `work` is (block bytes, blocks of a batch, batches, number of the first block).
    """
    size, batch, times, first = work
    fit = room // size
    starts = [(index % fit) * size for index in range(first, first + times * batch)]
    return [starts[at : at + batch][::-1] for at in range(0, len(starts), batch)]


class Engine:
    """A transfer engine with one registered buffer."""

    def __init__(self, num_bytes: int) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        _check(self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        self._memory = np.ones(num_bytes, dtype=np.uint8)
        self._address = self._memory.ctypes.data
        _check(self._engine.register_memory(self._address, num_bytes))

    def place(self) -> list[Any]:
        """Return how another process names the buffer."""
        return [f"{HOST}:{self._engine.get_rpc_port()}", self._address]

    def move(self, op: str, peer: str, there: int, work: list[int]) -> float:
        """Move the batches of `work`; return the seconds it took."""
        size, batch = work[:2]
        places = [
            ([self._address + start for start in starts], [there + start for start in starts])
            for starts in batches(work, len(self._memory))
        ]
        one, many = (
            getattr(self._engine, f"{kind}_sync_{op}") for kind in ("transfer", "batch_transfer")
        )
        begun = time.perf_counter()
        for here, far in places:
            if batch == 1:
                _check(one(peer, here[0], far[0], size))
            else:
                _check(many(peer, here, far, [size] * batch))
        return time.perf_counter() - begun


class Store:
    """A client of upstream's store; `segment` bytes of its memory belong to the store."""

    def __init__(self, master: str, segment: int, num_bytes: int) -> None:
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        self._memory = np.ones(num_bytes, dtype=np.uint8)
        self._address = self._memory.ctypes.data
        _check(self._store.setup(HOST, "P2PHANDSHAKE", segment, 16 * 2**20, "tcp", "", master))
        _check(self._store.register_buffer(self._address, num_bytes))

    def let_threads_go_first(self) -> None:
        """Run at one priority less than the threads that the store has made, if the policy is
        real-time. A call spins until they are done, which on one core they otherwise never are.
        """
        priority = os.sched_getparam(0).sched_priority
        if priority > 1:
            os.sched_setscheduler(0, os.sched_getscheduler(0), os.sched_param(priority - 1))

    def put(self, name: str, start: int, size: int, num_keys: int) -> float:
        """Store a value under new names; return the seconds it took."""
        names, places, sizes = self._cut(name, start, size, num_keys)
        begun = time.perf_counter()
        if num_keys == 1:
            _check(self._store.put_from(names[0], places[0], size))
        else:
            _check(any(self._store.batch_put_from(names, places, sizes)))
        return time.perf_counter() - begun

    def get(self, name: str, start: int, size: int, num_keys: int) -> float:
        """Fetch a value; return the seconds it took."""
        names, places, sizes = self._cut(name, start, size, num_keys)
        begun = time.perf_counter()
        if num_keys == 1:
            came = [self._store.get_into(names[0], places[0], size)]
        else:
            came = list(self._store.batch_get_into(names, places, sizes))
        took = time.perf_counter() - begun
        if came != sizes:
            raise RuntimeError(f"{name} did not come back")
        return took

    def remove(self, name: str, num_keys: int) -> bool:
        """Return whether it could be removed: not while its lease runs."""
        names = self._cut(name, 0, 0, num_keys)[0]
        codes = [self._store.remove(each) for each in names]
        return not any(codes)

    def _cut(
        self, name: str, start: int, size: int, num_keys: int
    ) -> tuple[list[str], list[int], list[int]]:
        """Return the name, the place and the bytes of each part of a value."""
        part = size // num_keys
        names = [f"{name}.{number}" for number in range(num_keys)]
        places = [self._address + start + number * part for number in range(num_keys)]
        return names, places, [part] * num_keys


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"upstream says {code}")


def main() -> None:
    """Answer until the input ends."""
    refuse_networks()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what upstream prints is no answer
    kinds: dict[str, Callable[..., Any]] = {"engine": Engine, "store": Store}
    kind, *arguments = json.loads(sys.stdin.readline())
    member = kinds[kind](*arguments)
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(member, name)(*arguments)), file=answers, flush=True)
    answers.flush()
    with contextlib.suppress(BaseException):
        os._exit(0)  # its threads do not always end


if __name__ == "__main__":
    main()
