"""Clients that stream answers from one gateway, one answer after another, and say when tokens come.
They are a program of its own of the standard library, which also runs on a host that is made of
namespaces.

    python streams.py URL NUMBER [CA]

Each line that it prints is what happened ("token", "ended" or "failed"), to which client, and when
(seconds of the machine's monotonic clock).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import ssl
import sys
import threading
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

NUM_TOKENS = 64
AGAIN_S = 0.1
SILENCE_S = 120.0
POLL_S, LOOK_S = 0.05, 1.0


def words(url: str, number: int, authority: str = "") -> list[str]:
    """Return the command of so many clients of a gateway. `authority`: the file of the certificate
    that signed the gateway's; empty: it speaks HTTP.
    """
    return [sys.executable, "-c", Path(__file__).read_text(), url, str(number), authority]


class Streams:
    """What such clients have said by now."""

    def __init__(self, log: Path, number: int) -> None:
        self._log = log
        self._number = number
        self._num_read = 0
        self._at_s: dict[tuple[str, int], list[float]] = defaultdict(list)

    def go_on(self, count: int, limit_s: float, holds: Callable[[], bool] = lambda: True) -> bool:
        """Wait until each client has had so many more answers and something holds; return whether
        that is so in time.
        """
        self._read()
        wanted = [len(times) + count for times in self._of("ended")]
        now_s = time.monotonic()
        end_s, look_s, held = now_s + limit_s, now_s, False
        while (now_s := time.monotonic()) < end_s:
            if not held and now_s >= look_s:
                held, look_s = holds(), now_s + LOOK_S
            self._read()
            ended = zip(self._of("ended"), wanted, strict=True)
            if held and all(len(times) >= number for times, number in ended):
                return True
            time.sleep(POLL_S)
        return False

    def pause_s(self, begin_s: float, end_s: float) -> float:
        """Return the longest time without a token of a client that ends in this span."""
        self._read()
        return max(_longest(times, begin_s, end_s) for times in self._of("token"))

    def num_failed(self, begin_s: float) -> int:
        """Return how many requests were refused or broke off since then."""
        self._read()
        return sum(at_s > begin_s for times in self._of("failed") for at_s in times)

    def _of(self, what: str) -> list[list[float]]:
        return [self._at_s[what, client] for client in range(self._number)]

    def _read(self) -> None:
        with self._log.open("rb") as file:
            file.seek(self._num_read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._num_read += len(line)
                what, client, at_s = line.split()
                self._at_s[what.decode(), int(client)].append(float(at_s))


def _longest(times: list[float], begin_s: float, end_s: float) -> float:
    seen = [at_s for at_s in times if at_s <= end_s]
    pairs = itertools.pairwise([*seen, end_s])
    return max((late - early for early, late in pairs if late > begin_s), default=end_s - begin_s)


def _clients(url: str, number: int, authority: str) -> None:
    context = ssl.create_default_context(cafile=authority) if authority else None
    lock = threading.Lock()

    def stream(client: int) -> None:
        def say(what: str) -> None:
            with lock:
                print(what, client, time.monotonic(), flush=True)

        while True:
            good = False
            with contextlib.suppress(OSError, http.client.HTTPException):
                for line in _answer(url, client, context):
                    if line.startswith(b"data: [DONE]"):
                        good = True
                    elif line.startswith(b'data: {"error"'):
                        break
                    elif line.startswith(b"data: "):
                        say("token")
            say("ended" if good else "failed")
            if not good:
                time.sleep(AGAIN_S)

    for client in range(number):
        threading.Thread(target=stream, args=(client,)).start()


def _answer(url: str, client: int, context: ssl.SSLContext | None) -> Iterator[bytes]:
    """Yield the lines of an answer; none, where the request is refused."""
    address = urllib.parse.urlsplit(url)
    place = (str(address.hostname), address.port)
    if context is None:
        connection = http.client.HTTPConnection(*place, timeout=SILENCE_S)
    else:
        connection = http.client.HTTPSConnection(*place, timeout=SILENCE_S, context=context)
    body = {
        "prompt": f"Story {client}: once upon a time there was a moon. " * 10, "temperature": 0,
        "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status == 200:
            yield from reply


if __name__ == "__main__":
    _clients(sys.argv[1], int(sys.argv[2]), sys.argv[3])
