"""Weights that are read from another worker: which bytes are given away, and how reading ends."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from mooncake.base import (
    CheckpointError,
    ConfigError,
    MonotonicClock,
    TransferError,
    WorkerRef,
)
from mooncake.base.messages import BorrowWeights, LentFile, Refused, WeightsLent
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.weights import borrowed_weights, piece_reader, weights_lender
from mooncake.launch.worker.weights.borrowed_weights import (
    BorrowedWeights,
    Borrower,
    Loan,
    _Lender,
    _loan,
    borrowed_by_rank,
    check_lent,
)
from mooncake.launch.worker.weights.piece_reader import LoanEnded, PieceReader
from mooncake.launch.worker.weights.weights_lender import WeightsLender
from mooncake.model.checkpoint.files import revision
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles, LentFiles
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import piece_sums, pieces_of, sum_of
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.opening import ModelSource
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.local import InprocFabric
from tests.support.serve.plain_settings import worker_settings
from tests.support.waiting import LONG_S

PIECE = 1000
SIZES = (2 * PIECE + 7, 5 * PIECE, 3)


def sums_of(content: bytearray) -> bytes:
    pieces = pieces_of(len(content), PIECE)
    return b"".join(sum_of(memoryview(content)[begin:end]) for begin, end in pieces)


class Lent:
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
            self.lender.register(memoryview(content), "weights", read_only=True)
            for content in self.contents
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
def loan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lent]:
    monkeypatch.setattr(piece_reader, "PIECE_BYTES", PIECE)
    made = Lent()
    yield made
    made.borrower.close()
    made.lender.close()


def ranges(count: int, seed: int) -> Iterator[tuple[int, int, int]]:
    draw = random.Random(seed)
    for _ in range(count):
        file = draw.randrange(len(SIZES))
        begin, end = sorted(draw.randrange(SIZES[file] + 1) for _ in range(2))
        yield file, begin, end


def test_any_bytes_are_those_of_the_file(loan: Lent) -> None:
    reader = loan.reader()
    for file, begin, end in ranges(200, 1):
        assert reader.read(file, begin, end) == loan.contents[file][begin:end]
    for file, content in enumerate(loan.contents):
        assert reader.read(file, 0, len(content)) == content


def test_threads_may_read_side_by_side_with_two_places(loan: Lent) -> None:
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
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_bytes_that_somebody_keeps_stay_as_they_are(loan: Lent) -> None:
    """Whatever is read meanwhile, and however many are kept."""
    reader = loan.reader()
    kept = [
        (file, begin, reader.read(file, begin, begin + 50))
        for file in (0, 1)
        for begin in range(0, SIZES[file] - 50, PIECE // 2)
    ]
    for file, begin, view in kept:
        assert view == loan.contents[file][begin : begin + 50]


def test_a_byte_that_was_changed_is_found(loan: Lent) -> None:
    loan.contents[1][3 * PIECE + 5] ^= 1
    reader = loan.reader()
    assert reader.read(1, 0, 100) == loan.contents[1][:100]
    with pytest.raises(LoanEnded, match=r"1\.safetensors, bytes from 3000 on, came from decode-0"):
        reader.read(1, 3 * PIECE, 3 * PIECE + 1)


def test_a_lender_that_ends_in_mid_read_ends_the_loan(loan: Lent) -> None:
    reader = loan.reader()
    assert reader.read(0, 0, 10) == loan.contents[0][:10]
    loan.lender.unregister(loan.regions[1])
    with pytest.raises(LoanEnded, match="decode-0 lends no more"):
        reader.read(1, 4 * PIECE, 5 * PIECE)
    with pytest.raises(LoanEnded):
        reader.read(0, 0, 10)


def test_a_file_that_is_shorter_than_at_the_lender_before_ends_the_loan(loan: Lent) -> None:
    """Nobody waits for bytes that do not come."""
    with pytest.raises(LoanEnded, match="decode-0 lends fewer bytes of 0"):
        loan.reader().read(0, 3 * PIECE, 3 * PIECE + 1)


def test_a_lender_that_sends_nothing_is_taken_for_lost(
    loan: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, num_waits = loan.reader(), []
    monkeypatch.setattr(loan.borrower, "wait", lambda _: num_waits.append(0) or ())
    with pytest.raises(LoanEnded, match="decode-0 lends no more: it has sent nothing for 60 s"):
        reader.read(0, 0, 10)
    assert len(num_waits) == piece_reader.LOST_S / piece_reader._POLL_S


def test_a_lender_that_is_slow_is_waited_for(loan: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is enough."""
    reader, waits, num_waits = loan.reader(), loan.borrower.wait, [0]

    def wait(timeout_s: float) -> Any:
        num_waits[0] += 1
        return waits(timeout_s) if num_waits[0] > 500 else ()

    monkeypatch.setattr(loan.borrower, "wait", wait)
    monkeypatch.setattr(
        loan.borrower, "counters", lambda: {"transfer_tcp_bytes": num_waits[0] // 100}
    )
    assert reader.read(0, 0, 10) == loan.contents[0][:10]


def test_a_lender_that_ends_is_not_blamed_for_bytes_that_did_not_come(
    loan: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have noticed the end while this one waited for the piece."""
    monkeypatch.setattr(piece_reader, "NUM_AHEAD", 0)
    loan.contents[0][0] ^= 1
    reader = loan.reader()
    asks = reader._asked

    def ended(key: tuple[int, int]) -> Any:
        place = asks(key)
        assert place is not None
        place.state = piece_reader._State.HERE
        reader._error = LoanEnded("decode-0 lends no more")
        return place

    monkeypatch.setattr(reader, "_asked", ended)
    with pytest.raises(LoanEnded, match="decode-0 lends no more"):
        reader.read(0, 0, 10)


def test_the_memory_is_free_after_the_loan(loan: Lent) -> None:
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


CREDENTIAL = own_credential("s", CredentialRole.WORKER)
TCP = TransferConfig(secret="s", host="h", protocols=["tcp"])


def lender_of(
    path: Path, channel: Channel, revision: str = "", name: str = "decode-0"
) -> WeightsLender:
    """Return the lender of an engine that serves the weights in a directory."""
    lender = WeightsLender(name, TCP, CREDENTIAL, None)
    revision = revision or CheckpointFiles.open(path).revision()
    lender.serve(channel, revision, path)  # type: ignore[arg-type]
    return lender


def asked(lender: WeightsLender, channel: Channel, wanted: str) -> WeightsLent:
    lender.ask(question(wanted))
    assert channel.has_sent.acquire(timeout=LONG_S)
    found = channel.sent[-1]
    assert isinstance(found, WeightsLent)
    return found


def answered(path: Path, wanted: str | None = None) -> tuple[WeightsLent, WeightsLender]:
    channel = Channel()
    lender = lender_of(path, channel)
    return asked(lender, channel, wanted or CheckpointFiles.open(path).revision()), lender


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """All transfer engines see each other in this process."""
    config = TransferConfig(secret="s", host="h", protocols=["inproc"], num_copy_threads=0)
    fabric = InprocFabric()
    for module in (weights_lender, borrowed_weights):
        monkeypatch.setattr(
            module, "open_transfer",
            lambda _, engine_id, clock, **__: open_transfer(
                config, engine_id, clock, fabric=fabric
            ),
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
        assert "is not a file of weights" in check_lent(bad, config, wanted)
    lender.close()
    lender.close()


@pytest.mark.parametrize("failing", ["open", "pin"])
def test_where_a_nic_cannot_be_used_weights_go_by_tcp(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both the lender and who reads find that out."""
    by_rdma = dataclasses.replace(TCP, protocols=["rdma", "tcp"])
    opened: list[Sequence[str]] = []

    def refuse(*_: object, **__: object) -> None:
        raise TransferError("a NIC pins no memory")

    def opens(open_plain: Any) -> Any:
        def with_nic(way: TransferConfig, *rest: Any, **more: Any) -> Any:
            opened.append(way.protocols)
            if "rdma" not in way.protocols:
                return open_plain(way, *rest, **more)
            if failing == "open":
                raise ConfigError("this machine shows no RDMA device")
            transfer = open_plain(way, *rest, **more)
            monkeypatch.setattr(transfer, "register_device", refuse)
            monkeypatch.setattr(transfer, "allocate", refuse)
            return transfer

        return with_nic

    for module in (weights_lender, borrowed_weights):
        monkeypatch.setattr(module, "open_transfer", opens(module.open_transfer))
    lender, channel = WeightsLender("decode-0", by_rdma, CREDENTIAL, None), Channel()
    wanted = CheckpointFiles.open(checkpoint).revision()
    lender.serve(channel, wanted, checkpoint)  # type: ignore[arg-type]
    lent = asked(lender, channel, wanted)
    assert lent.segment is not None, lent.error
    reader = _Lender(lent, by_rdma, CREDENTIAL)
    name = lent.files[0].name
    assert reader.read(name, 3, 900) == (checkpoint / name).read_bytes()[3:900]
    assert opened == [["rdma", "tcp"], ["tcp"]] * 2
    why = "no RDMA device" if failing == "open" else "pins no memory"
    assert [why in record.message for record in caplog.records if "by TCP" in record.message] == [
        True, True,
    ]  # fmt: skip
    reader.close()
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
    assert channel.has_sent.acquire(timeout=LONG_S)
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


def without_weights(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":  # their index may be there
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


class Loans:
    """Engines that lend one checkpoint to a directory, and those that are asked when a loan
    ends.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, path: Path, *others: WeightsLent
    ) -> None:
        self.lent, self._lender = answered(checkpoint)
        self.without: list[set[str]] = []
        """The lenders that were not wanted, each time that engines were asked."""
        self._others = [*others]
        revision = CheckpointFiles.open(checkpoint).revision()
        self.loan = Loan(self.lent, revision, ["tcp://gateway"], TCP)
        self.path = path
        monkeypatch.setattr(borrowed_weights, "borrow", self._borrow)

    def _borrow(self, *_: object, without: set[str], **__: object) -> WeightsLent | str:
        self.without.append(set(without))
        return self._others.pop(0) if self._others else "no engine runs yet"

    def weights(self) -> BorrowedWeights:
        return BorrowedWeights(self.loan, self.path, CREDENTIAL, None, None)

    def source(self) -> ModelSource:
        return source_of(self.path, self.weights().files)


def ends_after(monkeypatch: pytest.MonkeyPatch, num_reads: int, name: str = "decode-0") -> None:
    """Let an engine lend no more after some reads."""
    reads, left = _Lender.read, [num_reads]

    def read(self: _Lender, file: str, begin: int, end: int) -> memoryview:
        left[0] -= self.name == name
        if left[0] < 0 and self.name == name:
            raise LoanEnded(f"{name} lends no more: it ended")
        return reads(self, file, begin, end)

    monkeypatch.setattr(_Lender, "read", read)


def spoiled(lent: WeightsLent) -> WeightsLent:
    """Return a loan of bytes that have other checksums by now."""
    files = [
        LentFile(each.name, each.num_bytes, each.region, each.digest, bytes(len(each.sums)))
        for each in lent.files
    ]
    return msgspec.structs.replace(lent, files=files)


@pytest.mark.parametrize("num_reads", [0, 1, 9])
def test_a_loan_that_ends_goes_on_with_files(
    checkpoint: Path, num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the header, or in mid-load."""
    ends_after(monkeypatch, num_reads)
    loans = Loans(monkeypatch, checkpoint, checkpoint)
    source = loans.source()
    source.load()
    assert source.revision == loans.loan.revision
    assert len(loans.without) == 1
    source.close()


def test_a_loan_goes_on_when_a_nic_does_not_let_go_of_the_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The transfer engine is closed all the same."""

    def refuse(*_: object) -> None:
        raise TransferError("a NIC keeps its registration")

    ends_after(monkeypatch, 0)
    weights = Loans(monkeypatch, checkpoint, checkpoint).weights()
    lender: Any = weights._source
    monkeypatch.setattr(lender._transfer, "unregister", refuse)
    name, content = next(iter(weights.files.contents.items()))
    assert content.read(3, 90) == (checkpoint / name).read_bytes()[3:90]
    assert lender._transfer._closed
    assert any("a NIC keeps its registration" in each for each in caplog.messages)
    weights.close()


@pytest.mark.parametrize("num_reads", [0, 1, 9])
def test_a_loan_that_ends_goes_on_with_another_engine(
    checkpoint: Path, tmp_path: Path, num_reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_after(monkeypatch, num_reads)
    channel = Channel()
    second = lender_of(checkpoint, channel, name="decode-1")
    other = asked(second, channel, CheckpointFiles.open(checkpoint).revision())
    bare = without_weights(checkpoint, tmp_path / "bare")
    loans = Loans(monkeypatch, checkpoint, bare, other)
    source = loans.source()
    source.load()
    assert loans.lent.segment is not None
    assert loans.without == [{loans.lent.segment.engine_id}]
    source.close()


def test_an_engine_that_lends_wrong_bytes_is_not_taken_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel()
    second = lender_of(checkpoint, channel, name="decode-1")
    wanted = CheckpointFiles.open(checkpoint).revision()
    other = spoiled(asked(second, channel, wanted))
    loans = Loans(monkeypatch, checkpoint, without_weights(checkpoint, tmp_path / "bare"), other)
    loans.loan = msgspec.structs.replace(loans.loan, lent=spoiled(loans.lent))
    weights = loans.weights()
    content, *_ = weights.files.contents.values()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"decode-1 with another checksum.*no weights"):
            content.read(0, 10)
    assert loans.lent.segment is not None
    assert other.segment is not None
    bad = {loans.lent.segment.engine_id, other.segment.engine_id}
    assert loans.without == [{loans.lent.segment.engine_id}, bad]
    weights.close()


def test_of_engines_that_answer_one_whose_loan_has_ended_is_passed_over(
    checkpoint: Path,
) -> None:
    (first, _), (second, _) = answered(checkpoint), answered(checkpoint)
    own, config = first.asker, (checkpoint / "config.json").read_bytes()
    wanted = CheckpointFiles.open(checkpoint).revision()
    assert first.segment is not None
    refs = [WorkerRef(name, "1", f"tcp://{name}") for name in ("a", "b")]
    answers = [msgspec.structs.replace(each, ticket=n) for n, each in enumerate((first, second))]
    without = {first.segment.engine_id}
    with Path(os.devnull).open("rb") as ready:
        channel: Any = Engines(ready, *answers)
        assert _loan(channel, own, refs, config, wanted, without) == answers[1]
        alone: Any = Engines(ready, answers[0])
        found = _loan(alone, own, refs[:1], config, wanted, without)
    assert found == "decode-0: its loan has ended once"


def test_threads_that_read_as_a_loan_ends_read_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_after(monkeypatch, 20)
    channel = Channel()
    second = lender_of(checkpoint, channel, name="decode-1")
    other = asked(second, channel, CheckpointFiles.open(checkpoint).revision())
    bare = without_weights(checkpoint, tmp_path / "bare")
    loans = Loans(monkeypatch, checkpoint, bare, other)
    weights = loans.weights()
    content, *_ = weights.files.contents.values()
    whole = (checkpoint / content.path.name).read_bytes()
    wrong: list[object] = []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(30):
            begin, end = sorted(draw.randrange(len(whole)) for _ in range(2))
            if content.read(begin, end) != whole[begin:end]:
                wrong.append((begin, end))

    threads = [threading.Thread(target=read, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert len(loans.without) == 1
    weights.close()


def test_files_of_other_weights_do_not_take_the_place_of_lent_ones(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_after(monkeypatch, 9)
    other = init_checkpoint("k2-nano", 2, tmp_path / "other")
    source = Loans(monkeypatch, checkpoint, other).source()
    with pytest.raises(CheckpointError, match="other holds other weights"):
        source.load()
    source.close()


def test_a_loan_that_ends_without_files_says_what_to_do(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_after(monkeypatch, 9)
    bare = without_weights(checkpoint, tmp_path / "bare")
    source = Loans(monkeypatch, checkpoint, bare).source()
    with pytest.raises(CheckpointError, match=r"lends no more.*has no weights either: start this"):
        source.load()
    source.close()


def test_a_model_is_loaded_without_files(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loans = Loans(monkeypatch, checkpoint, without_weights(checkpoint, tmp_path / "bare"))
    weights = loans.weights()
    lender = weights._source
    assert isinstance(lender, _Lender)
    source = source_of(loans.path, weights.files)
    source.load()
    assert source.revision == CheckpointFiles.open(checkpoint).revision()
    assert loans.without == []
    with pytest.raises(LoanEnded, match="given back"):
        lender.read(loans.lent.files[0].name, 0, 1)
    source.close()


def test_another_rank_reads_what_its_lead_has_borrowed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loans = Loans(monkeypatch, checkpoint, without_weights(checkpoint, tmp_path / "bare"))
    told = msgspec.msgpack.encode(loans.loan)
    files = borrowed_by_rank(told, "127.0.0.1", str(loans.path), None, worker_settings().options)
    content, *_ = files.contents.values()
    assert content.read(5, 900) == (checkpoint / content.path.name).read_bytes()[5:900]
    files.close()


# ---------------------------------------------------------------- from one life to the next


def test_a_process_asks_once_for_the_weights_of_its_lives(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sleep, gateways may know no engine."""
    bare = without_weights(checkpoint, tmp_path / "bare")
    lent, _ = answered(checkpoint)
    asked_for: list[tuple[Path, object]] = []

    def borrow(_: object, path: Path, *__: object, engines: object) -> WeightsLent:
        asked_for.append((path, engines))
        return lent

    monkeypatch.setattr(borrowed_weights, "borrow", borrow)
    borrower = Borrower([], bare, TCP, CREDENTIAL, lambda: None, None)
    revision = CheckpointFiles.open(checkpoint).revision()
    for path in (bare, bare, tmp_path / "not there"):
        found = borrower.borrow(path, revision)
        assert isinstance(found, BorrowedWeights)
        found.close()
    assert asked_for == [(bare, ())]
    engine = WorkerRef("a", "1", "tcp://a")
    found = borrower.borrow(checkpoint, revision, [engine])
    assert isinstance(found, BorrowedWeights)
    found.close()
    assert asked_for[1:] == [(checkpoint, [engine])]


def test_a_lender_lends_on_through_the_lives_of_its_workers(
    checkpoint: Path, tmp_path: Path
) -> None:
    """What it has checked to serve next is lent, too, until it serves something else."""
    new = init_checkpoint("k2-nano", 3, tmp_path / "new")
    served, checked = (CheckpointFiles.open(path).revision() for path in (checkpoint, new))
    channel = Channel()
    lender = lender_of(checkpoint, channel)
    first = asked(lender, channel, served)
    lender.leave()
    lender.ask(question(served))
    assert channel.sent == [first], "no worker is there to answer"
    lender.serve(channel, served, checkpoint)  # type: ignore[arg-type]
    assert "it serves revision" in asked(lender, channel, checked).error
    lender.offer(checked, tmp_path / "removed meanwhile")
    lender.offer(checked, new)
    loan = asked(lender, channel, checked)
    assert loan.segment is not None
    assert asked(lender, channel, served).segment == first.segment
    lender.serve(channel, checked, new)  # type: ignore[arg-type]
    assert asked(lender, channel, checked).segment == loan.segment
    assert "it serves revision" in asked(lender, channel, served).error
    lender.close()


def test_of_weights_that_were_checked_the_last_are_lent(checkpoint: Path, tmp_path: Path) -> None:
    """What was lent of others is given back. What is served stays, also if it is checked again."""
    served, channel = CheckpointFiles.open(checkpoint).revision(), Channel()
    lender = lender_of(checkpoint, channel)
    first = asked(lender, channel, served)
    found: list[tuple[str, WeightsLent]] = []
    for number in range(weights_lender.MAX_CHECKED + 1):
        path = init_checkpoint("k2-nano", 3 + number, tmp_path / str(number))
        wanted = CheckpointFiles.open(path).revision()
        lender.offer(wanted, path)
        lender.offer(served, checkpoint)
        found.append((wanted, asked(lender, channel, wanted)))
    (ended, lent), *others = found
    assert "it serves revision" in asked(lender, channel, ended).error
    assert [asked(lender, channel, each).segment for each, _ in others] == [
        each.segment for _, each in others
    ]
    assert asked(lender, channel, served).segment == first.segment
    reader = _Lender(lent, TCP, CREDENTIAL)
    with pytest.raises(LoanEnded, match="lends no more"):
        reader.read(lent.files[0].name, 0, 10)
    reader.close()
    lender.close()


def test_files_that_have_changed_are_not_lent(checkpoint: Path, tmp_path: Path) -> None:
    path = init_checkpoint("k2-nano", 3, tmp_path / "new")
    wanted, channel = CheckpointFiles.open(path).revision(), Channel()
    lender = lender_of(path, channel, wanted)
    for file in checkpoint.glob("*.safetensors"):
        file_of_other = path / file.name
        file_of_other.unlink()
        file_of_other.write_bytes(file.read_bytes())
    assert "has other weights by now" in asked(lender, channel, wanted).error
    lender.close()


def test_digests_of_before_do_not_vouch_for_sums_of_now(checkpoint: Path, tmp_path: Path) -> None:
    """An earlier release kept digests without sums, and a disk has changed a byte since then."""
    path = init_checkpoint("k2-nano", 3, tmp_path / "new")
    files = [PlainBytes(file) for file in sorted(path.glob("*.safetensors"))]
    wanted = CheckpointFiles.open(path).revision()
    right = revision.file_digests(files)
    for file in checkpoint.glob("*.safetensors"):
        (path / file.name).write_bytes(file.read_bytes())
    kept = {
        each.identity: right[each.path.name] for each in map(PlainBytes, path.glob("*.safetensors"))
    }
    (tmp_path / revision.CACHE_NAME).write_text(json.dumps(kept))
    lender, channel = WeightsLender("decode-0", TCP, CREDENTIAL, str(tmp_path)), Channel()
    lender.serve(channel, wanted, path)  # type: ignore[arg-type]
    assert "has other weights by now" in asked(lender, channel, wanted).error
    lender.close()


@pytest.mark.parametrize("grant", [0, 2**16])
def test_no_worker_writes_to_what_is_lent(loan: Lent, grant: int) -> None:
    before = bytes(loan.contents[0])
    own = loan.borrower.allocate(100, "bytes to write")
    operation = TransferOp(own.region_id, 0, loan.files[0].region, 0, 100)
    loan.borrower.submit(
        TransferBatch(op=Op.WRITE, peer=loan.lender.segment, ops=[operation], grant=grant)
    )
    [done] = loan.borrower.wait(LONG_S)
    assert "(weights) is only read" in str(done.error)
    assert loan.contents[0] == before


def test_an_engine_registers_its_files_for_reading(checkpoint: Path) -> None:
    lent, lender = answered(checkpoint)
    [offer] = lender._offers.values()
    assert offer.transfer is not None
    assert all(offer.transfer._regions._regions[each.region].read_only for each in lent.files)
    lender.close()


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
