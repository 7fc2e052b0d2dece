"""A cluster of real models in this process: any number of workers as threads, tokens collected as
they come.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base import (
    FinalEvent,
    GenerateRequest,
    OutputEvent,
    RequestOutput,
    Role,
    SamplingParams,
    SeededIds,
    WorkerRef,
    block_keys,
    pack_tokens,
)
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.driver import Driver
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.held_model import HeldModel
from mooncake.launch.worker.weights.open_model import open_model, read_weights
from mooncake.launch.worker.worker import Worker
from mooncake.model.opening import ModelSource
from mooncake.model.options import ModelOptions
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import EventList
from tests.support.serve.watched_workers import WatchedWorkers
from tests.support.waiting import LONG_S, wait_until


class Answer:
    """What one request brought."""

    def __init__(self) -> None:
        self._events: queue.Queue[OutputEvent] = queue.Queue()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        """Log-probabilities of the tokens, if the request asks for them."""

    def receive(self, event: OutputEvent) -> None:
        self._events.put(event)

    def wait_for_tokens(self, count: int) -> None:
        """Return once so many tokens have come."""
        while len(self.tokens) < count:
            event = self._events.get(timeout=LONG_S)
            assert isinstance(event, RequestOutput), f"ended too early: {event}"
            self._keep(event)

    def final(self) -> FinalEvent:
        """Return the end, all tokens collected."""
        while True:
            event = self._events.get(timeout=LONG_S)
            if isinstance(event, FinalEvent):
                return event
            self._keep(event)

    def _keep(self, event: RequestOutput) -> None:
        self.tokens += event.tokens
        self.logprobs += [entry.logprob for entry in event.logprobs or ()]


class _Workers(WatchedWorkers):
    """Workers of which each role has a model, and ranks, of its own."""

    models: Mapping[Role, ModelSource]

    def _build(self, settings: WorkerSettings, gateways: Sequence[str] = ()) -> Worker:
        source = self.models.get(settings.role)
        if source is not None:
            self._model = held(source, settings.options)
        return super()._build(settings, gateways)


def held(source: ModelSource, options: ModelOptions) -> HeldModel:
    """Return what gives workers this source."""
    return HeldModel(lambda *_: source, lambda asked: read_weights(asked.model, options))


class ModelCluster:
    """Gateway and workers over in-process wires."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        change_plan: Callable[[ServePlan], ServePlan] = lambda plan: plan,
        protocols: Sequence[str] = ("inproc",),
        source: ModelSource | None = None,
        by_role: bool = False,
    ) -> None:
        with ExitStack() as opened:
            self._start(config, change_plan, protocols, source, by_role, opened)
            self._opened = opened.pop_all()

    def _start(
        self,
        config: ServeConfig,
        change_plan: Callable[[ServePlan], ServePlan],
        protocols: Sequence[str],
        source: ModelSource | None,
        by_role: bool,
        opened: ExitStack,
    ) -> None:
        """Start everything; `opened` ends what has been started."""
        plan = change_plan(make_plan(config, cores=1))
        network = InprocNetwork()
        channel = InprocChannel(network, "gateway", encode=True)
        path, dtype = str(plan.model.path), plan.model.dtype
        self._models: dict[Role, ModelSource] = {}
        if by_role:
            for role in (Role.PREFILL, Role.DECODE):
                shape = plan.ranks[role].shape
                options = msgspec.structs.replace(plan.options, shape=shape)
                self._models[role] = open_model(path, dtype, options)
                opened.callback(self._models[role].close)
        model = source or self._models.get(Role.DECODE)
        if model is None:
            model = open_model(path, dtype, plan.options)
            opened.callback(model.close)
        self.layout = plan.layout
        ids = SeededIds(7)
        self.events = EventList()
        gateway = Gateway(
            plan.scheduler,
            WorkerRef("gateway", "e0", channel.address),
            Conductor(plan.scheduler, ids),
            channel,
            ids,
            self.events,
        )
        self._gateway = Driver(gateway, channel)
        self._thread = threading.Thread(target=self._gateway.run, daemon=True)
        self._thread.start()
        opened.callback(self._thread.join, LONG_S)
        opened.callback(self._gateway.stop)
        given = held(model, plan.options)
        self.workers = _Workers(network, given, lost=self._lost, protocols=protocols)
        self.workers.models = self._models
        self._settings = cluster_workers(config, plan, channel.address, "secret", "host")
        opened.callback(self.workers.stop)
        self.workers.start(self._settings)
        self._wait_until_all_are_up()

    def _lost(self, worker_id: str) -> None:
        self.gateway(lambda gateway, now: gateway.worker_lost(worker_id, now))

    def gateway(self, work: Callable[[Any, float], Any]) -> Any:
        """Run `work(gateway, now)` in the gateway's thread."""
        return self._gateway.call(work).result(LONG_S)

    def _wait_until_all_are_up(self) -> None:
        def num_up(gateway: Any, now: float) -> int:
            return sum(worker.state == "up" for worker in gateway.status(now).workers)

        wait_until(lambda: self.gateway(num_up) == len(self._settings), "all workers up")

    def submit(self, request: GenerateRequest) -> Answer:
        """Send a request; its events gather in the answer."""
        answer = Answer()
        self.gateway(lambda gateway, now: gateway.submit(request, answer.receive, now))
        return answer

    def generate(self, request: GenerateRequest) -> tuple[list[int], FinalEvent]:
        """Send a request and wait for its end."""
        answer = self.submit(request)
        final = answer.final()
        return answer.tokens, final

    def counter(self, name: str) -> float:
        """Return the sum of a counter over the engines."""
        total = 0.0
        for worker_id in self.workers.worker_ids:
            if not worker_id.startswith(Role.KVSTORE.value):
                total += self.workers.call(
                    worker_id, lambda machine, _: machine.instance.load().counters.get(name, 0)
                )
        return total

    def wait_until_pooled(self, num_blocks: int) -> None:
        """Return once the gateway knows that the pool has so many blocks: they are put there
        beside what else goes on.
        """

        def are_there(gateway: Any, now: float) -> bool:
            return bool(gateway.status(now).pool.num_used_blocks >= num_blocks)

        wait_until(lambda: self.gateway(are_there), f"{num_blocks} blocks are in the pool")

    def submit_and_lose(
        self, made: Callable[[int], GenerateRequest], num_tokens: int = 3
    ) -> Answer:
        """Submit a request, and end the decode worker that has it after so many tokens, as a crash
        would. One that has ended by then is followed by another: `made` is given its number.
        """
        for number in itertools.count():
            answer = self.submit(made(number))
            answer.wait_for_tokens(num_tokens)
            if self._killed_what_decodes():
                return answer
            answer.final()
        raise AssertionError("unreachable")

    def _killed_what_decodes(self) -> bool:
        """End a decode worker that has a sequence; return whether there was one."""
        for worker_id in self.workers.worker_ids:
            if worker_id.startswith(Role.DECODE.value) and self.workers.call(
                worker_id, lambda machine, _: machine.instance.load().num_running
            ):
                self.workers.kill(worker_id)
                return True
        return False

    def checksums(self, worker_id: str, tokens: Sequence[int]) -> list[int]:
        """Return the checksum of each leading block of `tokens` that an engine holds."""
        keys = block_keys(self.layout.fingerprint, tokens, self.layout.block_tokens)

        def found(machine: Any, now: float) -> list[int]:
            del now
            pages = machine.instance.pool.match(keys)
            return [machine.instance.mover.checksum(pages, at) for at in range(len(pages))]

        checksums: list[int] = self.workers.call(worker_id, found)
        return checksums

    def stop(self) -> None:
        with self._opened:
            self.workers.check_integrity()

    def start_again(self, worker_id: str) -> None:
        """End a worker as a crash would, and start it with empty pages."""
        self.workers.kill(worker_id)
        self.workers.start([each for each in self._settings if each.worker_id == worker_id])
        self._wait_until_all_are_up()


@contextmanager
def model_cluster(
    model: Path,
    prefill: int,
    decode: int,
    *,
    kvstore: int = 1,
    change_plan: Callable[[ServePlan], ServePlan] = lambda plan: plan,
    protocols: Sequence[str] = ("inproc",),
    source: ModelSource | None = None,
    by_role: bool = False,
    **settings: Any,
) -> Iterator[ModelCluster]:
    """Serve `model` from so many workers for the body; integrity is checked at the end.

    source: the model, where it is not to be opened plainly. by_role: prefill and decode workers
    have models of their own, with the ranks of their shapes.
    """
    config = ServeConfig(
        model=str(model),
        prefill=prefill,
        decode=decode,
        kvstore=kvstore,
        num_threads=1,
        self_profile=False,
        kvstore_dram_bytes=2**24,
        **({"dtype": "float32", "kv_cache_memory_bytes": 2**24} | settings),
    )
    cluster = ModelCluster(
        config, change_plan=change_plan, protocols=protocols, source=source, by_role=by_role
    )
    try:
        yield cluster
    finally:
        cluster.stop()


def request(name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> GenerateRequest:
    """Return a request; greedy unless a temperature is given."""
    settings = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **settings),
    )
