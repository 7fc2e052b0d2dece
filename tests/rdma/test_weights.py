"""Weights that an engine lends by RDMA: NICs read them from windows, fewer than pieces."""

from __future__ import annotations

import json
import queue
import random
from pathlib import Path

import pytest

from mooncake.base import WorkerRef
from mooncake.base.messages import BorrowWeights, WeightsLent
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.weights import weights_lender
from mooncake.launch.worker.weights.borrowed_weights import _Lender
from mooncake.launch.worker.weights.weights_lender import WeightsLender
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import file_digests, weights_revision
from mooncake.transfer.factory import TransferConfig
from mooncake.transfer.net.endpoint import Protection
from tests.rdma.test_nics import num_packets
from tests.support.transfer.driving import NEEDS_RDMA

pytestmark = NEEDS_RDMA


class Answers:
    """The channel of a lender's worker, which keeps what was sent."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[WeightsLent] = queue.SimpleQueue()

    def send(self, address: str, message: WeightsLent) -> None:
        del address
        self.sent.put(message)


def one_tensor(name: str, draw: random.Random, num_bytes: int) -> bytes:
    """Return the content of a file with a tensor of random bytes."""
    named = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({name: named}).encode()
    return len(header).to_bytes(8, "little") + header + draw.randbytes(num_bytes)


def test_weights_are_read_over_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_lender, "MAX_WINDOWS", 2)
    (tmp_path / "config.json").write_text("{}")
    draw = random.Random(1)
    contents = {f"model-{n}.safetensors": one_tensor(f"w{n}", draw, n * 2**20) for n in range(1, 5)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    digests = file_digests([PlainBytes(tmp_path / name) for name in contents])
    revision = weights_revision(b"{}", digests)
    config = TransferConfig(
        secret="s", host="h", protocols=["rdma", "tcp"], protection=Protection.MAC
    )
    credential, answers = own_credential("s", CredentialRole.WORKER), Answers()
    lender = WeightsLender("decode-0", config, credential, None)
    lender.serve(answers, revision, tmp_path)  # type: ignore[arg-type]
    lender.ask(BorrowWeights(asker=WorkerRef("new", "1", "tcp://x"), ticket=3, revision=revision))
    lent = answers.sent.get(timeout=300)
    assert lent.segment is not None, lent.error
    assert {"rdma", "stage"} <= lent.segment.endpoints.keys()
    before = num_packets("rxe0") + num_packets("rxe1")
    reader = _Lender(lent, config, credential)
    for file in lent.files:
        assert reader.read(file.name, 0, file.num_bytes) == contents[file.name]
    num_bytes = sum(file.num_bytes for file in lent.files)
    counters = reader._transfer.counters()
    assert counters["transfer_rdma_bytes"] == num_bytes
    assert counters["transfer_tcp_bytes"] == 0
    assert num_packets("rxe0") + num_packets("rxe1") - before > num_bytes / 1024  # one has 1 KiB
    reader.close()
    lender.close()
