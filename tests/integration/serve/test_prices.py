"""What a field may cost others: every field of every POST route at its dearest legal value, and the
dearest pairs, against a live server that a second tenant uses meanwhile. A field that routes take
in the same words is walked on each with `make test-prices`, otherwise on one of them.

Of each row: no piece of work holds the gateway's loop for over 100 ms, and the other tenant's
median request takes at most 10 s; on a machine that is slow just then, as many times longer as
fixed work takes there. A row fails if each of five tries is too dear, so other work of the machine
passes. What is dear only the first time does not: no two bodies are alike. Of most rows
the other tenant's requests take at most three times what they take beside nothing, as measured just
before; with `MOONCAKE_TEST_QUIET=1`, for a machine without other work, that holds for each row. At
the end no process has grown by more than 300 MiB, no request runs or waits, and as many blocks are
free as before. `-s` prints how many times as long the other tenant's requests took.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import mooncake
from tests.support.api.dearest import DEAR, ROUTES, Route, rows_of_routes, varied
from tests.support.examples import tries_all
from tests.support.serve.server_process import ServerProcess
from tests.support.slowness import slowness
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MODEL = Path(mooncake.__file__).parent / "k2-demo"
KEYS = """keys:
  - {name: foe, key: sk-foe, priorities: [premium, interactive, batch]}
  - {name: other, key: sk-other}
  - {name: boss, key: sk-boss, operator: true}
