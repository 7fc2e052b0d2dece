"""`python -I -S fork_client.py SOCKET WORDS`: has a fork server start `python WORDS` over this
process' files, or becomes that itself where the server has gone.

It stays as long as what was forked, and each ends with the other. Run as a script, without imports
of ours: it starts in 20 ms.
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
    """Return whether a fork of the server was what this process was to be; returns when that has
    ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.connect(path)
            socket.send_fds(server, [b"\0"], [0, 1, 2])
            server.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode())
            server.shutdown(socket.SHUT_WR)
            if server.recv(1) != b"\1":
                return False
        except OSError:
            return False
        os.closerange(0, 3)  # the fork has them, and others wait for their ends
        server.recv(1)  # the fork holds the other end as long as it runs
        return True


if __name__ == "__main__":
    main()
