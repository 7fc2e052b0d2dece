"""The processes of an instance's followers: started by its lead, on the lead's machine.

A follower inherits two descriptors, a socket pair with its lead and the group's file. It has no
cluster secret in its environment: one that has a memory of its own hears it from its lead.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from mooncake.crypto.keys import KeySource
from mooncake.launch.host import environment
from mooncake.launch.host.key_source import read_keys
from mooncake.launch.worker.rank_moves import RankMoves
from mooncake.model.follower import FollowerSettings, run
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.joining import join, make_file
from mooncake.model.parallel.lead import Lead, send
from mooncake.model.parallel.peers import Peers
from mooncake.telemetry.log import configure_logging

EXCHANGE_S = 30.0
"""A rank that stands still is found out by then: no layer of a step takes as long."""
_MAIN = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the lead, even stopped
from mooncake.launch.worker.rank_processes import main
main()
"""


def start_ranks(path: str, dtype: str, options: ModelOptions, peers: Peers | None = None) -> Lead:
    """Start the followers of an instance of several ranks; they begin to load. `peers`: with whom
    they share experts.
    """
    backend, shape = options.group_kind, options.shape
    memory = make_file(backend, shape.num_ranks)
    shared = None if peers is None else peers.descriptor
    sockets: list[socket.socket] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, shape.num_ranks):
            ours, theirs = socket.socketpair()
            sockets.append(ours)
            with theirs:
                processes.append(_start(theirs.fileno(), memory, shared, options))
            settings = FollowerSettings(
                rank=rank,
                model=path,
                dtype=dtype,
                options=options,
                timeout_s=EXCHANGE_S,
                number=0 if peers is None else peers.number,
            )
            send(ours, msgspec.msgpack.encode(settings))
        group = join(backend, shape.num_ranks, 0, memory, EXCHANGE_S)
    except BaseException:
        os.close(memory)
        for each in sockets:
            each.close()
        for process in processes:
            process.kill()
            process.wait()
        raise
    return Lead(group, sockets, processes, EXCHANGE_S)


def _start(
    link: int, memory: int, shared: int | None, options: ModelOptions
) -> subprocess.Popen[bytes]:
    descriptors = (link, memory) if shared is None else (link, memory, shared)
    starting = _parent().submit(
        subprocess.Popen,
        [sys.executable, "-c", _MAIN, *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=of_follower(environment.variables(), options.weights_key),
    )
    return starting.result()


@functools.cache
def _parent() -> ThreadPoolExecutor:
    """Return the thread that starts followers. The kernel ends them with the thread that started
    them, so that has to live as long as this process.
    """
    return ThreadPoolExecutor(1, "rank-parent")


def of_follower(environ: Mapping[str, str], weights_key: KeySource) -> dict[str, str]:
    """Return the environment of a follower: ours, with our imports; of secrets, only the key of
    encrypted weights, which it reads itself.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith("MOONCAKE_") or name == weights_key.variable
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**environment.QUIET, **environment.COMPUTE, **kept, "PYTHONPATH": path}


def main() -> None:
    """Be a follower; the descriptors of its link, of the group's memory and of that of all ranks
    that share experts, if others do, are the arguments.
    """
    link, memory, *shared = (int(word) for word in sys.argv[1:])
    configure_logging("rank", sys.stderr)
    lead, of_all = socket.socket(fileno=link), shared[0] if shared else None
    run(lead, memory, of_all, lambda options: read_keys(options.weights_key), RankMoves)
