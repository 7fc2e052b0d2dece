"""A client that asks the same short question again and again and prints when, in a process of its
own: `python -m tests.support.serve.timed_client URL KEY`. Lines: begin and end on the monotonic
clock, which processes of one machine share, and the status.
"""

from __future__ import annotations

import sys
import time

import httpx


def main(url: str, key: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
        "max_tokens": 16, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=300, headers=headers) as client:
        while True:
            begin = time.monotonic()
            status = client.post("/v1/chat/completions", json=body).status_code
            print(begin, time.monotonic(), status, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
