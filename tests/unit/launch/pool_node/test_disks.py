"""The directories of a pool node at its start: what is wrong with one is said by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mooncake.base import ConfigError, KvLayout
from mooncake.kvstore.config import KvStoreConfig, ObjectStoreConfig, SsdConfig
from mooncake.launch.pool_node.disks import open_disks

LAYOUT = KvLayout(num_layers=2, block_tokens=16, kv_width=64, dtype="float32", fingerprint="t")
MIB = 1 << 20


def config(*directories: Path, num_bytes: int = MIB) -> KvStoreConfig:
    ssd = [SsdConfig(directory=str(each), num_bytes=num_bytes) for each in directories]
    return KvStoreConfig(ssd=ssd)


def test_directories_are_made_and_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        disks = open_disks(config(tmp_path / "a", tmp_path / "b"), LAYOUT)
        assert len(disks.num_slots) == 2
        assert min(disks.num_slots) > 0
        disks.close()


def test_without_disks_blocks_are_hashed_all_the_same() -> None:
    disks = open_disks(config(), LAYOUT)
    assert (list(disks.num_slots), disks.can_hash) == ([], True)
    disks.close()


def test_a_disk_that_is_not_mounted_is_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mnt is not there; create it, or mount the disk first"):
        open_disks(config(tmp_path / "mnt" / "nvme0"), LAYOUT)
    assert not (tmp_path / "mnt").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file; name a directory"):
        open_disks(config(tmp_path / "file"), LAYOUT)
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        open_disks(config(tmp_path / "file" / "below"), LAYOUT)


def test_more_than_the_file_system_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has room for .*, not for 1.*TiB; give less"):
        open_disks(config(tmp_path, num_bytes=1 << 60), LAYOUT)


def test_what_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="is not writable for user"):
        open_disks(config(tmp_path), LAYOUT)


def test_a_directory_of_another_process_is_named_and_the_others_are_given_free(
    tmp_path: Path,
) -> None:
    taken, free = tmp_path / "taken", tmp_path / "free"
    first = open_disks(config(taken), LAYOUT)
    with pytest.raises(ConfigError, match="taken is in use by another process"):
        open_disks(config(free, taken), LAYOUT)
    open_disks(config(free), LAYOUT).close()
    first.close()


def test_a_bucket_needs_its_client_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setattr("mooncake.launch.pool_node.disks.find_spec", lambda name: None)
    open_disks(KvStoreConfig(), LAYOUT).close()
    bucket = ObjectStoreConfig(bucket="b", num_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"pip install 'mooncake-serve\[s3\]'"):
        open_disks(KvStoreConfig(object_store=bucket), LAYOUT)
