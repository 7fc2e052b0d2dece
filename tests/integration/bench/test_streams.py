"""The clients of `benchmarks pauses`, at a gateway that does not always answer."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections import Counter, defaultdict
from typing import ClassVar

from benchmarks.support.streams import NUM_TOKENS, words

NUM_CLIENTS = 2
WAYS = ("whole", "refused", "failed", "cut", "whole")
"""What becomes of the requests of each client in turn."""
CHUNK, DONE = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
ERROR = b'data: {"error": {}}\n\n'


class Gateway(http.server.BaseHTTPRequestHandler):
    """Answers each client in all ways."""

    num_asked: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["stream"], asked["max_tokens"]) == (True, NUM_TOKENS)
        with self.lock:
            way = WAYS[min(self.num_asked[asked["prompt"]], len(WAYS) - 1)]
            self.num_asked[asked["prompt"]] += 1
        self.send_response(503 if way == "refused" else 200)
        self.end_headers()
        if way != "refused":
            self.wfile.write(2 * CHUNK + {"whole": DONE, "failed": ERROR, "cut": b""}[way])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_tokens_and_ends_are_told_and_failures_are_tried_again() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with subprocess.Popen(words(url, NUM_CLIENTS), stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            seen, last_s = defaultdict[int, list[str]](list), defaultdict[int, float](float)
            for line in program.stdout:
                what, client, at_s = line.decode().split()
                assert float(at_s) >= last_s[int(client)]
                last_s[int(client)] = float(at_s)
                seen[int(client)].append(what)
                if min(len(seen[each]) for each in range(NUM_CLIENTS)) >= 12:
                    program.kill()
        server.shutdown()
    two = ["token", "token"]
    expected = [*two, "ended", "failed", *two, "failed", *two, "failed", *two]
    assert [seen[each][:12] for each in range(NUM_CLIENTS)] == [expected, expected]
