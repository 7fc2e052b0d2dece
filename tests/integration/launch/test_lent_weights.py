"""A worker joins from a directory without weights, reads them from an engine that serves, and gives
the same tokens; and a lender that is killed while it is read from.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import mooncake
from mooncake.base import MonotonicClock
from mooncake.base.messages import LentFile
from mooncake.launch.worker import borrowed_weights
from mooncake.launch.worker.borrowed_weights import PieceReader
from mooncake.model.checkpoint.files.checkpoint_files import LoanEnded
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import PIECE_BYTES, file_digests, piece_sums
from mooncake.transfer.factory import TransferConfig, open_transfer
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

SECRET = "a secret of the test"
PROMPTS = [[(7 * number + token) % 400 + 5 for token in range(60)] for number in range(3)]


def without_weights(model: Path, folder: Path) -> Path:
    """Return a directory that has what the checkpoint has, but no weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors" and file.name != "weights-digests.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_without_files_serves_what_it_read_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    model = nano_checkpoint(tmp_path)
    bare = str(without_weights(model, tmp_path / "bare"))
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    alone = [list(each.outputs[0].token_ids) for each in sampled]
    seed = f"tcp://127.0.0.1:{free_port()}"
    engine = ("--join", seed, "--kv-cache-memory-bytes", "32MiB")
    borrows = (bare, *engine, "--weights-from", "engines")
    with ExitStack() as opened:
        gateway, prefill, decode = (
            opened.enter_context(ServerProcess("--role", *words))
            for words in (
                ("gateway", str(model), "--join-port", seed.rpartition(":")[2], "--port", "0",
                 "--dtype", "float32"),
                ("prefill", str(model), *engine),
                ("decode", str(model), *engine),
            )
        )  # fmt: skip
        gateway.wait_until_serving()
        for each in (prefill, decode):
            each.wait_for("serves")
        assert [gateway.complete(prompt, 12) for prompt in PROMPTS] == alone
        second = opened.enter_context(ServerProcess("--role", "decode", *borrows))
        second.wait_for("serves")
        read = r"weights are read from (prefill|decode)-\S+, which serves them"
        second.wait_for(read)
        decode.stop()
        third = opened.enter_context(ServerProcess("--role", "prefill", *borrows))
        third.wait_for(read)
        third.wait_for("serves")
        prefill.stop()
        # Only the two that have no files are left.
        assert [gateway.complete(prompt, 12) for prompt in PROMPTS] == alone
        third.stop()
        # What was read from another engine is not lent on, and says so.
        last = opened.enter_context(ServerProcess("--role", "prefill", *borrows))
        last.wait_for("has no weights, and no engine lends any.*no plain files")
        assert last.process.wait(60) != 0


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
    monkeypatch.setattr(borrowed_weights, "NUM_AHEAD", 0)
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
