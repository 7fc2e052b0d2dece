"""A thread that dies, of every kind that this package starts: its process ends, its caller hears of
it, or only what it did for one connection ends. Nothing waits for ever.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import mmap
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mooncake.base import FinalEvent, FinishReason, KvLayout, PageArray, Role
from mooncake.base.block_events.kv_events import KvEventsConfig
from mooncake.base.threads import VitalThread
from mooncake.engine.plan import StepPlan
from mooncake.kvstore.config import SsdConfig
from mooncake.kvstore.storage.disk import DiskDone, DiskScanned, Outcome
from mooncake.kvstore.storage.disk_files import FileDisks
from mooncake.launch.cluster.pool import Registry
from mooncake.launch.cluster.supervision import process_workers, worker_program
from mooncake.launch.cluster.supervision.process_workers import ProcessWorkers
from mooncake.launch.cluster.supervision.worker_program import WorkerProgram
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.health import Watchdog
from mooncake.launch.host.http_server import HttpServer
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.launch.worker.page_hasher import PageHasher
from mooncake.launch.worker.ranks.rank_moves import _Memory
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model.copies import LayerReports
from mooncake.model.device.cuda_memory import _Ends
from mooncake.model.layers.sampler import Sampler
from mooncake.model.parallel import lead as lead_module
from mooncake.model.parallel.lead import Lead, Loaded, send
from mooncake.model.parallel.peers import Peers
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.running.follower import Guesses, _give_signs, _hear
from mooncake.model.running.runner import ModelRunner
from mooncake.rpc.kv_event_reader import EventSource, KvEventReader
from mooncake.rpc.kv_events import KvEventPublisher
from mooncake.transfer.local import CopyPool
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.regions import Gates, RegionTable
from tests.support.model.checkpoints import write_config_only
from tests.support.model.tiny_models import kv_for, ours, source_of, truth
from tests.support.serve.local_world import SocketWorld, request
from tests.support.serve.plain_settings import worker_settings
from tests.support.waiting import LONG_S

ROOT = Path(__file__).parents[2]
MAKERS = {"Thread", "VitalThread", "ThreadPoolExecutor", "start_deep_thread"}

VITAL = "its process ends"
TOLD = "who waits for it gets the exception"
ENDS = "its process looks at it and ends"
OWN = "it catches everything itself"
ONE = "only what it serves, one connection or one question, ends"
NOTHING = "nothing waits for it"
THREADS = {
    "api/constrained/checker.py:ThreadPoolExecutor": TOLD,
    "api/lane.py:ThreadPoolExecutor": TOLD,
    "base/threads.py:Thread": TOLD,
    "base/threads.py:start_deep_thread": TOLD,
    "integrations/lmcache/connector.py:ThreadPoolExecutor": TOLD,
    "integrations/vllm/lookups.py:Thread": OWN,
    "integrations/vllm/mover.py:Thread": OWN,
    "kvstore/storage/disk_threads.py:VitalThread": VITAL,
    "launch/cluster/lone_worker.py:Thread": NOTHING,
    "launch/cluster/pool.py:Thread": OWN,
    "launch/cluster/supervision/local_keeper.py:Thread": TOLD,
    "launch/cluster/supervision/process_workers.py:Thread": ENDS,
    "launch/cluster/serve.py:Thread": TOLD,
    "launch/cluster/supervision/worker_program.py:VitalThread": VITAL,
    "launch/host/file_digests.py:ThreadPoolExecutor": TOLD,
    "launch/host/health.py:VitalThread": VITAL,
    "launch/host/http_server.py:VitalThread": VITAL,
    "launch/host/secrets/secret_file.py:VitalThread": VITAL,
    "launch/llm.py:Thread": OWN,
    "launch/pool_client/session.py:Thread": ONE,
    "launch/pool_node/node_lock.py:Thread": NOTHING,
    "launch/worker/ranks/far_ranks.py:Thread": ONE,
    "launch/cluster/colocated.py:Thread": OWN,
    "launch/worker/page_hasher.py:ThreadPoolExecutor": OWN,
    "launch/worker/wiring.py:Thread": OWN,
    "launch/worker/ranks/rank_host.py:Thread": ONE,
    "launch/worker/ranks/rank_moves.py:Thread": OWN,
    "launch/worker/ranks/rank_processes.py:ThreadPoolExecutor": TOLD,
    "launch/worker/ranks/sealed_link.py:Thread": ONE,
    "launch/worker/weights/weights_lender.py:Thread": OWN,
    "launch/worker/weights/weights_lender.py:ThreadPoolExecutor": OWN,
    "model/checkpoint/making/encrypt.py:ThreadPoolExecutor": TOLD,
    "model/checkpoint/making/presets.py:ThreadPoolExecutor": TOLD,
    "model/checkpoint/files/revision.py:ThreadPoolExecutor": TOLD,
    "model/device/cuda_memory.py:VitalThread": VITAL,
    "model/copies.py:VitalThread": VITAL,
    "model/running/follower.py:Thread": OWN,
    "model/running/follower.py:VitalThread": VITAL,
    "model/grammars/grammar_jobs.py:start_deep_thread": OWN,
    "model/parallel/lead.py:VitalThread": VITAL,
    "model/parallel/peers.py:VitalThread": VITAL,
    "model/parallel/torch_group.py:Thread": OWN,
    "model/parallel/torch_group.py:VitalThread": VITAL,
    "model/placing.py:ThreadPoolExecutor": TOLD,
    "model/running/runner.py:VitalThread": VITAL,
    "rpc/kv_event_reader.py:VitalThread": VITAL,
    "rpc/kv_events.py:VitalThread": VITAL,
    "rpc/seed_addresses.py:Thread": OWN,
    "rpc/zmq_channel.py:Timer": NOTHING,
    "transfer/memory.py:ThreadPoolExecutor": TOLD,
    "train/run.py:ThreadPoolExecutor": TOLD,
    "transfer/local.py:VitalThread": VITAL,
    "telemetry/audit.py:Thread": NOTHING,
    "telemetry/otlp.py:Thread": NOTHING,
    "transfer/net/io_loop.py:VitalThread": VITAL,
    "transfer/net/standing.py:Thread": NOTHING,
}
"""Every place that starts threads, and what a dead one means."""

DRIVER = (
    "tests/unit/launch/host/test_driver.py::test_a_fault_in_the_machine_ends_the_loop_and_is_raised"
)
FAR = (
    "tests/integration/launch/test_sealed_link.py::"
    "test_what_comes_at_one_end_leaves_at_the_other_until_one_is_gone"
)
ABORT = (
    "tests/unit/model/parallel/test_groups.py::"
    "test_a_gpu_that_does_not_give_up_its_exchanges_is_a_fault_of_the_process"
)
SHOWN_BY = {
    "integrations/vllm/lookups.py:Thread": (
        "tests/unit/integrations/vllm/test_pool_link.py::test_a_look_up_that_fails_finds_nothing"
    ),
    "integrations/vllm/mover.py:Thread": (
        "tests/unit/integrations/vllm/test_mover.py::test_a_pool_that_fails_is_a_miss"
    ),
    "kvstore/storage/disk_threads.py:VitalThread": "test_disks",
    "launch/cluster/pool.py:Thread": "test_the_registry_of_a_pool",
    "launch/cluster/supervision/process_workers.py:Thread": "test_what_looks_after_the_workers",
    "launch/cluster/supervision/worker_program.py:VitalThread": "test_what_answers_supervisors",
    "launch/host/health.py:VitalThread": "test_the_watchdog",
    "launch/host/http_server.py:VitalThread": "test_a_port_for_operators",
    "launch/host/secrets/secret_file.py:VitalThread": "test_what_follows_the_cluster_secret",
    "launch/llm.py:Thread": "test_a_callback_of_a_gateway_that_fails_ends_alone",
    "launch/pool_client/session.py:Thread": DRIVER,
    "launch/worker/ranks/far_ranks.py:Thread": FAR,
    "launch/cluster/colocated.py:Thread": (
        "tests/unit/launch/worker/test_local.py::"
        "test_a_machine_that_fails_is_told_and_its_worker_can_be_started_again"
    ),
    "launch/worker/page_hasher.py:ThreadPoolExecutor": "test_blocks_that_are_hashed",
    "launch/worker/wiring.py:Thread": (
        "tests/integration/launch/test_new_weights.py::"
        "test_a_check_that_fails_is_told_and_the_old_weights_serve_on"
    ),
    "launch/worker/ranks/rank_host.py:Thread": (
        "tests/integration/launch/test_sealed_link.py::test_who_is_not_of_the_cluster_is_refused"
    ),
    "launch/worker/ranks/rank_moves.py:Thread": "test_moves_of_a_rank",
    "launch/worker/ranks/sealed_link.py:Thread": FAR,
    "launch/worker/weights/weights_lender.py:Thread": (
        "tests/unit/launch/worker/weights/test_borrowed_weights.py::"
        "test_a_lender_that_fails_says_so_and_lends_on"
    ),
    "launch/worker/weights/weights_lender.py:ThreadPoolExecutor": (
        "tests/unit/transfer/test_file_memory.py::test_a_copy_that_fails_is_told"
    ),
    "model/device/cuda_memory.py:VitalThread": "test_copies_of_a_device",
    "model/copies.py:VitalThread": "test_layers_of_a_device",
    "model/running/follower.py:Thread": "test_what_a_rank_hears",
    "model/running/follower.py:VitalThread": "test_signs_of_a_rank",
    "model/grammars/grammar_jobs.py:start_deep_thread": (
        "tests/unit/model/grammars/test_grammar_jobs.py::test_outcomes_are_those_of_the_work"
    ),
    "model/parallel/lead.py:VitalThread": "test_what_watches_ranks",
    "model/parallel/peers.py:VitalThread": "test_what_watches_those_that_share_experts",
    "model/parallel/torch_group.py:Thread": ABORT,
    "model/parallel/torch_group.py:VitalThread": ABORT,
    "model/running/runner.py:VitalThread": "test_steps_of_a_model",
    "rpc/kv_event_reader.py:VitalThread": "test_what_reads_kv_events",
    "rpc/kv_events.py:VitalThread": "test_what_publishes_kv_events",
    "rpc/seed_addresses.py:Thread": (
        "tests/integration/launch/test_seed_addresses.py::"
        "test_a_name_that_cannot_be_one_does_not_end_the_looking_up"
    ),
    "transfer/local.py:VitalThread": "test_copies",
    "transfer/net/io_loop.py:VitalThread": "test_sockets_of_transfers",
}
"""The test in which each loop dies. Where the exception comes to who waits, or nobody waits, there
is no loop.
"""


def makers(path: Path) -> Iterator[str]:
    """Yield what starts threads in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            if name in MAKERS:
                yield name
            elif ast.unparse(node.func) == "threading.Timer":  # others have classes of that name
                yield "Timer"


