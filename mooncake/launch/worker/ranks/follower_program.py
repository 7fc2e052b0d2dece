"""The process of a follower: `python -m mooncake.launch.worker.ranks.follower_program WORDS`.

It ends with its lead, also if it stands still. The fork server sees to that for followers that it
forks, and the kernel for others.
"""

from __future__ import annotations

import ctypes
import signal

from mooncake.launch.host.processes.fork_server import Origin

PR_SET_PDEATHSIG = 1


def run() -> None:
    if Origin.path is None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    from mooncake.launch.worker.ranks.rank_processes import main

    main()


if __name__ == "__main__":
    run()
