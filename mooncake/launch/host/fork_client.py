"""`python -I -S fork_client.py SOCKET WORDS`: has a fork server start `python WORDS` over this
process' files, or becomes that itself where the server has gone.

Run as a script, without imports of ours: it starts in 20 ms.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> None:
    """Ask the fork server; where it refuses, start as any process does."""
    path, *words = sys.argv[1:]
    if not _forked(path, words):
        print(
            f"no fork server at {path} forks for this process: it starts by itself, slower",
            file=sys.stderr,
            flush=True,
        )
        os.execv(sys.executable, [sys.executable, *words])


def _forked(path: str, words: list[str]) -> bool:
    """Whether a fork of the server is what this process was to be."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.connect(path)
            socket.send_fds(server, [b"\0"], [0, 1, 2])
            server.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode())
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) == b"\1"
    except OSError:
        return False


if __name__ == "__main__":
    main()
