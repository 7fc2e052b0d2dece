"""A second process with a transfer engine, told what to do over its standard input.

Not a test: `PeerProcess` is what the tests hold, the module itself runs in the other process.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base.kv_layout import SegmentRef

ROOT = Path(__file__).parents[3]


class PeerProcess:
    """One child process; `stop` ends it whatever state it is in."""

    def __init__(
        self, protocols: list[str], *, secret: str = "secret", engine_id: str = "peer"
    ) -> None:
        settings = json.dumps({"protocols": protocols, "secret": secret, "engine_id": engine_id})
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.transfer.peer_process", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.segment = msgspec.convert(self.ask(verb="segment"), SegmentRef)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, **command: Any) -> Any:
        """Have the child do something and return its answer."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, f"the peer process died on {command}"
        return json.loads(line)

    def allocate(self, num_bytes: int) -> int:
        """Return the id of new memory of the child."""
        region: int = self.ask(verb="allocate", num_bytes=num_bytes)
        return region

    def put(self, region: int, offset: int, data: bytes) -> None:
        """Write the child's memory from within."""
        text = base64.b64encode(data).decode()
        self.ask(verb="put", region=region, offset=offset, data=text)

    def get(self, region: int, offset: int, num_bytes: int) -> bytes:
        """Read the child's memory from within."""
        answer = self.ask(verb="get", region=region, offset=offset, num_bytes=num_bytes)
        return base64.b64decode(answer)

    def digest(self, region: int) -> str:
        """Return the digest of a whole region of the child."""
        text: str = self.ask(verb="digest", region=region)
        return text

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._child.pid, number)

    def pause(self) -> None:
        """Stop the child's threads; returns when they stand still."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused child go on."""
        self.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the child and wait for it."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def digest_of(data: bytes | memoryview) -> str:
    """Return what `PeerProcess.digest` returns for the same bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Server:
    """The child's side."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import logging

        from mooncake.base.clock import MonotonicClock
        from mooncake.transfer.factory import TransferConfig, open_transfer

        self.log: list[str] = []
        keeper = logging.Handler()
        keeper.emit = lambda record: self.log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mooncake").addHandler(keeper)
        config = TransferConfig(
            secret=settings["secret"], host="host", protocols=settings["protocols"]
        )
        self.transfer = open_transfer(config, settings["engine_id"], MonotonicClock())
        self.regions: dict[int, Any] = {}
        self.heard: list[tuple[str, str]] = []

    def handle(self, command: dict[str, Any]) -> Any:
        verb = command["verb"]
        if verb == "segment":
            return msgspec.to_builtins(self.transfer.segment)
        if verb == "log":
            return self.log
        if verb == "heard":
            self.hear()
            heard, self.heard = self.heard, []
            return heard
        if verb == "allocate":
            region = self.transfer.allocate(command["num_bytes"], "peer memory")
        elif verb == "register":
            region = self.transfer.register(memoryview(bytearray(command["num_bytes"])), "plain")
        else:
            return self.touch(verb, command)
        self.regions[region.region_id] = region
        return region.region_id

    def hear(self) -> None:
        self.transfer.poll()
        for notice in self.transfer.take_notices():
            self.heard.append((notice.engine_id, notice.payload.decode()))

    def touch(self, verb: str, command: dict[str, Any]) -> Any:
        region = self.regions[command["region"]]
        if verb == "unregister":
            self.transfer.unregister(region)
            return None
        if verb == "hear":
            while not self.heard:
                select.select([self.transfer], [], [])
                self.hear()
            return region.buffer[0], region.buffer[-1]
        if verb == "digest":
            return digest_of(region.buffer)
        start = command["offset"]
        if verb == "get":
            return base64.b64encode(region.buffer[start : start + command["num_bytes"]]).decode()
        data = base64.b64decode(command["data"])
        region.buffer[start : start + len(data)] = data
        return None


def main() -> None:
    """Serve commands until the input ends."""
    server = _Server(json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(server.handle(json.loads(line))), flush=True)
    server.transfer.close()


if __name__ == "__main__":
    main()
