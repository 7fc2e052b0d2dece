"""Asks gateways for answers at random moments, whether or not earlier ones have come: a program of
its own, which runs on a host with the standard library alone.

    python load.py PLAN

PLAN is a file of JSON. A try that hears nothing for its `silence_s` is given up, and while `most`
answers are still to come nothing more is asked. Lines of JSON on stdout say what the gateways know,
and how each answer came about, with all tries that it took. The share `leaves` of those who get a
stream hangs up in the middle of it. SIGUSR1 begins the asking, the first
SIGTERM ends it, and the second one the program, once all answers have come.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any

CONNECT_S = 5.0
GIVE_UP_S = 400.0
"""A request that has no answer by then has none."""
AGAIN_S = 0.5
PAUSE_S = 0.5
"""Shorter times without a token are not noted."""
LOOK_S = 2.0
UNHEARD_S = 5.0
"""A worker that a gateway has not heard for so long does not count as up."""
REFUSALS = (429, 503)


class Away(Exception):
    """No gateway takes connections there now."""


class Load:
    """Draws requests and notes what comes of them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._tls = ssl.create_default_context(cafile=plan["ca"])
        self._lock = threading.Lock()
        self._running = 0
        self._ends = 0
        self._begins = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._begins.set())
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, *_: object) -> None:
        self._ends += 1

    def run(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()
        while not self._begins.wait(0.1):
            pass
        number, due_s = 0, time.monotonic()
        while self._ends < 2 or self._running:
            if self._ends:
                time.sleep(0.1)
                continue
            chance = random.Random(f"{self._plan['seed']} {number}")
            due_s += chance.expovariate(self._plan["rate"])
            while not self._ends and (left_s := due_s - time.monotonic()) > 0:
                time.sleep(min(left_s, 0.1))
            with self._lock:
                full = self._running >= self._plan["most"]
                self._running += not full
            if full:
                self._say({"not_sent": number})
            else:
                self._say({"asked": number})
                threading.Thread(target=self._answer, args=(number, chance), daemon=True).start()
            number += 1

    def _say(self, told: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(told), flush=True)

    def _answer(self, number: int, chance: random.Random) -> None:
        """Ask for one answer until it has come whole, with one key at one gateway after another."""
        prompts, began_s = self._plan["prompts"], time.time()
        prompt, at = chance.randrange(len(prompts)), chance.randrange(len(self._plan["hosts"]))
        body = {
            "prompt": prompts[prompt],
            "max_tokens": chance.choice(self._plan["lengths"]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": chance.random() < 0.7,
        }
        leaves = body["stream"] and chance.random() < self._plan.get("leaves", 0.0)  # fmt: skip
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        tries: list[dict[str, Any]] = []
        times: list[float] = []
        while time.time() < began_s + GIVE_UP_S:
            where = self._plan["hosts"][(at + len(tries)) % len(self._plan["hosts"])]
            key, one = f"soak-{self._plan['seed']}-{number}", {"host": where, "from_s": time.time()}
            tries.append(one)
            try:
                one |= self._ask(where, key, body, one, times, leaves)
            except Away as error:
                one |= {"how": "away", "why": repr(error.__cause__)}
            except TimeoutError:
                one |= {"how": "silent"}
            except (OSError, http.client.HTTPException) as error:
                one |= {"how": "cut", "why": repr(error)}
            one["to_s"] = time.time()
            if one["how"] not in ("away", "silent", "cut", "refused"):
                break
            time.sleep(AGAIN_S)
        pairs = itertools.pairwise(times)
        pauses = [(before, after - before) for before, after in pairs if after - before > PAUSE_S]
        told = {"prompt": prompt, "length": body["max_tokens"], "stream": body["stream"]}
        with self._lock:
            self._running -= 1
        self._say({"answer": number, **told, "tries": tries, "pauses": pauses})

    def _connect(self, host: str) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection(host, self._plan["port"])
        try:
            plain = socket.create_connection((host, self._plan["port"]), CONNECT_S)
            # It may have little of a busy machine: who gives up early gives it more to do.
            plain.settimeout(self._plan["silence_s"])
            connection.sock = self._tls.wrap_socket(plain, server_hostname=host)
        except OSError as error:
            raise Away from error
        return connection

    def _ask(
        self, host: str, key: str, body: dict[str, Any], one: dict[str, Any], times: list[float],
        leaves: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Ask a gateway; note its tokens in `one` as they come, and when new ones came in `times`.
        A client that `leaves` closes the connection at the first tokens. Return how it ended.
        """
        connection = self._connect(host)
        try:
            headers = {"Content-Type": "application/json", "Idempotency-Key": key}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                how = "refused" if reply.status in REFUSALS else "failed"
                return {"how": how, "why": f"{reply.status} {reply.read().decode()[:500]}"}
            one["ids"] = ids = list[int]()
            one["ends"] = ends = list[str]()
            if not body["stream"]:
                said = json.loads(reply.read())
                [choice], one["usage"] = said["choices"], said["usage"]
                ids += choice["token_ids"]
                ends.append(choice["finish_reason"])
                return {"how": "whole"}
            num_done = 0
            while line := reply.readline().decode():
                if line.startswith("data: [DONE]"):
                    num_done += 1
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return {"how": "failed", "why": line[:500]}
                    for choice in chunk["choices"]:
                        ids += choice.get("token_ids") or []
                        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                    times += [time.time()] * (len(ids) - len(times))
                    if leaves and ids:
                        return {"how": "left"}
                    one["usage"] = chunk.get("usage") or one.get("usage")
                    one["after_done"] = one.get("after_done", 0) + num_done
            if not num_done:
                return {"how": "cut", "why": "the stream ended without its last event"}
            one["num_done"] = num_done
            return {"how": "whole"}
        finally:
            connection.close()

    def _look(self) -> None:
        """Say again and again what each gateway knows; null where one does not answer."""
        while True:
            told = {host: self._status(host) for host in self._plan["hosts"]}
            self._say({"at_s": time.time(), "running": self._running, "status": told})
            time.sleep(LOOK_S)

    def _status(self, host: str) -> dict[str, Any] | None:
        try:
            connection = self._connect(host)
            try:
                assert connection.sock is not None
                connection.sock.settimeout(CONNECT_S)
                connection.request("GET", "/v1/cluster/status")
                return summary(json.loads(connection.getresponse().read()))
            finally:
                connection.close()
        except (Away, OSError, http.client.HTTPException, ValueError, KeyError):
            return None


def summary(status: dict[str, Any]) -> dict[str, Any]:
    """Return who is up, and what is held for requests."""
    workers = [
        each for each in status["workers"] if each["state"] == "up" and each["silent_s"] < UNHEARD_S
    ]
    gateways = [each for each in status["gateways"] if each["state"] == "up"]
    held = status["load"]["num_inflight"] + sum(each["num_inflight"] for each in gateways)
    for each in workers:
        load = each["load"] or {}
        cached = load.get("num_cached_blocks", 0) if each["role"] == "kvstore" else 0
        held += load.get("num_total_blocks", 0) - load.get("num_free_blocks", 0) - cached
    up = [f"{each['role']}@{each['node_id']}" for each in workers]
    return {"up": sorted(up), "gateways": len(gateways), "held": held}


if __name__ == "__main__":
    Load(json.loads(Path(sys.argv[1]).read_text())).run()
