"""A cluster of workers that follow the protocol and break in every way: they die, hang, fail,
repeat themselves, are overtaken by each other and lose messages. A seed replays it.
"""

from __future__ import annotations

import zlib
from collections import deque
from random import Random

from mooncake.base import (
    AbortTask,
    AnyMessage,
    BlockEvents,
    Failure,
    FinishReason,
    GenerateRequest,
    LoadReport,
    PeerLost,
    Priority,
    RequestOutput,
    RequestTask,
    Role,
    SamplingParams,
    SeededIds,
    StepOutputs,
    Tier,
    Welcome,
    WorkerLoad,
    WorkerRef,
    pack_tokens,
)
from mooncake.base.messages import KVReady
from mooncake.base.request import FinishInfo
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import EventList, Recorders
from mooncake.telemetry.metrics import Metrics
from tests.support.scheduler.scheduling import GATEWAY, Client, hello, keys_of

VOCABULARY = 40
STOP_TOKEN = 0
STEP_S = 0.1


def oracle(request: GenerateRequest) -> list[int]:
    """Return the tokens this request must bring: a function of name and position, to the first
    stop token.
    """
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens:
        text = f"{request.request_id}/{len(tokens)}"
        tokens.append(zlib.crc32(text.encode()) % VOCABULARY)
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens


class Network:
    """Queues by sender and receiver: in order for each pair, in any order between pairs."""

    def __init__(self, random: Random, loss: float) -> None:
        self._random = random
        self.loss = loss
        self.queues: dict[tuple[str, str], deque[AnyMessage]] = {}

    def send(self, sender: str, to: str, message: AnyMessage) -> None:
        if self._random.random() >= self.loss:
            self.queues.setdefault((sender, to), deque()).append(message)

    def next(self) -> tuple[str, AnyMessage] | None:
        """Return the oldest message of some pair."""
        if not self.queues:
            return None
        pair = self._random.choice(list(self.queues))
        queue = self.queues[pair]
        message = queue.popleft()
        if not queue:
            del self.queues[pair]
        return pair[1], message


