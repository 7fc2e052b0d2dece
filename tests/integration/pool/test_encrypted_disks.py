"""A pool node with encrypted disks: warm after a restart, also with a new key, and nothing on the
disk that could be read.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from mooncake.base import Tier
from mooncake.cli import main as cli
from tests.support.kvstore.pool_process import PoolProcess, until
from tests.support.model.checkpoints import write_config_only

KEYS = ["ab" * 32, "cd" * 32, "ef" * 32]
NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only(tmp_path_factory.mktemp("model") / "small")


def test_blocks_outlive_restarts_and_a_change_of_the_key(model: Path, tmp_path: Path) -> None:
    disk, key = tmp_path / "ssd", tmp_path / "key"
    words = (
        "--dram", "1MiB", "--ssd", f"{disk}:8MiB", "--ssd-min-uses", "1", "--ssd-write-at", "0",
        "--ssd-encryption", "--ssd-key-file", str(key),
    )  # fmt: skip
    draw, blocks = random.Random(1), {}

    def is_stored(count: int):
        return lambda: session.stat().num_ssd_stored == count

    key.write_text(KEYS[0])
    with PoolProcess(model, tmp_path / "log1", *words) as node, node.session() as session:
        for _ in range(NUM_BLOCKS):
            blocks[draw.randbytes(16)] = draw.randbytes(session.block_bytes)
        assert session.put(blocks) == list(blocks)
        until(is_stored(NUM_BLOCKS), "every block goes down at once")
        node.stop(signal.SIGKILL)
    stored = b"".join(file.read_bytes() for file in disk.iterdir())
    for block_key, data in blocks.items():
        assert block_key not in stored
        assert not any(data[at : at + 16] in stored for at in range(0, len(data), 512))
    key.write_text(f"{KEYS[1]}\n{KEYS[0]}\n")
    with PoolProcess(model, tmp_path / "log2", *words) as node, node.session() as session:
        until(is_stored(NUM_BLOCKS), "blocks under the old key are found again")
        assert session.exists(list(blocks)) == [Tier.SSD] * NUM_BLOCKS
        assert session.get(list(blocks)) == list(blocks.values())
        more = {draw.randbytes(16): draw.randbytes(session.block_bytes) for _ in range(3)}
        session.put(more)
        until(is_stored(NUM_BLOCKS + 3), "new blocks go down beside them")
        node.stop(signal.SIGKILL)
    key.write_text(KEYS[1])
    with PoolProcess(model, tmp_path / "log3", *words) as node, node.session() as session:
        until(is_stored(3), "blocks under the new key are found")
        assert session.get(list(more)) == list(more.values())
        assert session.get(list(blocks)) == []
        assert f"{NUM_BLOCKS} blocks are encrypted with a key that is not here" in node.output
        node.stop(signal.SIGKILL)
    for log in tmp_path.glob("log*"):
        assert not any(each in log.read_text() for each in KEYS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ssd", "{}:8MiB", "--ssd-encryption"],
         "ssd-key: --ssd-encryption takes 32 random bytes"),
        (["--ssd", "{}:8MiB", "--ssd-key-file", "{}/key"], "the key is used only with"),
        (["--ssd-encryption"], "ssd-encryption: there are no disks to encrypt; add --ssd DIR:SIZE"),
        (["--ssd", "{}:8MiB", "--ssd-encryption", "--ssd-key-command", "false"],
         "ssd-key-command: false ended with 1"),
    ],
)  # fmt: skip
def test_mistakes_show_at_the_start(
    words: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MOONCAKE_SSD_KEY", raising=False)
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "s")
    given = [word.format(tmp_path) for word in words]
    assert cli.run(["serve", str(model), "--role", "kvstore", "--dry-run", *given]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