def test_every_thread_is_known_and_what_its_death_means() -> None:
    package = ROOT / "mooncake"
    found = {
        f"{path.relative_to(package)}:{name}"
        for path in package.rglob("*.py")
        for name in makers(path)
    }
    assert found == THREADS.keys()
    assert {name for name, means in THREADS.items() if means == VITAL} == {
        name for name in THREADS if name.endswith(":VitalThread")
    }
    loops = {name for name, means in THREADS.items() if means not in (TOLD, NOTHING)}
    assert loops == SHOWN_BY.keys(), "each loop has a test in which it dies"
    own = str(Path(__file__).relative_to(ROOT))
    for shown in SHOWN_BY.values():
        file, _, name = shown.rpartition("::")
        defined = ast.walk(ast.parse((ROOT / (file or own)).read_text()))
        assert name in {each.name for each in defined if isinstance(each, ast.FunctionDef)}, shown


# ---------------------------------------------------------------- in real processes


@contextmanager
def worker_process(settings: WorkerSettings) -> Iterator[subprocess.Popen[str]]:
    """Run a worker of hashes in a process of its own; kill it at the end if it is still there."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serve.dying_thread"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    child.stdin.write(base64.b64encode(msgspec.msgpack.encode(settings)).decode() + "\n")
    child.stdin.flush()
    with child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))


DYING = ["watchdog", "health-port", "transfer-io-0", "MainThread"]
"""Threads of a worker that wake up by themselves or under load; the others are below."""


@pytest.mark.slow
def test_a_worker_ends_with_any_of_its_threads_and_requests_go_on(model: str) -> None:
    """Workers die one after another, each by another thread, while a client asks and asks."""
    ended: list[FinalEvent] = []

    async def ask(world: SocketWorld, stop: asyncio.Event) -> None:
        while not stop.is_set():
            prompt = [len(ended) * 7 % 90 + place for place in range(100)]
            async with asyncio.timeout(LONG_S):
                _, final = await world.generate(request(len(ended), prompt, 40))
            ended.append(final)
            await asyncio.sleep(0.02)

    async def die(world: SocketWorld, name: str) -> None:
        num_before = len(ended)
        with worker_process(world.settings_of(Role.DECODE)) as child:
            assert child.stdout is not None
            assert child.stdin is not None
            assert name in json.loads(await asyncio.to_thread(child.stdout.readline))
            await world.until(lambda: len(ended) > num_before)
            child.stdin.write(name + "\n")
            child.stdin.flush()
            assert await asyncio.to_thread(child.wait, LONG_S) == 1, name
            assert child.stderr is not None
            told = child.stderr.read()
            assert name == "MainThread" or f"thread {name} failed" in told

    async def play() -> None:
        world, stop = SocketWorld(model, prefill=1, decode=1, kvstore=0), asyncio.Event()
        async with world.driven(), asyncio.timeout(2 * LONG_S):
            with worker_process(world.settings_of(Role.PREFILL)):
                asking = asyncio.create_task(ask(world, stop))
                for name in DYING:
                    await die(world, name)
                with worker_process(world.settings_of(Role.DECODE)):
                    num_before = len(ended)
                    await world.until(lambda: len(ended) > num_before + 1)
                    stop.set()
                    await asking
        world.gateway_process.channel.close()

    asyncio.run(play())
    refused = [final.failure for final in ended if final.reason is not FinishReason.LENGTH]
    assert all(why is not None and why.message for why in refused), "while there is no decode"
    assert len(refused) < len(ended)


# ---------------------------------------------------------------- one loop after another


class Died(Exception):
    """What a loop gets."""


def die(*_: Any, **__: Any) -> Any:
    raise Died("at a place where nobody expects it")


class Faults:
    """The threads that exceptions have left."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread | None] = []
        self._came = threading.Event()

    def hear(self, fault: threading.ExceptHookArgs) -> None:
        self.threads.append(fault.thread)
        self._came.set()

    def wait(self) -> threading.Thread:
        """Wait for the first one to end, and return it."""
        assert self._came.wait(LONG_S), "the exception went nowhere"
        [thread] = self.threads
        assert thread is not None
        thread.join(LONG_S)
        return thread

    def of(self, name: str) -> None:
        """Wait for the first one, which has to be a vital thread of that name."""
        thread = self.wait()
        assert isinstance(thread, VitalThread)
        assert thread.name.startswith(name)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    found = Faults()
    monkeypatch.setattr(threading, "excepthook", found.hear)
    return found


