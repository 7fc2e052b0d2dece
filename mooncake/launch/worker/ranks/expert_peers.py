"""Lets the workers that hold the routed experts together find each other. They meet at an abstract
Unix socket of their machine, where only processes of the same user are accepted, and each proves
that it belongs to the cluster. Nothing listens on a network.

The first worker makes what they share: a file by which their ranks join one group, a link between
each two workers, and what each process can be ended by. It hands these out when all have come. Then
the socket is gone. A worker that restarts later waits for the first one to come again too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import select
import socket
import time

from mooncake.base import InternalError, SystemIds
from mooncake.base.errors import MooncakeError
from mooncake.identity.credential import Credential
from mooncake.launch.host.processes.abstract_name import credentials_of, foreign_holder
from mooncake.launch.worker.ranks.rank_processes import EXCHANGE_S
from mooncake.model.options import ExpertGroup, ModelOptions
from mooncake.model.parallel.joining import make_file
from mooncake.model.parallel.peers import Peers
from mooncake.transfer.net.blocking import let_in, shake_hands
from mooncake.transfer.net.handshake import Credentials

MEET_S = 300.0
"""How long the others may take to come. They are started, or restarted, at the same time."""
_AGAIN_S = 0.1
_ANSWER_S = 10.0

_log = logging.getLogger(__name__)


def meet(group: ExpertGroup, credential: Credential, options: ModelOptions) -> Peers:
    """Return the links to the others, once all have come.

    Raises:
        InternalError: the others did not come in time.
    """
    deadline_s = time.monotonic() + MEET_S
    try:
        if group.number:
            return _come(group, credential, deadline_s)
        file = make_file(options.group_kind, options.shape.tp * options.shape.num_sharers)
        try:
            return _gather(group, credential, file, deadline_s)
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise InternalError(f"the workers that share experts do not meet: {error}") from error


def _credentials(group: ExpertGroup, credential: Credential, number: int) -> Credentials:
    return Credentials(engine_id=f"{group.name}/{number}", credential=credential, ids=SystemIds())


def _gather(group: ExpertGroup, credential: Credential, file: int, deadline_s: float) -> Peers:
    """Wait for all others and give each its part."""
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        _bind(listener, group.name, deadline_s)
        while len(found) < group.size - 1:
            _wait(listener, deadline_s, group, found)
            sock, _ = listener.accept()
            opened.enter_context(sock)
            if not _is_of_this_user(sock):
                sock.close()
                continue
            number = _accepted(sock, _credentials(group, credential, 0), group)
            if number is None:
                sock.close()
                continue
            found[number] = sock
            for other, its in list(found.items()):
                if its is not sock and _gone(its):
                    del found[other]
        made = opened.enter_context(contextlib.ExitStack())
        processes = {0: os.pidfd_open(os.getpid())}
        made.callback(os.close, processes[0])
        for number, sock in found.items():
            processes[number] = os.pidfd_open(credentials_of(sock)[0])
            made.callback(os.close, processes[number])
        ends: dict[int, dict[int, socket.socket]] = {number: {} for number in range(group.size)}
        for one in range(group.size):
            for other in range(one):
                ends[one][other], ends[other][one] = map(made.enter_context, socket.socketpair())
        for number, sock in found.items():
            theirs = ends[number]
            links = [theirs[other].fileno() for other in sorted(theirs)]
            others = [processes[other] for other in sorted(theirs)]
            socket.send_fds(sock, [b"all"], [file, *links, *others])
            for link in theirs.values():
                link.close()
        made.pop_all()
        os.close(processes.pop(0))
        return Peers(0, group.workers, ends[0], processes, file, EXCHANGE_S)


def _come(group: ExpertGroup, credential: Credential, deadline_s: float) -> Peers:
    """Try to reach the first worker until all have come there."""
    others = [number for number in range(group.size) if number != group.number]
    while time.monotonic() < deadline_s:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(_address(group.name))
                side = _credentials(group, credential, group.number).connect(f"{group.name}/0")
                shake_hands(sock, side, time.monotonic() + _ANSWER_S)
                sock.settimeout(max(0.1, deadline_s - time.monotonic()))
                data, descriptors, _, _ = socket.recv_fds(sock, 16, 2 * len(others) + 1)
            except (OSError, EOFError, MooncakeError):
                time.sleep(_AGAIN_S)  # it has not come yet, or has ended meanwhile
                continue
            if data and len(descriptors) == 2 * len(others) + 1:
                file, *of_others = descriptors
                links = map(_socket, of_others[: len(others)])
                return Peers(
                    group.number,
                    group.workers,
                    dict(zip(others, links, strict=True)),
                    dict(zip(others, of_others[len(others) :], strict=True)),
                    file,
                    EXCHANGE_S,
                )
            for descriptor in descriptors:
                os.close(descriptor)
            time.sleep(_AGAIN_S)
    raise InternalError(
        f"{group.name}: the first of the workers that share their experts did not come within "
        f"{MEET_S:.0f} s; they have to be on one machine"
    )


def _address(name: str) -> str:
    """Return the socket's address, shortened by a hash: there is room for only 107 bytes."""
    return f"\0mooncake-experts-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _bind(listener: socket.socket, name: str, deadline_s: float) -> None:
    while True:
        try:
            listener.bind(_address(name))
            listener.listen()
            return
        except OSError as error:  # a process that is ending still holds it
            if error.errno != errno.EADDRINUSE:
                raise
            holder = foreign_holder(_address(name), socket.SOCK_STREAM)
            if holder is not None:
                raise InternalError(
                    f"{name}: {holder} holds the address at which workers that share experts meet "
                    "on this machine; end that process"
                ) from error
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_AGAIN_S)


def _wait(
    listener: socket.socket, deadline_s: float, group: ExpertGroup, found: dict[int, socket.socket]
) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not select.select([listener], [], [], left_s)[0]:
        missing = sorted(set(range(1, group.size)) - found.keys())
        raise InternalError(
            f"{group.name}: workers {', '.join(map(str, missing))} of those that share their "
            f"experts did not come within {MEET_S:.0f} s; they have to be on one machine"
        )


def _is_of_this_user(sock: socket.socket) -> bool:
    """Return whether the process that has come runs as this one's user, as the kernel says."""
    pid, user = credentials_of(sock)
    if user == os.geteuid():
        return True
    _log.warning(
        "process %d of user %d came to the socket of workers that share experts, which are user "
        "%d's: it is ignored", pid, user, os.geteuid()
    )  # fmt: skip
    return False


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _accepted(sock: socket.socket, credentials: Credentials, group: ExpertGroup) -> int | None:
    """Return the number of the worker that has come, if it proves itself."""
    side = credentials.accept()
    try:
        let_in(sock, side, time.monotonic() + _ANSWER_S)
    except (OSError, EOFError, MooncakeError):
        return None
    assert side.identity is not None
    name, _, number = side.identity.engine_id.rpartition("/")
    known = name == group.name and number.isdecimal() and 0 < int(number) < group.size
    return int(number) if known else None


def _gone(sock: socket.socket) -> bool:
    """Return whether the other side has gone. It sends nothing once it has proven itself."""
    return bool(select.select([sock], [], [], 0)[0])
