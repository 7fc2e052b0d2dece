"""The processes of an instance's followers. The lead starts those on its own machine; hosts of
ranks start those on others. Where a fork server has forked the lead, it forks the followers, too;
otherwise each starts as any process does, and imports what it needs.

A follower inherits its link, one end of a socket pair, and on its lead's machine the group's file.
It has no cluster secret in its environment: a follower with its own memory gets the secret from its
lead.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from mooncake.base import InternalError
from mooncake.crypto.keys import KeyRing, KeySource
from mooncake.engine.ranks.rank_group import SIGN_S, SILENT_S
from mooncake.launch.host import environment
from mooncake.launch.host.interfaces import bind_nccl
from mooncake.launch.host.processes.fork_server import fork
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
from mooncake.launch.host.secrets.key_source import read_keys
from mooncake.launch.host.secrets.secret_file import SECRET_FILE
from mooncake.launch.worker.ranks.far_ranks import FarStages
from mooncake.launch.worker.ranks.rank_moves import RankMoves
from mooncake.model.checkpoint.files.checkpoint_files import LentFiles
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.group import Group
from mooncake.model.parallel.joining import FarStore, ServedStore, join, make_file
from mooncake.model.parallel.lead import Lead, RankProcess
from mooncake.model.parallel.peers import Peers
from mooncake.model.running.follower import FollowerSettings, run
from mooncake.telemetry.log import configure_logging
from mooncake.transfer.net.blocking import send

if TYPE_CHECKING:  # it needs channels, which most followers do not
    from mooncake.launch.worker.weights.borrowed_weights import Loan

EXCHANGE_S = 30.0
"""A rank that stands still is detected by then: no layer of a step takes as long."""
PROGRAM = "mooncake.launch.worker.ranks.follower_program"
"""The module that a follower's process runs."""


def start_ranks(
    path: str,
    dtype: str,
    options: ModelOptions,
    peers: Peers | None = None,
    far: FarStages | None = None,
    loan: Loan | None = None,
) -> Lead:
    """Start the followers of an instance of several ranks; they begin to load. `peers`: the workers
    with which they share experts. `far`: the machines of the stages before the last; None: this
    one. `loan`: the weights of an engine, which they read in place of files.

    Raises:
        ConfigError: the machine of a stage does not answer.
        InternalError: a follower ended; where it is to run, the log says why.
    """
    backend, shape = options.group_kind, options.shape
    memory = make_file(backend, shape.num_ranks)
    files = [memory] if peers is None else [memory, peers.descriptor]
    sockets: list[socket.socket] = []
    processes: list[RankProcess] = []
    store = None
    try:
        if far is not None:
            store = ServedStore(far.own_host)
        for rank in range(1, shape.num_ranks):
            is_far = far is not None and shape.stage_of(rank) < shape.pp - 1
            ours, process = _start(rank, options, files, far if is_far else None)
            sockets.append(ours)
            processes.append(process)
            settings = FollowerSettings(
                rank=rank,
                gpu=0 if is_far else rank,
                model=path,
                dtype=dtype,
                options=options,
                timeout_s=EXCHANGE_S,
                sign_s=SIGN_S,
                store=None if store is None else store.address,
                number=0 if peers is None else peers.number,
                loan=b"" if loan is None else msgspec.msgpack.encode(loan),
            )
            try:
                send(ours, msgspec.msgpack.encode(settings))
            except OSError as error:
                raise InternalError(f"rank {rank} ended before it loaded its part") from error
        if store is None:
            group = join(backend, shape.num_ranks, 0, memory, EXCHANGE_S)
        else:
            group = store.join(backend, shape.num_ranks, 0, store.address[0], EXCHANGE_S)
            os.close(memory)
    except BaseException:
        os.close(memory)
        for each in sockets:
            each.close()
        for process in processes:
            process.kill()
            process.wait()
        raise
    return Lead(group, sockets, processes, EXCHANGE_S, SILENT_S, options.shape.tp)


