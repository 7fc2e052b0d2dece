"""The lead's side of an engine's ranks on other machines: one link for each, to a host of ranks
(`rank_host`), which starts a follower for it.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import msgspec

from mooncake.base import ConfigError, Forbidden, MooncakeError
from mooncake.identity.credential import Credential
from mooncake.launch.worker.ranks.sealed_link import SealedLink
from mooncake.transfer.net.handshake import HandshakeRefused

HOSTS_NAME = "ranks"
"""The name of a host of ranks in the handshake."""


class RankWanted(msgspec.Struct, frozen=True):
    """The first message of a lead."""

    sent_s: float
    """Time of the lead's clock, by which its deadlines are."""
    on_gpu: bool = False
    """Whether the rank takes one of the machine's GPUs."""


@dataclass(frozen=True)
class FarStages:
    """Starts the stages before the last one on other machines.

    hosts: (host, port) of each, first stage first. own_host: the address of this machine at which
    those ranks find the others. credential: proves that all belong to one cluster.
    """

    hosts: tuple[tuple[str, int], ...]
    own_host: str
    credential: Credential

    def greet(self) -> None:
        """Return once each of those machines has proven that it starts ranks for this cluster.

        Raises:
            OSError: a machine does not listen.
            Forbidden: a machine belongs to another cluster.
        """
        for host, port in self.hosts:
            try:
                SealedLink.connect((host, port), self.credential, HOSTS_NAME).close()
            except (OSError, EOFError) as error:
                raise OSError(f"stage-hosts: {host}:{port} does not answer ({error})") from error
            except HandshakeRefused as error:
                raise Forbidden(f"stage-hosts: {host}:{port}: {error.message}") from error

    def start(self, stage: int, *, on_gpu: bool = False) -> tuple[socket.socket, FarRank]:
        """Have the machine of a stage start a follower, which takes one of its GPUs if it computes
        `on_gpu`; return the socket that is the link to it.

        Raises:
            ConfigError: no host of ranks of this cluster answers there.
        """
        host, port = self.hosts[stage]
        try:
            link = SealedLink.connect((host, port), self.credential, HOSTS_NAME)
            try:
                link.send(msgspec.msgpack.encode(RankWanted(time.monotonic(), on_gpu)))
            except BaseException:
                link.close()
                raise
        except (OSError, EOFError, MooncakeError) as error:
            raise ConfigError(
                f"stage-hosts: {host}:{port} starts no rank ({error}); `mooncake ranks --bind-host "
                f"{host} --port {port}` has to run there, with this cluster's secret"
            ) from error
        ours, theirs = socket.socketpair()
        return ours, FarRank(link, theirs)


class FarRank:
    """A follower on another machine: a `RankProcess`."""

    def __init__(self, link: SealedLink, local: socket.socket) -> None:
        """Forward bytes between `local` and `link`, which leads to this rank's host."""
        self._link = link
        self._relay = threading.Thread(
            target=link.relay, args=(local,), name="far-rank", daemon=True
        )
        self._relay.start()

    def kill(self) -> None:
        """Close the link; the host then ends the rank."""
        self._link.hang_up()

    def wait(self, timeout: float | None = None) -> None:
        """Return once the link is closed.

        Raises:
            TimeoutError: it is not closed in time.
        """
        self._relay.join(timeout)
        if self._relay.is_alive():
            raise TimeoutError(f"the link to a rank is not closed after {timeout:g} s")
