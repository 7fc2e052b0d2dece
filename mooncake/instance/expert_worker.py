"""The machine of a worker that holds routed experts and nothing else. It has no pages and gets no
requests: its runner computes for the workers that step with it (`model.parallel.exchange`).

Pure. It tells gateways that it is there, and ends after those for which it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mooncake.base.messages import (
    Drain,
    NextLife,
    Tier,
    WorkerHello,
    WorkerLoad,
)
from mooncake.engine.plan import Counted
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership


class ExpertWorker:
    """Reports the counts of its runner until it may end."""

    next_life: NextLife | None = None
    """None, because this worker never comes back in another role."""

    def __init__(
        self,
        hello: WorkerHello,
        channel: Channel,
        gateway_address: str,
        seeds: Sequence[str],
        interval_s: float,
        is_released: Callable[[], bool],
    ) -> None:
        """seeds: see `Membership`. interval_s: the time between two reports. is_released: says
        whether nobody uses its experts any more.
        """
        self._membership = Membership(
            hello, channel, gateway_address, Tier.HBM, list, interval_s, seeds
        )
        self._is_released = is_released
        self._load = WorkerLoad()

    @property
    def joined(self) -> bool:
        """True if a gateway knows this worker."""
        return self._membership.welcomed

    @property
    def draining(self) -> bool:
        """True if the worker wants to leave."""
        return self._load.draining

    @property
    def quiet(self) -> bool:
        """True if nobody uses its experts any more."""
        return self._is_released()

    @property
    def gateways(self) -> list[str]:
        """The addresses of all gateways known."""
        return self._membership.gateway_addresses

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take a message about membership, or the counts of the runner. Others are ignored."""
        del now
        match event:
            case Counted():
                rows = self._load.expert_rows if event.expert_rows is None else event.expert_rows
                counters = self._load.counters | event.counters
                self._load = msgspec.structs.replace(
                    self._load, counters=counters, expert_rows=rows
                )
            case Drain():
                self._load = msgspec.structs.replace(self._load, draining=True)
            case _:
                self._membership.handle(event)

    def tick(self, now: float) -> float:
        """Send reports that are due. Return when to call again."""
        self._membership.lost_gateways()  # it has no requests of theirs
        return self._membership.tick(now, lambda: self._load)

    def check_integrity(self) -> None:
        """Nothing is held here that could be lost."""
