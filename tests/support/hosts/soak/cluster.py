"""The cluster of a soak: three hosts of which any two can serve, and a fourth that asks them."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.hosts.described import DescribedCluster
from tests.support.hosts.hosts import DISK, SHARED, Host
from tests.support.hosts.soak.asker import Asker
from tests.support.hosts.soak.faults import Fault

ROLES = {
    "a": ["gateway", "decode", "kvstore"],
    "b": ["gateway", "prefill", "kvstore"],
    "c": ["prefill", "decode", "kvstore"],
}
WORKERS = sorted(
    f"{role}@{host}" for host, roles in ROLES.items() for role in roles if role != "gateway"
)
NUM_GATEWAYS = 2


def description(model: Path) -> dict[str, Any]:
    """Return the file of the cluster: little memory, so that blocks go to disks, too."""
    return {
        "model": f"{SHARED}/{model.name}",
        "machines": {host: dict.fromkeys(roles, 1) for host, roles in ROLES.items()},
        "settings": {"dtype": "float32", "kv-cache-memory-bytes": "32MiB"},
        "gateway": {"max-kept-answer-bytes": "4MiB"},
        "kvstore": {
            "kvstore-dram-bytes": "1MiB", "ssd": f"{DISK}/pool:32MiB", "ssd-min-uses": 1,
            "ssd-write-at": 0,
        },
    }  # fmt: skip


class SoakCluster:
    """The processes, and what befalls them."""

    def __init__(self, hosts: Sequence[Host], model: Path, folder: Path) -> None:
        self.machines = {host.name: host for host in hosts[:-1]}
        self._fourth = hosts[-1]
        self._cluster = DescribedCluster(hosts[:-1], description(model))
        self._cluster.keep(folder / "folders")
        self._ups = {name: self._cluster.up(host) for name, host in self.machines.items()}
        self._folders = folder / "folders"
        self._asker: Asker | None = None
        self._missed: list[str] = []

    def start_asker(self, plan: dict[str, Any]) -> None:
        """Start the program that asks the gateways as `plan` says, beside where they are."""
        gateways = [host for name, host in self.machines.items() if "gateway" in ROLES[name]]
        authority = self._folders / next(iter(ROLES)) / "ca.pem"
        self._asker = Asker(self._fourth, gateways, authority, plan)

    @property
    def asker(self) -> Asker:
        """The program that asks."""
        assert self._asker is not None
        return self._asker

    def name_of(self, address: str) -> str:
        """Return the name of the host at an address."""
        [name] = [name for name, host in self.machines.items() if host.address == address]
        return name

    def is_whole(self, since_s: float) -> bool:
        """Whether all gateways knew of all processes, some time after `since_s`."""
        return self.asker.is_whole(WORKERS, NUM_GATEWAYS, since_s)

    def ended(self) -> list[str]:
        """Return what is wrong with the commands that should run."""
        return [
            f"`mooncake up` on {name} has ended:\n{up.output[-3000:]}"
            for name, up in self._ups.items()
            if up.process.poll() is not None
        ]

    def stop(self) -> list[str]:
        """End all commands as Ctrl-C does; return what is wrong with how they end."""
        for up in self._ups.values():
            with contextlib.suppress(OSError, ValueError):
                up.send(signal.SIGTERM)
        codes = {name: up.process.wait(120) for name, up in self._ups.items()}
        wrong = [
            f"`mooncake up` on {name} ends with {code}" for name, code in codes.items() if code
        ]
        return self._missed + wrong

    def _kill(self, host: Host, pattern: str, number: int) -> bool:
        """Send a signal to what runs with such words; return whether there was something."""
        words = f"kill -{number} $(pgrep -f '[{pattern[0]}]{pattern[1:]}')"
        return host.run("sh", "-c", words).process.wait(60) == 0

    def _hit(self, host: Host, fault: Fault, number: int) -> None:
        """Send a signal to the one process that a fault is for."""
        if not self._kill(host, f"role={fault.what}", number):
            self._missed.append(f"nothing was there to be hit by {fault}")

    def begin(self, fault: Fault) -> Callable[[], None]:
        """Have a fault begin; return what ends it."""
        host = self.machines[fault.host]

        def start() -> None:
            self._ups[fault.host] = self._cluster.up(host)

        match fault.kind:
            case "kill":
                self._hit(host, fault, signal.SIGKILL)
                return lambda: None
            case "kill up":  # and what is left of it, as systemd does
                self._ups[fault.host].stop(signal.SIGKILL)
                self._kill(host, "role=", signal.SIGKILL)
                return start
            case "vanish":
                host.vanish()

                def come_back() -> None:
                    host.come_back()
                    self._cluster.install(host)
                    start()

                return come_back
            case "unplug":
                host.unplug()
                return host.plug
            case "one way":
                other = self.machines[fault.what]
                host.lose_way_to(other)
                return lambda: host.find_way_to(other)
            case "stop":
                self._hit(host, fault, signal.SIGSTOP)
                return lambda: self._hit(host, fault, signal.SIGCONT)
            case "slow link":
                host.slow_down(f"{fault.size}mbit")
                return lambda: host.slow_down("10gbit")
            case "loss":
                host.lose(fault.size)
                return lambda: host.lose(0.0)
            case "slow disk":
                host.slow_disk(fault.size)
                return lambda: host.slow_disk(0.0)
            case "full disk":
                host.fill_disk()
                return lambda: host.fill_disk(full=False)
            case "clock":
                host.skew_clock(fault.size)
                return lambda: host.skew_clock(0.0)
        raise ValueError(fault.kind)


def until(holds: Callable[[], bool], limit_s: float, step: Callable[[], None]) -> bool:
    """Do `step` again and again until something holds; return whether it does within a time."""
    end_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > end_s:
            return False
        step()
    return True
