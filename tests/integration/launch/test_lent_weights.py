"""Engines read the weights from another one, as they join from a directory without weights and as
the cluster gets new ones, and give the same tokens; and a lender that is killed while it is read
from.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.error import HTTPError

import pytest

import mooncake
from mooncake.base import MonotonicClock, WorkerRef
from mooncake.base.messages import BorrowWeights, LentFile, WeightsLent
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.host.processes.descendants import has_ended
from mooncake.launch.worker.weights import piece_reader, weights_lender
from mooncake.launch.worker.weights.borrowed_weights import _Lender
from mooncake.launch.worker.weights.piece_reader import LoanEnded, PieceReader
from mooncake.launch.worker.weights.weights_lender import MAX_LOOPS, WeightsLender
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import PIECE_BYTES, file_digests, piece_sums
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.tcp.backend import TcpBackend
from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.transfer.driving import move
from tests.support.waiting import LONG_S, wait_until

SECRET = "a secret of the test"
READ = " were read from "
SERVES = r"\) serves; Ctrl-C"
PROMPTS = [[(7 * number + token) % 400 + 5 for token in range(60)] for number in range(3)]


def without_weights(model: Path, folder: Path) -> Path:
    """Return a directory that has what the checkpoint has, but no weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors" and file.name != "weights-digests.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def alone(model: Path) -> list[list[int]]:
    """Return what one process says with these weights."""
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in sampled]


def said(gateway: ServerProcess) -> list[list[int]]:
    return [gateway.complete(prompt, 12) for prompt in PROMPTS]


def begun(opened: ExitStack, model: Path, *more: str) -> tuple[ServerProcess, tuple[str, ...]]:
    """Start a gateway; return it and the words of an engine that joins it."""
    # Whoever asks for any free port does not get it, and the gateway may listen there.
    holds = opened.enter_context(socket.socket())
    holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holds.bind(("127.0.0.1", 0))
    port = str(holds.getsockname()[1])
    gateway = opened.enter_context(
        ServerProcess(
            "--role", "gateway", str(model), "--join-port", port, "--port", "0",
            "--dtype", "float32", *more,
        )
    )  # fmt: skip
    return gateway, ("--join", f"tcp://127.0.0.1:{port}", "--kv-cache-memory-bytes", "32MiB")


def await_known(gateway: ServerProcess, number: int) -> None:
    """Wait until the gateway knows so many engines, which say that they serve before it does."""
    wait_until(lambda: len(gateway.worker_pids()) == number, f"{number} engines are known")


def check_borrowed(server: ServerProcess, num_ranks: int) -> None:
    """Check that so many ranks of an engine have read weights of another one."""
    server.wait_for(READ, number=num_ranks)
    assert sum(READ in line for line in list(server.lines)) == num_ranks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_without_files_serve_what_they_read_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of one rank and of several."""
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    model = nano_checkpoint(tmp_path)
    bare = str(without_weights(model, tmp_path / "bare"))
    expected = alone(model)
    with ExitStack() as opened:
        gateway, engine = begun(opened, model)
        borrows = (bare, *engine, "--weights-from", "engines")
        prefill, decode = (
            opened.enter_context(ServerProcess("--role", role, str(model), *engine))
            for role in ("prefill", "decode")
        )
        gateway.wait_until_serving()
        for each in (prefill, decode):
            each.wait_for(SERVES)
        await_known(gateway, 2)
        assert said(gateway) == expected
        second = opened.enter_context(
            ServerProcess("--role", "decode", *borrows, "-tp", "2", "-dcp", "2", "-ep")
        )
        second.wait_for(SERVES)
        read = r"weights are read from (prefill|decode)-\S+, which serves them"
        second.wait_for(read)
        decode.stop()
        third = opened.enter_context(ServerProcess("--role", "prefill", *borrows, "-pp", "2"))
        third.wait_for(read)
        third.wait_for(SERVES)
        for each in (second, third):
            check_borrowed(each, 2)
        await_known(gateway, 3)
        prefill.stop()
        # Only the two that have no files are left.
        assert said(gateway) == expected
        third.stop()
        # What was read from another engine is not lent on, and says so.
        last = opened.enter_context(ServerProcess("--role", "prefill", *borrows))
        last.wait_for("has no weights, and no engine lends any.*no plain files")
        assert last.process.wait(LONG_S) != 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_new_weights_reach_engines_whose_machines_have_no_files_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/proc/self/cwd` stands for a directory that is not the same on each machine."""
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    model = nano_checkpoint(tmp_path)
    bare = str(without_weights(model, tmp_path / "bare"))
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    new = init_checkpoint("k2-nano", 1, here / "step-1")
    before, after = alone(model), alone(new)
    assert before != after
    with ExitStack() as opened:
        gateway, engine = begun(opened, model, "--enable-sleep-mode")
        borrows = (bare, *engine, "--weights-from", "engines")
        engines = [
            opened.enter_context(ServerProcess("--role", "prefill", str(model), *engine, cwd=here))
        ]
        engines[0].wait_for(SERVES)
        engines += [
            opened.enter_context(ServerProcess("--role", role, *borrows, *ranks, cwd=there))
            for role, ranks in (("decode", ("-tp", "2")), ("prefill", ()))
        ]
        for each in engines:
            each.wait_for(SERVES)
        gateway.wait_until_serving()
        await_known(gateway, 3)
        assert said(gateway) == before
        gateway.post("/pause?mode=wait", {})
        # No machine has these: all engines go on with the weights that they have.
        with pytest.raises(HTTPError) as refused:
            gateway.post("/update_weights", {"path": "/proc/self/cwd/step-2"}, 300)
        with refused.value as error:
            assert error.code == 400
        gateway.post("/resume", {})
        assert said(gateway) == before
        gateway.post("/pause?mode=wait", {})
        state = gateway.post("/update_weights", {"path": "/proc/self/cwd/step-1"}, 300)
        assert state["weights_path"] == "/proc/self/cwd/step-1"
        gateway.post("/resume", {})
        assert said(gateway) == after
        engines[0].stop()
        # Only the two that have no files are left, one of each role.
        assert said(gateway) == after


