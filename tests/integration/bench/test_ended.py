"""A benchmark that gets SIGTERM ends the servers that it has started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import LONG_S

pytestmark = pytest.mark.timeout(120)

WELL = """
import http.server, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Well).serve_forever()
"""
"""A server of which a benchmark learns that it is up."""
BENCHMARK = f"""
import runpy, signal, sys
from benchmarks import pauses
from benchmarks.support.servers import Layout, running

def main(argv):
    with running(Layout(name="well", command=(sys.executable, "-c", {WELL!r}))) as server:
        print(server.pid, flush=True)
        signal.pause()

pauses.main = main
sys.argv[1:] = ["pauses"]
runpy.run_module("benchmarks", run_name="__main__")
"""


def test_servers_end_with_a_benchmark_that_is_told_to_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        server = os.pidfd_open(pid)
        try:
            benchmark.terminate()
            assert benchmark.wait(LONG_S)
            assert select.select([server], [], [], 0)[0], "the server runs on"
        finally:
            if not select.select([server], [], [], 0)[0]:
                signal.pidfd_send_signal(server, signal.SIGKILL)
            os.close(server)
