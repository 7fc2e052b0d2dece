"""Injects faults into a simulated world and undoes them when their duration is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from mooncake.base.messages import Role
from mooncake.sim.faults.plan import GATEWAY, Fault, Names
from mooncake.sim.world.world import World


class Injector:
    """Injects faults into one world. `restarting` is called just before a gateway restarts."""

    def __init__(
        self, world: World, note: Callable[[str], None], restarting: Callable[[], None]
    ) -> None:
        self._world = world
        self._note = note
        self._restarting = restarting
        self._calm = world.network.config
        self.happened: list[Fault] = []
        """The faults so far, in order of time."""

    @property
    def names(self) -> Names:
        """Return the possible targets of faults in this world."""
        specs = [worker.spec for worker in self._world.workers.values()]
        return Names(
            workers=[spec.worker_id for spec in specs],
            nodes=sorted({spec.node_id for spec in specs}),
            pools=[spec.worker_id for spec in specs if spec.role is Role.KVSTORE],
            ranks=[
                f"{spec.worker_id}/{rank}"
                for spec in specs
                if (ranked := self._world.ranked(spec.worker_id)) is not None
                for rank in range(1, ranked.num_ranks)
            ],
            gateways=tuple(self._world.gateway_hosts),
        )

    def schedule(self, faults: Sequence[Fault], start_s: float) -> None:
        """Schedule `faults`; their times count from `start_s` of the world's clock."""
        for fault in faults:
            self._world.heap.at(start_s + fault.at_s, partial(self._happen, fault))

    def _happen(self, fault: Fault) -> None:
        world = self._world
        self._note(str(fault))
        self.happened.append(fault)
        match fault.kind:
            case "kill":
                world.kill(fault.target)
            case "kill_node":
                for worker in world.workers.values():
                    if worker.spec.node_id == fault.target:
                        world.kill(worker.spec.worker_id, noticed=False)
            case "hang":
                world.hang(fault.target, fault.seconds)
            case "hang_step":
                world.hang_step(fault.target)
            case "cut" | "cut_gateway":
                self._cut(
                    world.network.partition, fault.target, fault.other or GATEWAY, fault.seconds
                )
            case "cut_one_way":
                cut = world.network.partition_one_way
                self._cut(cut, fault.target, fault.other, fault.seconds)
            case "kill_rank" | "hang_rank" | "slow_rank" | "lose_step":
                self._rank(fault)
            case "slow_disk" | "disk_error":
                self._disks(fault)
            case "skew":
                self._skew(fault.target, fault.amount)
            case "change_role":
                world.change_role(fault.target)
            case "leave":
                world.leave(fault.target, fault.seconds)
            case "restart_gateway":
                self._restarting()
                world.start_gateway()
            case _:
                self._disturb(fault)

    def _cut(self, partition: Callable[..., None], target: str, other: str, seconds: float) -> None:
        partition(target, other, cut=True)
        self._world.heap.after(seconds, lambda: partition(target, other, cut=False))

    def _rank(self, fault: Fault) -> None:
        worker_id, _, number = fault.target.rpartition("/")
        ranked, rank = self._world.ranked(worker_id), int(number)
        if ranked is None:
            return  # its worker is dead
        match fault.kind:
            case "kill_rank":
                ranked.kill_rank(rank)
            case "hang_rank":
                ranked.hang_rank(rank, fault.seconds)
            case "slow_rank":
                ranked.slow_rank(rank, fault.amount, fault.seconds)
            case _:
                ranked.lose_step(rank)

    def _disks(self, fault: Fault) -> None:
        """Trouble the node's disks, and the bucket. This outlives the process that uses them."""
        media = [*self._world.workers[fault.target].media, self._world.bucket]
        refuses = fault.kind == "disk_error"
        for medium in media:
            medium.slowdown = fault.amount or 1.0
            medium.refuses_reads = medium.refuses_writes = refuses

        def mend() -> None:
            for medium in media:
                medium.slowdown = 1.0
                medium.refuses_reads = medium.refuses_writes = False

        self._world.heap.after(fault.seconds, mend)

    def _skew(self, target: str, seconds: float) -> None:
        world = self._world
        if target == GATEWAY:
            process = world.gateway_hosts[GATEWAY].process
        else:
            worker = world.workers[target]
            if worker.process is None or worker.address is None:
                return  # a dead process has no clock
            process = worker.process
            endpoint = world.network.find(worker.address)
            if endpoint is not None:
                endpoint.skew_s += seconds
        process.skew_s += seconds
        process.wake(process.now())

    def _disturb(self, fault: Fault) -> None:
        """Worsen the network for the duration of `fault`."""
        changes: dict[str, float] = {
            "lose": {"loss": fault.amount},
            "delay": {"message_delay_s": fault.amount, "message_jitter_s": fault.amount},
            "reorder": {"reordered": fault.amount, "message_jitter_s": 0.05},
            "slow_links": {"link_bytes_per_s": 1e3},
        }[fault.kind]
        network = self._world.network
        network.config = msgspec.structs.replace(network.config, **changes)
        self._world.heap.after(fault.seconds, self._calm_down)

    def _calm_down(self) -> None:
        self._world.network.config = self._calm
