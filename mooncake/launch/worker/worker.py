"""A worker that is ready: a state machine, the driver that moves it, and the resources of the host
that it holds. Its process drives it (`process`), or a thread (`cluster.colocated`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.core import Metric

from mooncake.base import Drain, PeerLost, Role, WorkerRef
from mooncake.base.mailbox import Polled
from mooncake.base.messages import NextLife
from mooncake.base.pool_messages import PoolState
from mooncake.identity.credential import Credential
from mooncake.instance.expert_worker import ExpertWorker
from mooncake.instance.role import RoleWorker
from mooncake.instance.sleeper import Sleeper
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.health import Facts, Health
from mooncake.launch.pool_node.admin import AdminSettings, PoolAdmin
from mooncake.launch.pool_node.metrics import node_families
from mooncake.launch.worker.metrics import EngineFigures, engine_families, link_families
from mooncake.prefill.worker import PrefillWorker
from mooncake.rpc.channel import PolledChannel
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.transfer.engine import PolledTransfer

if TYPE_CHECKING:  # a worker without a model has no torch either
    from mooncake.launch.worker.health_port import HealthPort
    from mooncake.model.device.pages import PageMemory

FIGURES_S = 2.0
"""A driver that does not answer within this time is left out of the metrics."""
WorkerMachine = RoleWorker[Any] | Sleeper | KvNode | ExpertWorker


class Worker:
    """A worker that is ready to be driven. `close` frees what it took; call it after its driver has
    ended.
    """

    def __init__(
        self,
        machine: WorkerMachine,
        ref: WorkerRef,
        channel: PolledChannel,
        opened: contextlib.ExitStack,
        *,
        transfer: PolledTransfer | None = None,
        polled: Sequence[Polled[msgspec.Struct]] = (),
        seeds: SeedAddresses | None = None,
        pages: PageMemory | None = None,
        returns: bool = False,
    ) -> None:
        """Own what `opened` closes from now on: the ports, and the memory that they use. `seeds`
        are addresses at which to look for gateways. One that sleeps has no `transfer`. `pages` are
        those on a device, in which copies may be under way until the transfer engine has ended.
        `returns`: it comes back after the cluster has given it up.
        """
        self.machine = machine
        self.ref = ref
        self._channel = channel
        self._transfer = transfer
        self._seeds = seeds
        self._pages = pages
        self._admin: PoolAdmin | None = None
        self._met = ""
        self.driver = Driver(
            machine, channel, transfer=transfer, polled=polled, own=ref,
            shares=isinstance(machine, KvNode), returns=returns,
        )  # fmt: skip
        self._leaves = False
        self.driver.stop_when(lambda machine: machine.next_life is not None, None)
        self._opened = opened.pop_all()

    @property
    def next_life(self) -> NextLife | None:
        """How the worker was told to come back, once its driver has ended for that."""
        return None if self._leaves else self.machine.next_life

    @property
    def sleeps(self) -> bool:
        """True if the worker is an engine that sleeps."""
        return isinstance(self.machine, Sleeper)

    @property
    def gateways(self) -> list[str]:
        """The addresses of the gateways that an engine knows."""
        return [] if isinstance(self.machine, KvNode) else self.machine.gateways

    @property
    def admin_url(self) -> str:
        """The URL where operators ask a pool node; empty if it has no API server."""
        return self._admin.url if self._admin is not None else ""

    def open_admin(
        self,
        settings: AdminSettings,
        credential: Credential,
        about: dict[str, Any],
        port: HealthPort,
    ) -> None:
        """Open a pool node's HTTP API server, which also answers what the health port does.

        Raises:
            ConfigError: its address cannot be bound.
        """
        if self._transfer is not None:
            about = {**about, "segment": msgspec.to_builtins(self._transfer.segment)}
        self._admin = PoolAdmin(settings, credential, self.driver, about, port.health, port.metrics)

    def tell(self, health: Health) -> None:
        """Have `health` ask this worker for its state from now on."""
        health.watch(
            lambda: self.driver.call(
                lambda machine, _: Facts(joined=machine.joined, draining=machine.draining)
            )
        )

    def once_joined(self, then: Callable[[], object]) -> None:
        """Call `then` once a gateway knows this worker. Call it before the driver runs."""
        self.driver.once(lambda machine: machine.joined, then)

    def families(self) -> list[Metric]:
        """Return the worker's figures as Prometheus families; none if its driver does not answer or
        has ended. Any thread may call this.
        """
        if isinstance(self.machine, Sleeper | ExpertWorker):
            return []
        asked = self.driver.call(lambda machine, _: _figures(machine))
        try:
            figures = asked.result(FIGURES_S)
        except (CancelledError, TimeoutError):
            return []
        worker_id = self.ref.worker_id
        if isinstance(figures, PoolState):
            own = node_families(figures)
        else:
            role = Role.PREFILL if isinstance(self.machine, PrefillWorker) else Role.DECODE
            own = engine_families(worker_id, role, figures)
        links = [] if self._transfer is None else self._transfer.links()
        return [*own, *link_families(worker_id, links)]

    def leave(self, limit_s: float, *, waits: bool = False) -> None:
        """End the driver. Before that, for at most `limit_s`, an engine finishes what others do not
        take over, a pool node accepts nothing new and saves what is worth it, and a worker that
        holds experts waits for those that use them. An engine that `waits` serves until another
        one of its role has taken its place. Returns at once; from any thread.
        """
        self._leaves = True
        if limit_s <= 0 or self.sleeps:
            self.driver.stop()
            return

        def done(machine: Any) -> bool:
            if isinstance(machine, KvNode):
                return machine.drained
            if isinstance(machine, ExpertWorker):
                return machine.quiet
            return bool(machine.quiet and (machine.instance.membership.relieved or not waits))

        self.driver.call(lambda machine, now: machine.handle(Drain(), now))
        self.driver.stop_when(done, limit_s)

    def meet(self, gateway_address: str) -> None:
        """Look for a gateway at this address too, in place of the one that an earlier call named.
        Any thread may call this.
        """
        self._met = gateway_address
        if self._seeds is not None:
            self._seeds.move(gateway_address)

    def say_goodbye(self, gateway_address: str) -> None:
        """Tell the gateways that this worker ends, so that they wait for no heartbeat."""
        for address in dict.fromkeys([self._met or gateway_address, *self.gateways]):
            self._channel.send(address, PeerLost(worker=self.ref))

    def close(self) -> None:
        """Free model, disks, memory and sockets. The driver must have ended.

        A step that hangs cannot be stopped and still uses model and memory; only the end of the
        process frees them. May be called twice.
        """
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if isinstance(self.machine, RoleWorker) and self.machine.instance.engine.hung:
            self._opened.pop_all()
            self._channel.close()
            return
        self._opened.close()
        if self._pages is not None:
            self._pages.free()  # a worker that comes back in another role takes as many
            self._pages = None


def _figures(machine: WorkerMachine) -> EngineFigures | PoolState:
    """Return what a worker's machine reports about itself, for its metrics."""
    if isinstance(machine, KvNode):
        return machine.state()
    assert isinstance(machine, RoleWorker)
    return EngineFigures(machine.instance.load(), machine.instance.engine.stalled_s)
