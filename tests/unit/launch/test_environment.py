"""What stands in the environment, what this machine says of itself, who descends from whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from mooncake.base import ConfigError, Unavailable
from mooncake.launch import environment, machine_facts
from mooncake.launch.descendants import Descendants
from tests.support.pool_process import has_ipv6


def test_only_what_is_missing_is_set() -> None:
    wanted = {"A": "1", "B": "2"}
    assert environment.missing(wanted, {"A": "mine"}) == {"B": "2"}
    assert environment.missing(wanted, wanted) == {}


def test_threads_sleep_and_the_heap_is_kept() -> None:
    assert environment.COMPUTE["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment.COMPUTE["MALLOC_MMAP_MAX_"] == "0"
    assert environment.QUIET["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment.QUIET["HF_HUB_OFFLINE"] == "1"


def test_a_process_restarts_once_with_what_it_lacked() -> None:
    code = (
        "import os\n"
        "from mooncake.launch import environment\n"
        "first = os.environ.get('MALLOC_TOP_PAD_')\n"
        "environment.restart_with(os.environ)\n"
        "print(os.getpid(), first, os.environ['OMP_WAIT_POLICY'])\n"
    )
    clean = {
        name: value for name, value in os.environ.items() if name not in environment.COMPUTE
    } | {"OMP_WAIT_POLICY": "ACTIVE"}
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=clean, stdout=subprocess.PIPE, text=True
    )
    out, _ = child.communicate(timeout=60)
    pid, first, policy = out.split()
    assert int(pid) == child.pid
    assert first == environment.COMPUTE["MALLOC_TOP_PAD_"]
    assert policy == "ACTIVE", "what somebody set on purpose stays"


@pytest.mark.parametrize(
    ("device", "allowed", "seen"),
    [
        ("cpu", None, None), ("cuda", "3", None), ("cuda:2", None, "2"),
        ("cuda:1", "4, 5", "5"), ("cuda:0", "GPU-8a,GPU-9b", "GPU-8a"),
    ],
)  # fmt: skip
def test_a_process_of_one_gpu_sees_no_other(
    device: str, allowed: str | None, seen: str | None
) -> None:
    environ = {} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}
    wanted = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    assert environment.only_gpu(device, environ) == wanted


def test_a_gpu_that_may_not_be_seen_is_refused() -> None:
    with pytest.raises(ConfigError, match="device=cuda:2: CUDA_VISIBLE_DEVICES is '4,5'"):
        environment.only_gpu("cuda:2", {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_workers_on_this_machine_see_the_gpus_that_we_may_see() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "6,7", "HOME": "/"}
    both = {**environment.QUIET, **environment.COMPUTE}
    assert environment.of_worker(environ, here_only=False) == both
    assert environment.of_worker({}, here_only=True) == both
    seen = {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert environment.of_worker(environ, here_only=True) == both | seen


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.3.2.1", True),
        ("0.0.0.0", False), ("10.0.0.1", False), ("::", False), ("node-7", False),
    ],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert environment.is_loopback(host) is loopback


def test_this_machine_has_memory_cores_and_a_name() -> None:
    available = machine_facts.available_bytes()
    assert available is not None
    assert available > 0
    assert machine_facts.num_cores() >= 1
    assert machine_facts.host_name()
    assert machine_facts.boot_id() == machine_facts.boot_id()


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1",) * 2, ("::1", "[::1]")])
def test_the_address_that_a_peer_can_answer_to(host: str, written: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    assert machine_facts.address_towards(f"tcp://{written}:7000") == host


@pytest.mark.parametrize("address", ["tcp://nowhere.invalid:1", "tcp://127.0.0.1:http", "x"])
def test_no_way_to_a_peer(address: str) -> None:
    with pytest.raises(Unavailable, match="no way from here to"):
        machine_facts.address_towards(address)


def test_free_and_taken_ports() -> None:
    machine_facts.check_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            machine_facts.check_port("127.0.0.1", port)
    machine_facts.check_port("127.0.0.1", port)


SLEEPER = "import signal; signal.pause()"
PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)


def test_descendants_of_all_generations_are_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        with Descendants() as descendants:
            assert {parent.pid, grandchild} <= set(descendants.pids)
            parent.kill()
            parent.wait()
            assert grandchild in descendants.pids
            descendants.end(patience_s=0.0)
            descendants.end(patience_s=20.0)
            assert {parent.pid, grandchild}.isdisjoint(descendants.pids)


def test_who_ends_in_time_is_not_killed() -> None:
    code = "import sys; sys.stdin.read(); sys.exit(7)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        with Descendants() as descendants:
            child.communicate()
            descendants.end(patience_s=20.0)
        assert child.returncode == 7
        assert child.returncode != -signal.SIGKILL
