"""`mooncake serve` as a process of its own, as a person would run it: started, asked, signalled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mooncake.launch.host.processes.descendants import Descendants
from tests.support.serve import forked_program
from tests.support.waiting import LONG_S

START_S = 240.0
STOP_S = 240.0
POLL_S = 0.05
ASK_S = 0.2
"""Between two questions to a server, which take it some milliseconds of computing each."""


class ServerProcess:
    """A server on a free port. Use as a context: leaving it sends SIGINT and waits."""

    def __init__(
        self, *words: str, module: str | None = None, cwd: Path | None = None, forked: bool = True
    ) -> None:
        """Run `serve` with these words, in the directory `cwd`; `module` stands in for the
        command's own. `forked`: see `forked_program`; where it is False, or a module is given, a
        new interpreter starts.
        """
        self.lines: list[str] = []
        self.url = ""
        self._output, output = os.pipe()
        try:
            if module is None and forked:
                self.process = forked_program.start(["serve", *words], os.environ, output, cwd)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module or "mooncake.cli.main", "serve", *words],
                    stdout=output, stderr=output, cwd=cwd, start_new_session=True, text=True,
                )  # fmt: skip
        finally:
            os.close(output)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with open(self._output, errors="replace") as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = START_S, *, number: int = 1) -> re.Match[str]:
        """Wait until so many lines of the output match; return the last match."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            matches = [each for line in list(self.lines) if (each := re.search(pattern, line))]
            if len(matches) >= number:
                return matches[number - 1]
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(POLL_S)
        raise AssertionError(f"never said {pattern!r}; output:\n{self.output}")

    def wait_until_serving(self) -> None:
        """Wait for the line that names the address."""
        self.url = self.wait_for(r"on (http://\S+)/v1").group(1)

    def text(self, path: str) -> str:
        """Return what is at `path`."""
        with urllib.request.urlopen(self.url + path, timeout=LONG_S) as response:
            return str(response.read().decode())

    def get(self, path: str) -> Any:
        """Return the JSON document at `path`."""
        return json.loads(self.text(path))

    def post(self, path: str, body: dict[str, Any], seconds: float = LONG_S) -> Any:
        """Post `body` and return the JSON that comes back."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> list[int]:
        """Return the greedy continuation of `prompt` as token ids."""
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        reply = self.post("/v1/completions", body)
        return list(reply["choices"][0]["token_ids"])

    def worker_pids(self) -> dict[str, int]:
        """Return the pids of the workers the gateway knows, by id."""
        workers = self.get("/v1/cluster/status")["workers"]
        return {worker["id"]: worker["pid"] for worker in workers}

    def wait_for_workers(self, ids: set[str], *, without: Sequence[int] = ()) -> dict[str, int]:
        """Wait until just these workers are known, none of them with an old pid."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            pids = self.worker_pids()
            if set(pids) == ids and not set(pids.values()) & set(without):
                return pids
            time.sleep(ASK_S)
        raise AssertionError(f"workers are {pids}, not {ids}; output:\n{self.output}")

    def stop(self, number: int = signal.SIGINT) -> tuple[int, list[int]]:
        """Send a signal to the server, wait; return its exit code and which descendants live."""
        with Descendants(self.process.pid) as descendants:
            os.kill(self.process.pid, number)
            code = self.process.wait(STOP_S)
            self._reader.join(STOP_S)
            return code, descendants.pids

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            with Descendants(self.process.pid) as descendants:
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(STOP_S)
                finally:
                    self.process.kill()
                    descendants.end(5.0)
        self.process.wait()
        self._reader.join(STOP_S)


def nano_checkpoint(directory: Path) -> Path:
    """Write the smallest preset and return its directory."""
    from mooncake.model.checkpoint.making.presets import init_checkpoint

    return init_checkpoint("k2-nano", 0, directory / "k2-nano")
