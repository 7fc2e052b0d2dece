"""`python -I -S fork_client.py SOCKET WORDS`: asks a fork server to start `python WORDS` with this
process' files. If the server is gone, this process runs it itself.

It runs as long as the forked process, and each ends with the other. It is run as a script without
our imports, so it starts in 20 ms.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> None:
    """Ask the fork server. If it refuses, start as any process does."""
    path, *words = sys.argv[1:]
    if not _forked(path, words):
        print(
            f"no fork server at {path} forks for this process: it starts by itself, slower",
            file=sys.stderr,
            flush=True,
        )
        os.execv(sys.executable, [sys.executable, *words])


def _forked(path: str, words: list[str]) -> bool:
    """Return whether the fork server ran this process' command in a fork; returns when that fork
    has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.connect(path)
            socket.send_fds(server, [b"\0"], [0, 1, 2])
            server.sendall(json.dumps([words, dict(os.environ), os.getcwd(), False]).encode())
            server.shutdown(socket.SHUT_WR)
            if not server.recv(16):
                return False
        except OSError:
            return False
        os.closerange(0, 3)  # the fork has them, and others wait for their ends
        server.recv(1)  # the fork holds the other end as long as it runs
        return True


if __name__ == "__main__":
    main()
