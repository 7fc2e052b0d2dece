"""Names among the addresses of gateways stand for all hosts that they name at the time."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from mooncake.rpc import seed_addresses
from mooncake.rpc.seed_addresses import SeedAddresses
from tests.support.waiting import wait_until

NAMED = "tcp://gateways:6400"


class NameServer(dict[str, list[str]]):
    """The addresses by name; a test may change them."""

    num_unknown = 0
    """How many look-ups found none."""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    found = NameServer()

    def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        if host not in found:
            found.num_unknown += 1
            raise socket.gaierror(host)
        return [(socket.AF_INET, 1, 6, "", (each, port)) for each in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(seed_addresses, "LOOK_UP_S", 0.01)
    return found


def look_ups() -> set[threading.Thread]:
    """Return the threads of this process that look names up."""
    return {each for each in threading.enumerate() if each.name == "seeds"}


def test_a_name_is_all_its_hosts_and_follows_them(hosts: NameServer) -> None:
    before = look_ups()
    with SeedAddresses(["tcp://10.0.0.1:6400", NAMED]) as seeds:
        assert list(seeds) == ["tcp://10.0.0.1:6400", NAMED], "it stays while nobody knows it"
        hosts["gateways"] = ["10.0.0.2", "10.0.0.1", "fd00::1"]
        met = ["tcp://10.0.0.1:6400", "tcp://10.0.0.2:6400", "tcp://[fd00::1]:6400"]
        wait_until(lambda: list(seeds) == met, "all hosts of the name")
        hosts["gateways"] = ["10.0.0.9"]  # all pods have been replaced
        now = ["tcp://10.0.0.1:6400", "tcp://10.0.0.9:6400"]
        wait_until(lambda: list(seeds) == now, "the new hosts alone")
        del hosts["gateways"]
        num_before = hosts.num_unknown
        wait_until(lambda: hosts.num_unknown > num_before + 1, "looked up again, in vain")
        assert list(seeds) == now, "an outage is no news"
        hosts["gateways"] = ["10.0.0.7"]
        wait_until(lambda: "tcp://10.0.0.7:6400" in seeds, "the host after the outage")
        own = look_ups() - before
        assert own
    wait_until(lambda: not own & look_ups(), "its thread ends")


def test_a_name_that_cannot_be_one_does_not_end_the_looking_up() -> None:
    with SeedAddresses(["tcp://gate..way:6400", "tcp://localhost:6400"]) as seeds:
        wait_until(lambda: "tcp://127.0.0.1:6400" in seeds, "the name that is one")
        assert "tcp://gate..way:6400" in seeds


def test_a_gateway_that_has_moved_is_one_of_them_until_it_moves_again() -> None:
    with SeedAddresses(["tcp://10.0.0.1:6400"]) as seeds:
        for address in ("tcp://10.0.0.2:1#ab", "tcp://10.0.0.2:2#cd"):
            seeds.move(address)
            assert list(seeds) == [seeds[0], seeds[1]] == ["tcp://10.0.0.1:6400", address]
            assert len(seeds) == 2


def test_addresses_without_names_need_no_thread(hosts: NameServer) -> None:
    given = ["tcp://10.0.0.1:6400", "tcp://[fd00::1]:6400", "tcp://node:7000#abcd"]
    before = look_ups()  # of other tests, which may still end
    with SeedAddresses(given) as seeds:
        assert list(seeds) == given
        assert look_ups() <= before
