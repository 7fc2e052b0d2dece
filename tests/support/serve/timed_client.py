"""A client that asks the same short question again and again and prints when, in a process of its
own: `python -m tests.support.serve.timed_client URL KEY PID...`. Lines: begin and end on the
monotonic clock, which processes of one machine share, the status, and the CPU seconds that the
process PID which worked most has used meanwhile.
"""

from __future__ import annotations

import sys
import time

import httpx


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used; 0: it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: the clock of a process by its id
    except OSError:
        return 0.0


def main(url: str, key: str, *pids: str) -> None:
    servers = [int(pid) for pid in pids]
    body = {
        "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
        "max_tokens": 16, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=300, headers=headers) as client:
        while True:
            begin, used_s = time.monotonic(), [cpu_s(pid) for pid in servers]
            status = client.post("/v1/chat/completions", json=body).status_code
            most_s = max(cpu_s(pid) - before for pid, before in zip(servers, used_s, strict=True))
            print(begin, time.monotonic(), status, most_s, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