def begun_group(opened: ExitStack, model: str, *engine: str) -> tuple[ServerProcess, list[int]]:
    """Start two decode engines that share their experts, by one command; return it and descriptors
    of the engines' processes.
    """
    words = ("--role", "decode", model, *engine, "-dp", "2", "-ep")
    group = opened.enter_context(ServerProcess(*words))
    started = r"decode-\S+-{} \(pid (\d+)\) has started"
    found = [group.wait_for(started.format(number)) for number in (0, 1)]
    processes = [os.pidfd_open(int(match.group(1))) for match in found]
    for each in processes:
        opened.callback(os.close, each)
    return group, processes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_that_share_their_experts_read_them_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its own part. They leave together."""
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    model = nano_checkpoint(tmp_path)
    bare = str(without_weights(model, tmp_path / "bare"))
    expected = alone(model)
    with ExitStack() as opened:
        gateway, engine = begun(opened, model)
        prefill = opened.enter_context(ServerProcess("--role", "prefill", str(model), *engine))
        prefill.wait_for(SERVES)
        group, processes = begun_group(opened, bare, *engine, "--weights-from", "engines")
        check_borrowed(group, 2)
        gateway.wait_until_serving()
        await_known(gateway, 3)
        assert said(gateway) == expected
        assert group.stop() == (0, [])
        assert all(has_ended(each, LONG_S) for each in processes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_engines_that_join_and_share_their_experts_all_end_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the command that has started them, and says why."""
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    model = nano_checkpoint(tmp_path)
    with ExitStack() as opened:
        _, engine = begun(opened, model)
        group, processes = begun_group(opened, str(model), *engine)
        signal.pidfd_send_signal(processes[0], signal.SIGKILL)
        group.wait_for("has ended, and with it those that share its experts")
        assert group.process.wait(LONG_S) == 1
        assert all(has_ended(each, LONG_S) for each in processes)