def test_the_process_of_a_vital_thread_ends_and_of_another_does_not() -> None:
    program = """
import threading, time
from mooncake.base.threads import VitalThread
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads

end_with_vital_threads()
threading.Thread(target=lambda: 1 / 0).start()
time.sleep(0.2)
print("goes on", flush=True)
VitalThread(lambda: 1 / 0, "that one").start()
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stdout == "goes on\n"
    assert "thread that one failed, and this process ends" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_sockets_of_transfers(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = IoLoop(Gates(), "transfer-io")
    monkeypatch.setattr(loop, "_run_timers", die)
    loop.post(lambda: None)
    faults.of("transfer-io")


def test_copies(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.transfer.local.copy_part", die)
    pool = CopyPool(Gates(), 1, "copies")
    pool.run(BigJob(), [None])  # type: ignore[arg-type, list-item]
    faults.of("copies")
    pool.close()


class BigJob:
    """As much of a job as a pool looks at."""

    num_bytes = 2**30

    def expect(self, count: int) -> None:
        assert count == 1


def test_disks(faults: Faults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fault in an operation is its outcome; one that is nobody's ends the process."""
    layout = KvLayout(num_layers=1, block_tokens=4, kv_width=512, dtype="float16", fingerprint="a")
    config = SsdConfig(directory=str(tmp_path), num_bytes=2**20)
    disks = FileDisks([config], layout, num_threads=1, direct=False)
    monkeypatch.setattr("mooncake.kvstore.storage.disk_files.checksum_of", die)
    disks.attach(RegionTable(Gates()).allocate(layout.block_bytes, "arena"))
    poll = select.poll()
    poll.register(disks.fileno(), select.POLLIN)
    disks.checksum([0])
    events: list[DiskDone | DiskScanned] = []
    while len(events) < 2:
        assert poll.poll(1000 * LONG_S)
        events += disks.poll()
    [done] = [event for event in events if isinstance(event, DiskDone)]
    assert done.outcomes == [Outcome.FAILED]
    assert not faults.threads
    monkeypatch.setattr(disks._events, "put", die)
    disks.checksum([0])
    faults.of("")
    disks.close()


