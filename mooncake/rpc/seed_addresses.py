"""Addresses at which gateways may be found, some with a name that stands for several hosts.

Owns the thread that looks names up. A name keeps its last address while no name server answers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import overload

LOOK_UP_S = 2.0
"""Seconds between two look-ups of the names."""


class SeedAddresses(Sequence[str]):
    """Resolves "tcp://HOST:PORT" addresses again and again: a name is replaced by all its
    addresses, and stays as it is until it has one. Use it as a context, or close it.
    """

    def __init__(self, given: Sequence[str]) -> None:
        """Start a thread that looks names up, if there is a name in `given`."""
        self._given = list(given)
        self._now = list(given)
        self._moved: list[str] = []
        self._stop = threading.Event()
        if any(_name_in(each) for each in given):
            thread = threading.Thread(target=self._look_up_again, name="seeds", daemon=True)
            thread.start()

    def close(self) -> None:
        """Stop looking names up."""
        self._stop.set()

    def move(self, address: str) -> None:
        """Count the address of a gateway that has moved, in place of the one that an earlier call
        named. Any thread may call this.
        """
        self._moved = [address]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._now, *self._moved])

    def __len__(self) -> int:
        return len(self._now) + len(self._moved)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return [*self._now, *self._moved][index]

    def __enter__(self) -> SeedAddresses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_up_again(self) -> None:
        meant = {each: [each] for each in self._given}
        while not self._stop.is_set():
            for each in self._given:
                meant[each] = _meant(each) or meant[each]
            found = [address for each in self._given for address in meant[each]]
            self._now = list(dict.fromkeys(found))
            self._stop.wait(LOOK_UP_S)


def _name_in(address: str) -> str:
    """Return the host of an address if the host is a name that may stand for several hosts. Return
    "" if it is a number, or if the address has a key and so belongs to one process.
    """
    host, _, _ = address.removeprefix("tcp://").rpartition(":")
    if "#" in address or host.startswith("[") or host.replace(".", "").isdigit():
        return ""
    return host


def _meant(address: str) -> list[str]:
    """Return all addresses that an address stands for now; an empty result means that its name
    cannot be looked up.
    """
    if not (name := _name_in(address)):
        return [address]
    port = address.rpartition(":")[2]
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: no name server could know such a name
        return []
    hosts = sorted({str(place[0]) for *_, place in found})
    return [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts]