class Sender:
    """One end of the network, as a channel."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self.address = address

    def send(self, address: str, message: AnyMessage) -> None:
        self._network.send(self.address, address, message)


class Job:
    """A task on an unruly worker."""

    def __init__(self, task: RequestTask, worker: WorkerRef, mute: bool) -> None:
        self.task = task
        self.mute = mute
        self.prefills = task.prefill == worker
        self.ready = self.prefills or task.prefill is None
        self.position = len(task.output_tokens)


class UnrulyWorker:
    """One boot of a prefill, decode or kvstore worker."""

    def __init__(self, name: str, role: Role, epoch: str, world: UnrulyCluster) -> None:
        node = f"node-{int(name[-1]) % 2}"
        self.hello = hello(name, role, epoch=epoch, node_id=node, num_blocks=world.num_blocks)
        self.jobs: dict[tuple[str, int], Job] = {}
        self.welcomed = False
        self._early: set[tuple[str, int]] = set()
        self._sequence_no = 0
        self._random = world.random
        self._world = world
        self._channel = Sender(world.network, self.hello.worker.address)

    @property
    def ref(self) -> WorkerRef:
        return self.hello.worker

    def handle(self, message: AnyMessage) -> None:
        match message:
            case Welcome():
                self.welcomed = True
                if message.send_snapshot:
                    self._tell_blocks(snapshot=True)
            case RequestTask():
                name = (message.request.request_id, message.attempt)
                self.jobs[name] = Job(message, self.ref, self._random.random() < self._world.mute)
                self.jobs[name].ready |= name in self._early
                self._early.discard(name)
            case KVReady():
                name = (message.request_id, message.attempt)
                if name in self.jobs:
                    self.jobs[name].ready = True
                else:
                    self._early.add(name)
            case AbortTask():
                for name in [n for n in self.jobs if n[0] == message.request_id]:
                    if name[1] <= message.attempt:
                        del self.jobs[name]
            case PeerLost():
                self._on_peer_lost(message.worker)
            case _:
                pass

    def _on_peer_lost(self, worker: WorkerRef) -> None:
        for name, job in list(self.jobs.items()):
            peer = job.task.decode if job.prefills else job.task.prefill
            if peer == worker and not job.ready:
                self._fail(name, 500)

    def act(self) -> None:
        """Do one thing."""
        if not self.welcomed:
            self._channel.send(GATEWAY.address, self.hello)
            return
        if self._random.random() < 0.5:
            load = WorkerLoad(num_running=len(self.jobs), num_free_blocks=150, num_total_blocks=200)
            self._channel.send(GATEWAY.address, LoadReport(worker=self.ref, load=load))
        ready = [name for name, job in self.jobs.items() if job.ready and not job.mute]
        if not ready:
            return
        name = self._random.choice(ready)
        if self._random.random() < self._world.failures:
            self._fail(name, self._random.choice([400, 500, 503]))
        elif self.jobs[name].prefills:
            self._prefill(name)
        else:
            self._decode(name)

    def _prefill(self, name: tuple[str, int]) -> None:
        job = self.jobs.pop(name)
        assert job.prefills
        task = job.task
        expected, start = oracle(task.request), len(task.output_tokens)
        last = start + 1 == len(expected)
        finish = self._finish(task, expected) if last else None
        self._output(name, start, expected[start : start + 1], finish)
        self._tell_blocks(snapshot=False, request=task.request)
        if not last:
            ready = KVReady(
                request_id=name[0],
                attempt=name[1],
                prefill=self.ref,
                token=expected[start],
                num_cached_tokens=0,
            )
            self._channel.send(task.decode.address, ready)

    def _decode(self, name: tuple[str, int]) -> None:
        job = self.jobs[name]
        task = job.task
        assert not job.prefills
        expected = oracle(task.request)
        first = len(task.output_tokens)
        if job.position == first and task.prefill is not None and self._random.random() < 0.5:
            job.position += 1  # the first token is prefill's to send; this one leaves it out
        start = job.position
        stop = min(len(expected), start + self._random.randrange(1, 4))
        if start > first and self._random.random() < 0.2:
            start -= 1  # repeats itself
        job.position = stop
        finish = None
        if stop == len(expected):
            finish = self._finish(task, expected)
            del self.jobs[name]
        self._output(name, start, expected[start:stop], finish)

    @staticmethod
    def _finish(task: RequestTask, expected: list[int]) -> FinishInfo:
        if expected[-1] in task.request.sampling.stop_token_ids:
            return FinishInfo(reason=FinishReason.STOP, stop_token_id=expected[-1])
        return FinishInfo(reason=FinishReason.LENGTH)

    def _fail(self, name: tuple[str, int], status: int) -> None:
        job = self.jobs.pop(name)
        failure = Failure(status=status, error_type="Error", message="an unruly worker")
        finish = FinishInfo(reason=FinishReason.ERROR, failure=failure)
        self._output(name, job.position, [], finish)

    def _output(
        self, name: tuple[str, int], start: int, tokens: list[int], finish: FinishInfo | None
    ) -> None:
        output = RequestOutput(
            request_id=name[0], attempt=name[1], start=start, tokens=tokens, finish=finish
        )
        message = StepOutputs(worker=self.ref, outputs=[output])
        for _ in range(1 + (self._random.random() < 0.1)):
            self._channel.send(GATEWAY.address, message)

    def _tell_blocks(self, *, snapshot: bool, request: GenerateRequest | None = None) -> None:
        self._sequence_no += 1 + (self._random.random() < 0.1)
        event = BlockEvents(
            worker=self.ref,
            tier=Tier.DRAM if self.hello.role is Role.KVSTORE else Tier.HBM,
            sequence_no=self._sequence_no,
            stored=keys_of(request) if request is not None else [],
            snapshot=snapshot,
        )
        self._channel.send(GATEWAY.address, event)


class UnrulyCluster:
    """Everything between the clients and the end of the world."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.mute = random.choice([0.0, 0.05])
        self.failures = random.choice([0.0, 0.05])
        self.deaths = random.choice([0.0, 0.02, 0.05])
        self.network = Network(random, random.choice([0.0, 0.0, 0.02]))
        self.lossless = self.network.loss == 0.0
        self.num_blocks = random.choice([30, 200])
        config = SchedulerConfig(
            max_inflight=random.choice([4, 64]),
            max_queue=random.choice([1, 64]),
            stall_timeout_s=8.0,
            gap_timeout_s=2.0,
            heartbeat_timeout_s=4.0,
            replace_wait_s=3.0,
            whole_on_decode_max_tokens=random.choice([0, 16]),
            policy=random.choice(["kvcache-centric", "random", "round-robin", "load-balance"]),
        )
        self.events, self.metrics = EventList(), Metrics("unruly")
        self.gateway = Gateway(
            config,
            GATEWAY,
            Conductor(config, SeededIds(random.getrandbits(32))),
            Sender(self.network, GATEWAY.address),
            SeededIds(random.getrandbits(32)),
            Recorders(self.events, self.metrics),
        )
        self.now = 0.0
        self.clients: dict[str, tuple[GenerateRequest, Client]] = {}
        self.workers: dict[str, UnrulyWorker] = {}
        self._dead_until: dict[str, float] = {}
        self._boots = 0
        roles = {Role.PREFILL: random.randrange(3), Role.DECODE: random.randrange(1, 4)}
        roles[Role.KVSTORE] = random.randrange(3)
        for role, count in roles.items():
            for index in range(count):
                self._boot(f"{role.value}{index}", role)

    def run(self, num_steps: int) -> None:
        """Let the world go on, clients and faults included."""
        for _ in range(num_steps):
            if self.random.random() < 0.3:
                self._submit()
            if self.clients and self.random.random() < 0.05:
                self.gateway.abort(self.random.choice(list(self.clients)), self.now)
            if self.random.random() < self.deaths:
                self._kill()
            self._step()

    def settle(self, num_steps: int = 2000) -> None:
        """No new requests and no new faults: wait until all has ended."""
        self.deaths = self.failures = self.mute = self.network.loss = 0.0
        for _ in range(num_steps):
            if self.gateway.idle and not self.network.queues and not self._dead_until:
                return
            self._step()
        raise AssertionError("the world did not come to rest")

    def _step(self) -> None:
        self.now += STEP_S
        for name, until in list(self._dead_until.items()):
            if self.now >= until:
                del self._dead_until[name]
                self._boot(name, next(role for role in Role if name.startswith(role.value)))
        for worker in self.workers.values():
            worker.act()
        for _ in range(self.random.randrange(2, 40)):
            found = self.network.next()
            if found is None:
                break
            self._deliver(*found)
        self.gateway.tick(self.now)
        self.gateway.check_integrity()

    def _deliver(self, address: str, message: AnyMessage) -> None:
        if address == GATEWAY.address:
            self.gateway.handle(message, self.now)
            self.gateway.check_integrity()
        for worker in list(self.workers.values()):
            if worker.ref.address == address:
                if message == PeerLost(worker=worker.ref):
                    self._kill(worker.ref.worker_id)  # what a worker declared dead has to do
                else:
                    worker.handle(message)

    def _submit(self) -> None:
        name = f"r{len(self.clients)}"
        request = GenerateRequest(
            request_id=name,
            prompt=pack_tokens([7] * self.random.randrange(1, 60)),
            sampling=SamplingParams(
                max_tokens=self.random.randrange(1, 12),
                stop_token_ids=frozenset({STOP_TOKEN} if self.random.random() < 0.5 else ()),
            ),
            timeout_s=self.random.choice([None, None, 1.0, 20.0]),
            tenant=self.random.choice(["", "", "other"]),
            priority=self.random.choice([Priority.INTERACTIVE, *Priority]),
        )
        client = Client()
        self.clients[name] = (request, client)
        self.gateway.submit(request, client, self.now)

    def _kill(self, name: str | None = None) -> None:
        if not self.workers:
            return
        name = name or self.random.choice(list(self.workers))
        del self.workers[name]
        self._dead_until[name] = self.now + self.random.uniform(0.2, 8.0)
        if self.random.random() < 0.5:
            self.gateway.worker_lost(name, self.now)

    def _boot(self, name: str, role: Role) -> None:
        self._boots += 1
        self.workers[name] = UnrulyWorker(name, role, f"e{self._boots}", self)