def test_layers_of_a_device(faults: Faults) -> None:
    class Reached:
        def reached(self) -> None:
            """It is."""

    reports: LayerReports[int] = LayerReports(die)
    reports.add(1, Reached())
    faults.of("layer-reports")


def test_copies_of_a_device(faults: Faults) -> None:
    ends = _Ends("cuda-ends")
    ends.tell(lambda: None, die)
    faults.of("cuda-ends")


def test_the_watchdog(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.launch.host.health.LOOK_S", 0.01)
    watchdog = Watchdog(die, lambda _: None)
    faults.of("watchdog")
    watchdog.close()


def test_what_looks_after_the_workers(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the gateway ends: `serve` asks every second."""
    monkeypatch.setattr(process_workers, "Supervisor", Dies)
    monkeypatch.setattr(ProcessWorkers, "_end_processes", lambda _: None)
    monkeypatch.setattr(ProcessWorkers, "_start", lambda *_: [])
    workers = ProcessWorkers(ServeConfig(model="m"), None, "s", None)  # type: ignore[arg-type]
    workers.start(Dies(), lambda *_: None)  # type: ignore[arg-type]
    faults.wait()
    assert "supervisor has ended" in workers.gone()
    assert workers.vitals()[0].failure == workers.gone()
    workers.stop()
    assert workers.gone() == ""


def test_what_answers_supervisors(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener:
        listen = settimeout = staticmethod(lambda *_: None)
        accept = staticmethod(lambda: (None, ""))

    told = dict.fromkeys(("secret", "secret_file", "advertise_host"), "")
    begin = SimpleNamespace(settings=worker_settings(), **told)
    monkeypatch.setattr(WorkerProgram, "_greet", lambda *_: begin)
    monkeypatch.setattr(WorkerProgram, "_attend", die)
    for name in ("start_log", "configure_audit", "end_with_vital_threads", "_end"):
        monkeypatch.setattr(worker_program, name, lambda *_: None)
    monkeypatch.setattr(worker_program.process, "run", lambda *_, **__: None)
    WorkerProgram(Listener()).run()  # type: ignore[arg-type]
    faults.of("supervision")


class Dies:
    """A supervisor that fails as it looks, and the gateway that it would tell."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.worker_lost = self.watch = die

    def give_up(self) -> None:
        """There is nothing to give up."""


def test_what_follows_the_cluster_secret(faults: Faults, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a" * 40)
    file.chmod(0o600)
    SecretFollower(file, die, look_s=0.01)
    file.write_text("b" * 40)
    faults.of("cluster-secret-file")


def test_what_watches_ranks(faults: Faults) -> None:
    ours, theirs = socket.socketpair()
    group = SharedGroup(0, 2, mmap.mmap(-1, shared_bytes(2)), 1.0)
    lead = Lead(group, [ours], [Ended()], 5.0)
    send(theirs, msgspec.msgpack.encode(Loaded()))
    lead.wait_until_loaded()
    send(theirs, b"what no rank says")
    faults.of("rank-watch")
    lead.close()
    theirs.close()


def test_signs_of_a_lead(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lead, "tell", die)
    monkeypatch.setattr(lead_module, "SIGN_S", 0.01)
    ours, theirs = socket.socketpair()
    lead = Lead(SharedGroup(0, 2, mmap.mmap(-1, shared_bytes(2)), 1.0), [ours], [Ended()], 5.0)
    send(theirs, msgspec.msgpack.encode(Loaded()))
    lead.wait_until_loaded()
    faults.of("lead-signs")
    lead.close()
    theirs.close()


class Ended:
    """The process of a rank, that has ended."""

    def kill(self) -> None:
        """It is dead."""

    def wait(self, timeout: float | None = None) -> int:
        return 0


def test_what_watches_those_that_share_experts(faults: Faults) -> None:
    ours, theirs = socket.socketpair()
    peers = Peers(0, ["decode-0", "decode-1"], {1: ours}, {}, -1, 5.0)
    peers.watch(die, lambda: None, lambda: None)
    theirs.sendall(struct.pack("<q", 1))
    faults.of("peer-watch")
    peers.close()
    theirs.close()


def test_steps_of_a_model(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in a step is the step's; one outside of any ends the process."""
    model = ours(source_of(truth("plain")))
    runner = ModelRunner(model, kv_for(model.spec), Sampler(model.spec.vocab_size), num_threads=1)
    monkeypatch.setattr(runner, "_emit", die)
    runner.submit(StepPlan(step_id=0, starts=[], slots=[], ended=[]))
    faults.of("model-runner")
    runner.close()


def test_blocks_that_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for checksums gets some that no peer agrees with."""
    layout = KvLayout(num_layers=1, block_tokens=4, kv_width=8, dtype="float16", fingerprint="a")
    region = RegionTable(Gates()).allocate(4 * layout.block_bytes, "pages")
    hasher = PageHasher(region, PageArray(layout, 4))
    monkeypatch.setattr(hasher, "checksum", die)
    hasher.start([0, 1, 2])
    poll = select.poll()
    poll.register(hasher.fileno(), select.POLLIN)
    assert poll.poll(1000 * LONG_S)
    assert [done.checksums for done in hasher.poll()] == [[0, 0, 0]]
    hasher.close()


def test_a_port_for_operators(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socketserver.BaseServer.service_actions", die)
    server = HttpServer("127.0.0.1", 0, {}, "health-port")
    faults.of("health-port")
    server.close()


def test_the_registry_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends: without it the dead hold memory."""
    ended = Codes(monkeypatch, "mooncake.launch.cluster.pool")
    registry = object.__new__(Registry)
    monkeypatch.setattr(registry, "_driver", Dying(), raising=False)
    registry._drive()
    assert ended.codes == [1]


def test_moves_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, and with it all ranks: the lead hears that."""
    ended = Codes(monkeypatch, "mooncake.launch.worker.ranks.rank_moves")
    memory = object.__new__(_Memory)
    monkeypatch.setattr(memory, "_driver", Dying(), raising=False)
    memory._run()
    assert ended.codes == [1]


class Codes:
    """The codes with which a module would have ended its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        self.codes: list[int] = []
        monkeypatch.setattr(f"{module}.os._exit", self.codes.append)


class Dying:
    """A driver whose machine has failed."""

    def run(self) -> None:
        die()


def test_what_a_rank_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Codes(monkeypatch, "mooncake.model.running.follower")
    ours, theirs = socket.socketpair()
    send(theirs, b"what no lead says")
    _hear(ours, queue.SimpleQueue(), None, Guesses())  # type: ignore[arg-type]
    assert ended.codes == [0]
    for end in (ours, theirs):
        end.close()


def test_what_publishes_kv_events(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvEventPublisher, "_publish_queued", die)
    publisher = KvEventPublisher(
        KvEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint=None), lambda: 0.0
    )
    publisher.publish([])
    faults.of("kv-events")
    publisher.close()
    publisher._context.destroy(linger=0)


def test_what_reads_kv_events(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvEventReader, "_turn", die)
    reader = KvEventReader([EventSource("http://engine", "tcp://127.0.0.1:1")])
    faults.of("kv-event-reader")
    reader.close()
    reader._context.destroy(linger=0)


def test_signs_of_a_rank(faults: Faults) -> None:
    VitalThread(_give_signs, "signs", die, 0.01).start()
    faults.of("signs")


def test_a_callback_of_a_gateway_that_fails_ends_alone() -> None:
    """The loop of an event loop outlives what runs in it; `LLM` waits for what it has started."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    loop.call_soon_threadsafe(die)

    async def answer() -> str:
        return "it goes on"

    assert asyncio.run_coroutine_threadsafe(answer(), loop).result(LONG_S) == "it goes on"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG_S)
    loop.close()
