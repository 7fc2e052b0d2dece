"""Weights that are read from another worker: which bytes are given away, and how reading ends."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from mooncake.base import CheckpointError, MonotonicClock, WorkerRef
from mooncake.base.messages import BorrowWeights, LentFile, Refused, WeightsLent
from mooncake.base.rights import CredentialRole
from mooncake.identity import own_credential
from mooncake.launch.worker import borrowed_weights, weights_lender
from mooncake.launch.worker.borrowed_weights import PieceReader, _loan, check_lent
from mooncake.launch.worker.weights_lender import WeightsLender
from mooncake.model.checkpoint.files import revision
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles, LentFiles, LoanEnded
from mooncake.model.checkpoint.files.file_bytes import FileBytes, PlainBytes
from mooncake.model.checkpoint.files.revision import piece_sums, pieces_of, sum_of
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.opening import ModelSource
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.local import InprocFabric
from tests.support.serve.plain_settings import worker_settings

PIECE = 1000
SIZES = (2 * PIECE + 7, 5 * PIECE, 3)


def sums_of(content: bytearray) -> bytes:
    pieces = pieces_of(len(content), PIECE)
    return b"".join(sum_of(memoryview(content)[begin:end]) for begin, end in pieces)


class Loan:
    """Files of random bytes, lent from one transfer engine to another in this process."""

    def __init__(self) -> None:
        draw, fabric = random.Random(7), InprocFabric()
        self.lender, self.borrower = (
            open_transfer(
                TransferConfig(secret="s", host="h", protocols=["inproc"], num_copy_threads=0),
                name, MonotonicClock(), fabric=fabric,
            )
            for name in ("lender", "borrower")
        )  # fmt: skip
        self.contents = [bytearray(draw.randbytes(size)) for size in SIZES]
        self.regions = [
            self.lender.register(memoryview(content), "weights") for content in self.contents
        ]
        self.files = [
            LentFile(
                f"{number}.safetensors", len(content), region.region_id, "d" * 64,
                sums_of(content),
            )
            for number, (content, region) in enumerate(
                zip(self.contents, self.regions, strict=True)
            )
        ]  # fmt: skip

    def reader(self, num_places: int = 4) -> PieceReader:
        return PieceReader(self.borrower, self.lender.segment, self.files, "decode-0", num_places)


@pytest.fixture
def loan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loan]:
    monkeypatch.setattr(borrowed_weights, "PIECE_BYTES", PIECE)
    made = Loan()
    yield made
    made.borrower.close()
    made.lender.close()


def ranges(count: int, seed: int) -> Iterator[tuple[int, int, int]]:
    draw = random.Random(seed)
    for _ in range(count):
        file = draw.randrange(len(SIZES))
        begin, end = sorted(draw.randrange(SIZES[file] + 1) for _ in range(2))
        yield file, begin, end


def test_any_bytes_are_those_of_the_file(loan: Loan) -> None:
    reader = loan.reader()
    for file, begin, end in ranges(200, 1):
        assert reader.read(file, begin, end) == loan.contents[file][begin:end]
    for file, content in enumerate(loan.contents):
        assert reader.read(file, 0, len(content)) == content


def test_threads_may_read_side_by_side_with_two_places(loan: Loan) -> None:
    reader = loan.reader(2)
    wrong: list[object] = []

    def read(seed: int) -> None:
        for file, begin, end in ranges(60, seed):
            if reader.read(file, begin, end) != loan.contents[file][begin:end]:
                wrong.append((file, begin, end))

    threads = [threading.Thread(target=read, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_bytes_that_somebody_keeps_stay_as_they_are(loan: Loan) -> None:
    """Whatever is read meanwhile, and however many are kept."""
    reader = loan.reader()
    kept = [
        (file, begin, reader.read(file, begin, begin + 50))
        for file in (0, 1)
        for begin in range(0, SIZES[file] - 50, PIECE // 2)
    ]
    for file, begin, view in kept:
        assert view == loan.contents[file][begin : begin + 50]


def test_a_byte_that_was_changed_is_found(loan: Loan) -> None:
    loan.contents[1][3 * PIECE + 5] ^= 1
    reader = loan.reader()
    assert reader.read(1, 0, 100) == loan.contents[1][:100]
    with pytest.raises(LoanEnded, match=r"1\.safetensors, bytes from 3000 on, came from decode-0"):
        reader.read(1, 3 * PIECE, 3 * PIECE + 1)


def test_a_lender_that_ends_in_mid_read_ends_the_loan(loan: Loan) -> None:
    reader = loan.reader()
    assert reader.read(0, 0, 10) == loan.contents[0][:10]
    loan.lender.unregister(loan.regions[1])
    with pytest.raises(LoanEnded, match="decode-0 lends no more"):
        reader.read(1, 4 * PIECE, 5 * PIECE)
    with pytest.raises(LoanEnded):
        reader.read(0, 0, 10)


def test_the_memory_is_free_after_the_loan(loan: Loan) -> None:
    reader = loan.reader()
    reader.read(0, 0, 10)
    memory = weakref.ref(reader._memory)
    reader.close()
    gc.collect()
    assert memory() is None
    with pytest.raises(LoanEnded, match="given back"):
        reader.read(0, 0, 10)


# ---------------------------------------------------------------- whole checkpoints


class Channel:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.has_sent = threading.Semaphore(0)

    def send(self, address: str, message: Any) -> None:
        del address
        self.sent.append(message)
        self.has_sent.release()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint("k2-nano", 1, tmp_path_factory.mktemp("weights") / "nano")


def source_of(path: Path, lent: LentFiles | None = None) -> ModelSource:
    return ModelSource(path, "bfloat16", worker_settings().options, lent=lent)


def question(wanted: str) -> BorrowWeights:
    return BorrowWeights(asker=WorkerRef("new", "1", "tcp://x"), ticket=3, revision=wanted)


def answered(path: Path, wanted: str | None = None) -> tuple[WeightsLent, WeightsLender]:
    source, channel = source_of(path), Channel()
    config = TransferConfig(secret="s", host="h", protocols=["tcp"])
    credential = own_credential("s", CredentialRole.WORKER)
    lender = WeightsLender(
        source.revision,
        lambda: source.plain_contents,
        "decode-0",
        channel,  # type: ignore[arg-type]
        config,
        credential,
        None,
    )
    lender.ask(question(wanted or source.revision))
    assert channel.has_sent.acquire(timeout=60)
    return channel.sent[0], lender


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransferConfig(secret="s", host="h", protocols=["inproc"], num_copy_threads=0)
    monkeypatch.setattr(
        weights_lender, "open_transfer",
        lambda *_, **__: open_transfer(config, "lender", MonotonicClock()),
    )  # fmt: skip


def test_an_engine_lends_the_files_of_its_revision(checkpoint: Path) -> None:
    lent, lender = answered(checkpoint)
    config = (checkpoint / "config.json").read_bytes()
    wanted = CheckpointFiles.open(checkpoint).revision()
    assert lent.ticket == 3
    assert check_lent(lent, config, wanted) == ""
    assert "not those of the cluster's" in check_lent(lent, config + b" ", wanted)
    file = lent.files[0]
    for wrong in (
        LentFile("../a.safetensors", file.num_bytes, file.region, file.digest, file.sums),
        LentFile(file.name, file.num_bytes, file.region, file.digest, b""),
    ):
        bad = WeightsLent(
            asker=lent.asker, ticket=3, lender="decode-0", segment=lent.segment, files=[wrong]
        )
        assert "is no file of weights" in check_lent(bad, config, wanted)
    lender.close()
    lender.close()


def test_an_engine_lends_no_other_weights_than_it_serves(checkpoint: Path) -> None:
    lent, lender = answered(checkpoint, "0" * 16)
    assert lent.segment is None
    assert "it serves revision" in check_lent(lent, b"", "0" * 16)
    lender.close()


def test_a_lender_that_fails_says_so_and_lends_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = weights_lender.open_transfer
    monkeypatch.setattr(weights_lender, "open_transfer", lambda *_, **__: 1 / 0)
    lent, lender = answered(checkpoint)
    assert "ZeroDivisionError" in lent.error
    monkeypatch.setattr(weights_lender, "open_transfer", opens)
    lender.ask(question(CheckpointFiles.open(checkpoint).revision()))
    channel = lender._channel
    assert isinstance(channel, Channel)
    assert channel.has_sent.acquire(timeout=60)
    assert channel.sent[-1].segment is not None
    lender.close()


def test_who_asks_behind_too_many_others_is_refused_at_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_lender, "MAX_ASKERS", 0)
    lent, lender = answered(checkpoint)
    assert lent.segment is None
    assert "others wait" in lent.error
    lender.close()


class Engines:
    """A channel on which engines have answered."""

    def __init__(self, ready: IO[bytes], *answers: object) -> None:
        """`ready` is a file that can always be read."""
        self.fileno = ready.fileno
        self.asked: list[BorrowWeights] = []
        self._answers = [*answers]

    def send(self, address: str, message: BorrowWeights) -> None:
        del address
        self.asked.append(message)

    def receive(self) -> list[object]:
        return [self._answers.pop(0)]


def test_an_engine_of_an_earlier_release_does_not_keep_others_from_lending(
    checkpoint: Path,
) -> None:
    lent, lender = answered(checkpoint)
    lender.close()
    own, config = lent.asker, (checkpoint / "config.json").read_bytes()
    wanted = CheckpointFiles.open(checkpoint).revision()
    old, new = (WorkerRef(name, "1", f"tcp://{name}") for name in ("old", "new"))
    refused = Refused(asker=own, ticket=0, message="borrow_weights", reason="it has no such kind")
    second = msgspec.structs.replace(lent, ticket=1)
    with Path(os.devnull).open("rb") as ready:
        channel: Any = Engines(ready, refused, second)
        assert _loan(channel, own, [old, new], config, wanted) == second
        assert [each.ticket for each in channel.asked] == [0, 1]
        alone: Any = Engines(ready, refused)
        found = _loan(alone, own, [old], config, wanted)
    assert found == "an engine refuses: it has no such kind"


class Breaking:
    """The bytes of a file that ends to be lent after some reads."""

    def __init__(self, content: FileBytes, num_reads: int) -> None:
        self.path, self.num_bytes = content.path, content.num_bytes
        self._content = content
        self._left = num_reads

    def read(self, begin: int, end: int) -> memoryview:
        self._left -= 1
        if self._left < 0:
            raise LoanEnded("decode-0 lends no more: it ended")
        return self._content.read(begin, end)


def lent_by(path: Path, num_reads: int, end: Callable[[], None]) -> LentFiles:
    files = CheckpointFiles.open(path)
    digests = revision.file_digests(files.contents)
    contents: Sequence[FileBytes] = files.contents
    return LentFiles({each.path.name: Breaking(each, num_reads) for each in contents}, digests, end)


def without_weights(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":  # their index may be there
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("num_reads", [0, 1, 9])
def test_a_loan_that_ends_goes_on_with_files(checkpoint: Path, num_reads: int) -> None:
    """At the header, or in mid-load."""
    ended: list[int] = []
    source = source_of(checkpoint, lent_by(checkpoint, num_reads, lambda: ended.append(1)))
    wanted = source.revision
    source.load()
    assert source.revision == wanted
    assert source.plain_contents, "it can lend in its turn"
    assert ended == [1]
    source.close()


class Part:
    """Something that a model has loaded."""


def test_what_was_loaded_before_a_loan_ended_is_freed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's frames hold it, and some of them refer to the error."""
    source = source_of(checkpoint, lent_by(checkpoint, 10**6, lambda: None))
    parts: list[weakref.ref[Part]] = []
    model = Part()

    def load(*_: object) -> Part:
        if parts:
            assert parts[0]() is None
            return model
        part, error = Part(), LoanEnded("decode-0 lends no more")
        parts.append(weakref.ref(part))
        raise error

    monkeypatch.setattr(source._device, "load", load)
    found: object = source._load(None, None)
    assert found is model


