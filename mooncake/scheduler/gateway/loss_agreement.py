"""Agreement on losses: a worker that is silent at one gateway is lost only if no other gateway
hears it. One bad link must not end a worker that serves everyone else.

Owned by the gateway machine. It sends questions to other gateways; the gateway machine acts on the
losses.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.base import WorkerRef
from mooncake.base.messages import DoubtPeers, PeersHeard
from mooncake.rpc.channel import Channel
from mooncake.scheduler.membership_table import MAX_FENCED, REPEAT_S


class LossAgreement:
    """The workers that are not heard here, until all live gateways have answered about them."""

    def __init__(self, gateway: WorkerRef, channel: Channel) -> None:
        self._gateway = gateway
        self._channel = channel
        self._open: dict[WorkerRef, set[str]] = {}
        """Worker -> ids of the gateways that do not hear it either."""
        self._ask_s = float("-inf")

    def open(self, workers: Iterable[WorkerRef]) -> None:
        """Ask about these workers too when `take_lost` asks next."""
        for worker in workers:
            if len(self._open) < MAX_FENCED:
                self._open.setdefault(worker, set())

    def close(self, worker: WorkerRef) -> None:
        """Forget a worker that has been heard here."""
        self._open.pop(worker, None)

    def on_answer(self, answer: PeersHeard) -> None:
        """Apply the answer of another gateway. If that gateway hears a worker, the question about
        it is settled.
        """
        for worker in answer.heard:
            self._open.pop(worker, None)
        for worker in answer.unheard:
            if worker in self._open:
                self._open[worker].add(answer.gateway.worker_id)

    def take_lost(self, gateways: list[WorkerRef], now: float) -> list[WorkerRef]:
        """Return the workers that none of the live `gateways` hears, and ask about the rest."""
        ids = {gateway.worker_id for gateway in gateways}
        lost = [worker for worker, unheard_by in self._open.items() if ids <= unheard_by]
        for worker in lost:
            del self._open[worker]
        if self._open and now >= self._ask_s:
            self._ask_s = now + REPEAT_S
            question = DoubtPeers(worker=self._gateway, peers=list(self._open))
            for gateway in gateways:
                self._channel.send(gateway.address, question)
        return lost

    @property
    def next_s(self) -> float | None:
        """When to ask again; None while nothing is open."""
        return self._ask_s if self._open else None
