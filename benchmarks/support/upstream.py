"""The upstream transfer engine and store as peers of our benchmarks: their environment, their
processes, and a network for them that holds nothing but the loopback.

They listen on all interfaces whatever they are told, so they are only ever run in such a network.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

VERSION = "0.3.13.post1"
HOME = Path(__file__).resolve().parents[2]
ENVIRONMENT = HOME / "build" / "upstream-transfer"
INSIDE = 'ip link set lo up && exec "$@"'


def make_environment() -> None:
    """Install upstream's wheel into an environment of its own, unless it is there.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if (ENVIRONMENT / ".ready").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    wheel = f"mooncake-transfer-engine-non-cuda=={VERSION}"
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "--quiet", "install"]
    subprocess.run([*pip, wheel, "numpy"], check=True)
    (ENVIRONMENT / ".ready").touch()


def is_alone() -> bool:
    """Return whether this process sees no network but the loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def prepare(name: str, argv: list[str]) -> str | None:  # noqa: RET503 (exec ends it)
    """Make upstream usable: may install it, and start benchmark `name` anew in a network that holds
    nothing but the loopback. Returns why it cannot be used, or None.
    """
    if is_alone():
        if (ENVIRONMENT / ".ready").exists():
            return None
        return f"{ENVIRONMENT} is missing, and there is no network here to make it"
    lonely = ["unshare", "--net", "--", "sh", "-c", INSIDE, "sh"]
    try:
        tried = subprocess.run([*lonely, "true"], check=False, capture_output=True, text=True)
        if tried.returncode:
            return f"no network namespace: {tried.stderr.strip() or tried.returncode}"
        make_environment()
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"its environment cannot be made: {error}"
    os.chdir(HOME)
    os.execvp(lonely[0], [*lonely, sys.executable, "-m", "benchmarks", name, *argv])


class UpstreamProcess:
    """One process of upstream's; `call` a method of what it holds. Leaving the context ends it."""

    def __init__(self, *member: Any) -> None:
        """Start with a kind of `upstream_peer` and its arguments.

        Raises:
            RuntimeError: this process sees a network, or upstream does not start.
        """
        if not is_alone():
            raise RuntimeError("upstream runs only where there is no network but the loopback")
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        python = ENVIRONMENT / "bin" / "python"
        script = Path(__file__).with_name("upstream_peer.py")
        self._process = subprocess.Popen(
            [str(python), "-I", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, "MC_LOG_LEVEL": "ERROR"},
        )
        self._ask(list(member))

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method there and return its answer. Raises RuntimeError when it failed."""
        return self._ask([method, *arguments])

    def _ask(self, question: list[Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            said = "".join(self._said.readlines()[-10:]).strip()
            raise RuntimeError(f"upstream failed at {question[0]}: {said}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._said.close()

    def __enter__(self) -> UpstreamProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