class Answers:
    """The channel of a lender's worker, which keeps what was sent."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[WeightsLent] = queue.SimpleQueue()

    def send(self, address: str, message: WeightsLent) -> None:
        del address
        self.sent.put(message)


def test_ranks_that_read_at_once_have_all_loops_of_their_lender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TCP, with MACs: eight ranks, and what each of them reads."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    model = nano_checkpoint(tmp_path)
    revision = CheckpointFiles.open(model).revision()
    config = TransferConfig(secret=SECRET, host="h", protocols=["tcp"], protection=Protection.MAC)
    credential, answers = own_credential(SECRET, CredentialRole.WORKER), Answers()
    lender = WeightsLender("decode-0", config, credential, None)
    with ExitStack() as opened:
        opened.callback(lender.close)
        lender.serve(answers, revision, model)  # type: ignore[arg-type]
        lender.ask(
            BorrowWeights(asker=WorkerRef("new", "1", "tcp://x"), ticket=3, revision=revision)
        )
        lent = answers.sent.get(timeout=LONG_S)
        segment = lent.segment
        assert segment is not None, lent.error
        content = (model / lent.files[0].name).read_bytes()

        def read(rank: int) -> bool:
            transfer = open_transfer(config, f"rank {rank}", MonotonicClock())
            opened.callback(transfer.close)
            reader = PieceReader(transfer, segment, lent.files, "decode-0")
            opened.callback(reader.close)
            return reader.read(0, 0, len(content)) == content

        with ThreadPoolExecutor(MAX_LOOPS) as ranks:
            assert all(ranks.map(read, range(MAX_LOOPS)))
        [offer] = lender._offers.values()
        assert offer.transfer is not None
        [backend] = offer.transfer.backends
        assert isinstance(backend, TcpBackend)
        assert len({session.loop for session in backend._server.listener.sessions}) == MAX_LOOPS


def test_weights_are_read_through_fewer_windows_than_there_are_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NICs read them, but by TCP. Nobody writes to what is lent, and no window is lost."""
    model = nano_checkpoint(tmp_path)
    revision = CheckpointFiles.open(model).revision()
    by_tcp = TransferConfig(secret=SECRET, host="h", protocols=["tcp"], protection=Protection.MAC)
    config = dataclasses.replace(by_tcp, protocols=["rdma", "tcp"])
    opens = weights_lender.open_transfer
    monkeypatch.setattr(weights_lender, "MAX_WINDOWS", 2)
    monkeypatch.setattr(
        weights_lender, "open_transfer",
        lambda way, *rest, **more: opens(
            dataclasses.replace(way, protocols=["tcp"]), *rest, **more
        ),
    )  # fmt: skip
    credential, answers = own_credential(SECRET, CredentialRole.WORKER), Answers()
    lender = WeightsLender("decode-0", config, credential, None)
    with ExitStack() as opened:
        opened.callback(lender.close)
        lender.serve(answers, revision, model)  # type: ignore[arg-type]
        lender.ask(
            BorrowWeights(asker=WorkerRef("new", "1", "tcp://x"), ticket=3, revision=revision)
        )
        lent = answers.sent.get(timeout=LONG_S)
        assert len(lent.files) > 2, "pieces"
        assert lent.segment is not None, lent.error

        def read(_: int) -> bool:
            reader = _Lender(lent, by_tcp, credential)
            opened.callback(reader.close)
            return all(
                reader.read(each.name, 0, each.num_bytes) == (model / each.name).read_bytes()
                for each in lent.files
            )

        with ThreadPoolExecutor(4) as ranks:
            assert all(ranks.map(read, range(4)))
        writer = open_transfer(by_tcp, "writer", MonotonicClock())
        opened.callback(writer.close)
        own = writer.allocate(100, "bytes to write")
        operation = TransferOp(own.region_id, 0, lent.files[0].region, 0, 100)
        for grant in (0, 2**16):
            done = move(writer, Op.WRITE, lent.segment, [operation], grant=grant)
            assert "(weights) is only read" in str(done.error)
        [offer] = lender._offers.values()
        assert offer.transfer is not None
        staging = offer.transfer.staging_engine
        assert staging is not None
        assert staging._owner is not None
        assert staging._owner.windows.num_slots == 2
        offer.transfer.check_integrity()


def lend(path: Path, pipe: Connection) -> None:
    transfer = open_transfer(
        TransferConfig(secret=SECRET, host="h", protocols=["tcp"]), "lender", MonotonicClock()
    )
    content = PlainBytes(path)
    region = transfer.register(content.read(0, content.num_bytes), "weights")
    name = path.name
    digest, sums = file_digests([content])[name], piece_sums([content])[name]
    pipe.send((transfer.segment, LentFile(name, content.num_bytes, region.region_id, digest, sums)))
    pipe.recv()


@pytest.mark.timeout(120)
def test_a_lender_that_is_killed_in_mid_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_reader, "NUM_AHEAD", 0)
    content = os.urandom(2**20) * 64
    path = tmp_path / "model.safetensors"
    path.write_bytes(content * 2)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend, args=(path, theirs), daemon=True)
    process.start()
    segment, file = ours.recv()
    transfer = open_transfer(
        TransferConfig(secret=SECRET, host="h", protocols=["tcp"]), "borrower", MonotonicClock()
    )
    try:
        reader = PieceReader(transfer, segment, [file], "decode-0", 1)
        assert reader.read(0, 5, 50) == content[5:50]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(LoanEnded, match="decode-0 lends no more"):
            reader.read(0, PIECE_BYTES, PIECE_BYTES + 1)
    finally:
        transfer.close()
