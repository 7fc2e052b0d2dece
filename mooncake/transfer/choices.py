"""Which protocols, and which protection, the words of a configuration stand for on this machine.

This module imports no protocol, because processes that move no bytes choose, too.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from mooncake.base.errors import ConfigError
from mooncake.transfer.net.endpoint import PROTECTIONS, Protection
from mooncake.transfer.rdma.verbs import has_pyverbs
from mooncake.transfer.topology import has_rdma_devices

PROTOCOLS = ("inproc", "shm", "rdma", "tcp")
"""All protocols, in the order in which they are tried."""

AUTO = "auto"
"""Stands for all protocols that work on this machine, and for the usual protection."""


def usable_protocols() -> tuple[str, ...]:
    """Return the protocols that work on this machine: RDMA needs a device and pyverbs."""
    has_rdma = has_rdma_devices() and has_pyverbs()
    return tuple(name for name in PROTOCOLS if name != "rdma" or has_rdma)


def choose_protocols(names: Sequence[str], protection: str = AUTO) -> tuple[str, ...]:
    """Return the protocols between processes that `names` stand for here, in the order in which
    they are tried.

    A protocol that is named is used, or fails later. "auto" leaves out protocols that do not work
    here or do not give the `protection`. Raises ConfigError when a named protocol does not give it.
    """
    usable = set(usable_protocols()) if AUTO in names else set()
    if protection == Protection.ENCRYPT.value:
        usable.discard("rdma")
    wanted = {*names, *usable}
    check_protection(choose_protection(protection), wanted)
    return tuple(name for name in PROTOCOLS if name in wanted and name != "inproc")


def check_usable(name: str) -> None:
    """Raise ConfigError if a protocol cannot work on this machine. The message says what is
    missing.
    """
    if name != "rdma":
        return
    if not has_rdma_devices():
        raise ConfigError("this machine shows no RDMA device (/sys/class/infiniband is empty)")
    if not has_pyverbs():
        raise ConfigError("pyverbs is not installed: pip install 'mooncake-serve[rdma]'")


def choose_protection(name: str) -> Protection | None:
    """Return the protection called `name`; None for "auto". Raises ConfigError."""
    if name not in (AUTO, *PROTECTIONS):
        raise ConfigError(
            f"transfer-protection: {name!r} is not one of {', '.join((AUTO, *PROTECTIONS))}"
        )
    return None if name == AUTO else Protection(name)


def check_protection(protection: Protection | None, protocols: Container[str]) -> None:
    """Raise ConfigError if one of the protocols cannot give the protection."""
    if protection is Protection.ENCRYPT and "rdma" in protocols:
        raise ConfigError(
            "transfer-protection: RDMA cannot encrypt, because NICs write memory as it is; leave "
            "rdma out of `transport`"
        )