def test_a_loan_that_ends_without_files_says_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    path, ended = without_weights(checkpoint, tmp_path / "bare"), list[int]()
    source = source_of(path, lent_by(checkpoint, 9, lambda: ended.append(1)))
    with pytest.raises(CheckpointError, match=r"lends no more.*has no weights either: start this"):
        source.load()
    assert ended == [1]


def test_a_model_is_loaded_without_files(checkpoint: Path, tmp_path: Path) -> None:
    path, ended = without_weights(checkpoint, tmp_path / "bare"), list[int]()
    source = source_of(path, lent_by(checkpoint, 10**6, lambda: ended.append(1)))
    source.load()
    assert source.revision == CheckpointFiles.open(checkpoint).revision()
    assert source.plain_contents == []
    assert ended == [1]


def test_sums_are_kept_where_files_are_hashed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [PlainBytes(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    wanted = piece_sums(contents)
    assert all(len(sums) == 16 for sums in wanted.values())
    revision.file_digests(contents, tmp_path)
    monkeypatch.setattr(revision, "_hash_files", lambda *_: pytest.fail("hashed again"))
    assert piece_sums(contents, tmp_path) == wanted


def test_sums_are_made_where_an_earlier_release_kept_digests_only(
    checkpoint: Path, tmp_path: Path
) -> None:
    contents = [PlainBytes(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    digests = revision.file_digests(contents, tmp_path)
    kept = tmp_path / revision.CACHE_NAME

    entries = {
        key: value for key, value in json.loads(kept.read_text()).items() if len(value) == 64
    }
    kept.write_text(json.dumps(entries))
    assert revision.file_digests(contents, tmp_path) == digests
    assert piece_sums(contents, tmp_path) == piece_sums(contents)
