"""The floor of `benchmarks/pool_values.py`: the same values by bare blocking sockets, from and to
the memory of another process. No names, no look-up, no hash: what Python and loopback TCP give.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from time import perf_counter

from benchmarks.support.cores import Ends
from mooncake.transfer.memory import allocate_shared

_HEAD = struct.Struct("<B2Q")
_PUT, _GET = 0, 1


class PlainValues:
    """Values over `num_sockets` connections, each its share. Leaving the context ends the peer."""

    def __init__(self, num_sockets: int, num_bytes: int, ends: Ends) -> None:
        self._opened = ExitStack()
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, num_sockets, num_bytes), daemon=True)
        with ends.other():
            process.start()
        self._opened.callback(process.join)
        self._opened.callback(pipe.send, "done")
        port = pipe.recv()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_sockets)]
        for sock in self._sockets:
            self._opened.callback(sock.close)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(allocate_shared(num_bytes, "plain")[0])
        self._memory[:] = bytes(range(256)) * (num_bytes // 256)
        self._others = self._opened.enter_context(ThreadPoolExecutor(num_sockets))

    def put(self, _name: str, start: int, size: int) -> float:
        """Send bytes and await the word that they are there; return the seconds it took."""

        def send(sock: socket.socket, at: int, share: int) -> None:
            sock.sendall(_HEAD.pack(_PUT, at, share))
            sock.sendall(self._memory[at : at + share])
            sock.recv(1)

        return self._timed(send, start, size)

    def get(self, _name: str, start: int, size: int) -> float:
        """Ask for bytes and receive them; return the seconds it took."""

        def fetch(sock: socket.socket, at: int, share: int) -> None:
            sock.sendall(_HEAD.pack(_GET, at, share))
            _receive(sock, self._memory[at : at + share])

        return self._timed(fetch, start, size)

    def remove(self, _name: str, _size: int) -> None:
        """Nothing has a name here."""

    def _timed(
        self, move: Callable[[socket.socket, int, int], None], start: int, size: int
    ) -> float:
        share = size // len(self._sockets)
        begun = perf_counter()
        others = [
            self._others.submit(move, sock, start + lane * share, share)
            for lane, sock in enumerate(self._sockets[1:], start=1)
        ]
        move(self._sockets[0], start, share)
        for other in others:
            other.result()
        return perf_counter() - begun

    def __enter__(self) -> PlainValues:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _serve(pipe: Connection, num_sockets: int, num_bytes: int) -> None:
    memory = memoryview(allocate_shared(num_bytes, "plain")[0])
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    for _ in range(num_sockets):
        sock, _ = listener.accept()
        threading.Thread(target=_answer, args=(sock, memory), daemon=True).start()
    pipe.recv()


def _answer(sock: socket.socket, memory: memoryview) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(_HEAD.size)
    while sock.recv_into(head, len(head), socket.MSG_WAITALL) == len(head):
        op, at, size = _HEAD.unpack(head)
        view = memory[at : at + size]
        if op == _GET:
            sock.sendall(view)
        else:
            _receive(sock, view)
            sock.send(b"k")


def _receive(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:])
        if not count:
            raise ConnectionError("the other process has gone")
        done += count
