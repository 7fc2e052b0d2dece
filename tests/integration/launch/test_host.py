"""Processes that start again or end their descendants, addresses and ports of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from mooncake.base import ConfigError, Unavailable
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.processes.descendants import Descendants
from tests.support.kvstore.pool_process import has_ipv6
from tests.support.ports import free_port
from tests.support.waiting import LONG_S


def test_a_process_restarts_once_with_what_it_lacked() -> None:
    code = (
        "import os\n"
        "from mooncake.launch.host import environment\n"
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
    out, _ = child.communicate(timeout=LONG_S)
    pid, first, policy = out.split()
    assert int(pid) == child.pid
    assert first == environment.COMPUTE["MALLOC_TOP_PAD_"]
    assert policy == "ACTIVE", "what somebody set on purpose stays"


def test_a_pool_node_starts_without_what_others_need() -> None:
    code = (
        "import sys, mooncake.cli.serve\n"
        "from mooncake.launch.cluster import pool, serve\n"
        "heavy = {'pydantic', 'ray', 'starlette', 'torch', 'transformers', 'uvicorn'}\n"
        "print(heavy & {*sys.modules})"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1",) * 2, ("::1", "[::1]")])
def test_the_address_that_a_peer_can_answer_to(host: str, written: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    assert machine_facts.address_towards(f"tcp://{written}:7000") == host


@pytest.mark.parametrize("address", ["tcp://nowhere.invalid:1", "tcp://127.0.0.1:http", "x"])
def test_no_way_to_a_peer(address: str) -> None:
    with pytest.raises(Unavailable, match="has no route to"):
        machine_facts.address_towards(address)


def test_free_and_taken_ports() -> None:
    machine_facts.check_port("127.0.0.1", 0)
    port = free_port()
    taken = f"cannot listen on 127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=taken):
        machine_facts.check_port("127.0.0.1", port)
    machine_facts.check_port("127.0.0.1", port)


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
            descendants.end(timeout_s=0.0)
            descendants.end(timeout_s=LONG_S)
            assert {parent.pid, grandchild}.isdisjoint(descendants.pids)


def test_a_process_that_ends_in_time_is_not_killed() -> None:
    code = "import sys; sys.stdin.read(); sys.exit(7)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        with Descendants() as descendants:
            child.communicate()
            descendants.end(timeout_s=LONG_S)
        assert child.returncode == 7
        assert child.returncode != -signal.SIGKILL