"""
LEAVES_S = 0.5
"""The client of a row leaves after so long: what is not done then is aborted."""
REST_S = 30.0
TRIES = 5
MOST_TIMES = 3.0
MOST_S = 10.0
IS_QUIET = os.environ.get("MOONCAKE_TEST_QUIET") == "1"
NUM_QUIET = 9
"""Requests of the other tenant of which the quiet latency is the median."""
MOST_HELD_S = 0.1
MOST_GROWN = 300 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PAIRS = (
    (CHAT, "top_logprobs", "return_tokens_as_token_ids"),
    (CHAT, "top_logprobs", "bad_words"),
    (CHAT, "stream_options", "top_logprobs"),
    (CHAT, "documents", "bad_words"),
    (CHAT, "truncate_prompt_tokens", "response_format"),
    (CHAT, "allowed_token_ids", "logit_bias"),
    (COMPLETIONS, "prompt_logprobs", "return_token_ids"),
    (COMPLETIONS, "prompt", "seed"),
    (COMPLETIONS, "logit_bias", "stop"),
    (COMPLETIONS, "n", "logprobs"),
)


class Other:
    """The second tenant: its requests' begins and ends."""

    def __init__(self, url: str) -> None:
        words = [sys.executable, "-m", "tests.support.serve.timed_client", url, "sk-other"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._times: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._quiet: deque[tuple[float, float]] = deque(maxlen=NUM_QUIET)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            begin, end, status = line.split()
            if status != "200":
                self.failures.append(status)
            self._times.append((float(begin), float(end)))

    def _wait(self) -> None:
        assert self.process.poll() is None, "the other tenant's client has ended"
        time.sleep(0.005)

    def leave(self) -> None:
        """End it in the middle of a request."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def took_s(self, begin: float, end: float) -> float:
        """Return the median time of requests that ran between; waits for one that still does."""
        limit = time.monotonic() + REST_S
        while True:
            ended = [one for one in self._times if one[1] > begin and one[0] < end]
            if ended and (ended[-1][1] >= end or time.monotonic() > limit):
                return median_s(ended)
            self._wait()

    def quiet_s(self, num: int) -> float:
        """Return the median time of the last requests beside nothing, `num` new ones among them."""
        seen = len(self._times)
        while len(self._times) < seen + num + 1:  # one has begun before
            self._wait()
        self._quiet += self._times[seen + 1 :]
        return median_s(self._quiet)


def median_s(times: Iterable[tuple[float, float]]) -> float:
    return statistics.median(end - begin for begin, end in times)


def hang_up(connection: socket.socket) -> None:
    """End what a connection waits for; the server may have closed it before."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def value_of(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of a series."""
    total = 0.0
    for found in re.finditer(rf"^mooncake:{name}(?:{{(.*)}})? (\S+)$", metrics, re.MULTILINE):
        has = dict(re.findall(r'(\w+)="([^"]*)"', found[1] or ""))
        if all(has.get(label) == value for label, value in labels.items()):
            total += float(found[2])
    return total


class Walk:
    """A live server and what is measured of it."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self._root = psutil.Process(server.process.pid)
        self._processes = [self._root, *self._root.children(recursive=True)]
        self.other = Other(server.url)
        self._num_sent = 0
        self.times: dict[str, float] = {}
        """Of each row the least of how many times as long the other tenant's requests took."""
        self._boss = httpx.Client(
            base_url=server.url, timeout=60, headers={"authorization": "Bearer sk-boss"}
        )
        self.other.quiet_s(NUM_QUIET)
        self._rss = self.rss()
        self.rest = self.free_blocks()
        assert self.rest > 0

    def close(self) -> None:
        self.other.leave()
        self._boss.close()

    def rss(self) -> dict[int, int]:
        return {each.pid: each.memory_info().rss for each in self._processes}

    def grown(self) -> int:
        """Return by how much the process that has grown most has grown."""
        return max(now - self._rss[pid] for pid, now in self.rss().items())

    def metrics(self) -> str:
        return self._boss.get("/metrics").raise_for_status().text

    def long_holds(self) -> dict[float, float]:
        """Return how many holds of the loop were longer than each time of which the server counts
        them.
        """
        name, text = "event_loop_held_seconds", self.metrics()
        times = set(re.findall(rf'{name}_bucket{{.*le="([0-9.]+)"', text))
        num = value_of(text, f"{name}_count")
        return {float(each): num - value_of(text, f"{name}_bucket", le=each) for each in times}

    def free_blocks(self) -> float:
        return value_of(self.metrics(), "worker_free_blocks")

    def send(self, path: str, body: bytes) -> int | None:
        """Return the status; None: the client has left."""
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.connect()
        leaving = threading.Timer(LEAVES_S, hang_up, [connection.sock])
        headers = {"Authorization": "Bearer sk-foe", "Content-Type": "application/json"}
        try:
            connection.request("POST", path, body, headers)
            leaving.start()
            reply = connection.getresponse()
            reply.read()
            return reply.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            leaving.cancel()
            connection.close()

    def row(
        self, path: str, name: str, body: Mapping[str, Any], right: int, turn: int
    ) -> list[str]:
        """Send a row; return in what it was too dear, [] = in nothing."""
        self._num_sent += 1
        text = varied(path, body, self._num_sent)
        holds = self.long_holds()
        quiet_s = self.other.quiet_s(NUM_QUIET if turn else 1)  # after the look at all metrics
        begin = time.monotonic()
        status = self.send(path, text)
        took_s = self.other.took_s(begin, time.monotonic())
        times, found = took_s / quiet_s, list[str]()
        where = f"{path} {name}"
        self.times[where] = min(times, self.times.get(where, times))
        if status not in (None, right):
            found.append(f"status {status}")
        more = {each: num - holds.get(each, 0) for each, num in self.long_holds().items()}
        is_dear = took_s > MOST_S or any(num for each, num in more.items() if each >= MOST_HELD_S)
        slow = slowness() if is_dear else 1.0  # it computes for long itself
        if took_s > MOST_S * slow or (IS_QUIET and times > MOST_TIMES):
            found.append(f"the other tenant's requests take {took_s:.1f} s")
        held_s = min(each for each in more if each >= MOST_HELD_S * slow)
        if more[held_s] > 0:
            found.append(f"{more[held_s]:.0f} holds of the loop over {held_s} s")
        print(f"{where}: {status}, the other {times:.1f} times as long", *found)
        return found

    def at_rest(self) -> bool:
        """Whether no request runs or waits any more, and as many blocks are free as before."""
        text = self.metrics()
        busy = value_of(text, "num_requests_running") + value_of(text, "num_requests_waiting")
        return busy == 0 and value_of(text, "worker_free_blocks") >= self.rest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    words = (
        "--port", "0", "--colocated", "--api-keys-file", str(keys),
        "--kv-cache-memory-bytes", "64MiB", "--kvstore-dram-bytes", "32MiB",
    )  # fmt: skip
    with ServerProcess(str(MODEL), *words, forked=False) as server:
        server.wait_until_serving()
        yield server


@pytest.fixture
def walk(server: ServerProcess) -> Iterator[Walk]:
    walk = Walk(server)
    try:
        yield walk
    finally:
        walk.close()


def rows() -> Iterator[tuple[str, str, Mapping[str, Any], int]]:
    """Yield each row's path, name and body, and the status of its answer."""
    for name, (status, path, body) in DEAR.items():
        yield path, name, body, status
    for path, name in rows_of_routes(each=tries_all()):
        yield path, name, ROUTES[path].dearest(name), 200
    for path, one, two in PAIRS:
        route: Route = ROUTES[path]
        yield (
            path,
            f"{one}, {two}",
            {**route.dearest(two), **route.dearest(one)}
            | {name: route.fields[name].value for name in (one, two)},
            200,
        )


@pytest.mark.alone  # it measures
def test_no_field_costs_others_more_than_its_bound(walk: Walk) -> None:
    dear: dict[str, list[str]] = {}
    for path, name, body, status in rows():
        for turn in range(TRIES):
            found = walk.row(path, name, body, status, turn)
            if not found:
                break
        else:
            dear[f"{path} {name}"] = found
    assert not dear, "\n".join(f"{where}: {', '.join(what)}" for where, what in dear.items())
    assert value_of(walk.metrics(), "event_loop_held_seconds_count") > 0, "holds are not measured"
    assert walk.grown() <= MOST_GROWN
    walk.other.leave()
    wait_until(walk.at_rest, "no request runs or waits, and as many blocks are free as before")
    assert walk.other.failures == []
    assert statistics.median(walk.times.values()) <= MOST_TIMES


def test_more_than_a_bound_is_refused_by_name(server: ServerProcess) -> None:
    headers = {"authorization": "Bearer sk-foe"}
    wrong: list[str] = []
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        for path, route in ROUTES.items():
            for name in route.fields:
                if (more := route.above(name)) is None:
                    continue
                body, named = more
                reply = client.post(path, json=body)
                text = reply.text
                if reply.status_code != 400 or named not in text:
                    wrong.append(f"{path} {name}: {reply.status_code} {text[:200]}")
    assert not wrong, "\n".join(wrong)