def _start(
    rank: int, options: ModelOptions, files: Sequence[int], far: FarStages | None
) -> tuple[socket.socket, RankProcess]:
    """Start a follower here, or on the `far` machine of its stage; return our end of its link."""
    if far is not None:
        return far.start(options.shape.stage_of(rank), on_gpu=options.device != "cpu")
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return ours, start_follower(theirs.fileno(), files, options.weights_key)
    except BaseException:
        ours.close()
        raise


class Follower(RankProcess, Protocol):
    """The process of a follower on this machine."""

    @property
    def pid(self) -> int:
        """The number of the process."""


def start_follower(
    link: int,
    files: Sequence[int],
    weights_key: KeySource,
    far: Sequence[str] = (),
    gpu: str | None = None,
) -> Follower:
    """Start a follower, which reads its settings from `link`. It ends with this process.

    files: descriptors of the files by which it joins its group and the group of all ranks that
    share experts. far: if the lead is on another machine, the host where the follower listens, and
    how many seconds this machine's clock is ahead of the lead's. gpu: the only one that it sees;
    None: those that this process sees.
    """
    descriptors = link, *files
    environ = of_follower(environment.variables(), weights_key)
    if gpu is not None:
        environ[environment.SEEN_GPUS] = gpu
    with Path(os.devnull).open("rb") as nothing:
        standard = nothing.fileno(), 1, 2
        numbers = range(len(standard), len(standard) + len(descriptors))
        words = [PROGRAM, *_words(numbers, far)]
        forked = fork(words, environ, [*standard, *descriptors])
    if forked is not None:
        return forked
    starting = _parent().submit(
        subprocess.Popen,
        [sys.executable, "-m", PROGRAM, *map(str, _words(descriptors, far))],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env=environ,
    )
    return starting.result()


@functools.cache
def _parent() -> ThreadPoolExecutor:
    """Return the thread that starts followers. The kernel ends followers with the thread that
    started them, so this thread has to live as long as the process.
    """
    return ThreadPoolExecutor(1, "rank-parent")


def of_follower(environ: Mapping[str, str], weights_key: KeySource) -> dict[str, str]:
    """Return the environment of a follower: ours, with our imports. Its only secrets are the key of
    encrypted weights and the name of the file of the cluster secret or credential, which the
    follower reads itself.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith("MOONCAKE_") or name in (weights_key.variable, SECRET_FILE)
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**environment.QUIET, **environment.COMPUTE, **kept, "PYTHONPATH": path}


def _words(descriptors: Sequence[int], far: Sequence[str]) -> list[str | int]:
    """Return the arguments of `main`. Its lead's process is named for people who look at it."""
    host, ahead_s = far or ("", "0")
    return [f"lead={os.getpid()}", host, ahead_s, *descriptors]


def main() -> None:
    """Be a follower; the arguments are those of `_words`."""
    _, host, ahead_s, *descriptors = sys.argv[1:]
    link, *files = map(int, descriptors)
    memory, shared = (*files, None, None)[:2]
    configure_logging("rank", sys.stderr)
    end_with_vital_threads()

    def joined(settings: FollowerSettings) -> Group:
        size, timeout_s = settings.options.shape.num_ranks, settings.timeout_s
        kind = settings.options.group_kind
        if settings.store is not None:
            there = FarStore(settings.store)
            host_here = host or settings.store[0]
            if host and kind == "nccl":
                bind_nccl(host)
            return there.join(kind, size, settings.rank, host_here, timeout_s)
        assert memory is not None, "ranks of one machine share a file"
        return join(kind, size, settings.rank, memory, timeout_s)

    def open_moves(say: Callable[[bytes], None]) -> RankMoves:
        return RankMoves(say, host or None, float(ahead_s))

    def keys(options: ModelOptions) -> KeyRing | None:
        return read_keys(options.weights_key)

    def lent(settings: FollowerSettings) -> LentFiles | None:
        if not settings.loan:
            return None
        from mooncake.launch.worker.weights.borrowed_weights import borrowed_by_rank

        options = settings.options
        return borrowed_by_rank(settings.loan, host or None, settings.model, keys(options), options)

    run(socket.socket(fileno=link), joined, shared, keys, lent, open_moves)
