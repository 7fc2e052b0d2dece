"""Opens the disks that a pool node's settings name, and checks them before anything is written.

A wrong setting ends the start with an error that names it: later, a disk that fails only means
fewer blocks.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.base import ConfigError, KvLayout, format_bytes
from mooncake.crypto.keys import HOW, KeyRing, KeySource
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.launch.host.secrets.key_source import needed_keys

if TYPE_CHECKING:  # those who only check need neither
    from mooncake.kvstore.storage.disk_files import FileDisks


def open_disks(
    config: KvStoreConfig, layout: KvLayout, key_source: KeySource | None = None
) -> FileDisks:
    """Open the directories of `config.ssd`. The result hashes blocks even if there are no disks.

    key_source: where the keys for blocks are; None: blocks are not encrypted.

    Raises:
        ConfigError: a directory is missing, not writable, too small, or in use; or there is no key,
            or no client for the bucket.
    """
    from mooncake.kvstore.storage.disk_files import FileDisks

    check_disks(config, make=True)
    keys = _keys(config, key_source)
    bucket = None
    if config.object_store is not None:
        from mooncake.kvstore.storage.bucket import Bucket
        from mooncake.kvstore.storage.s3 import S3Store

        num_threads = config.object_threads
        store = S3Store(config.object_store, num_threads, config.ssd_load_timeout_s)
        bucket = Bucket(config.object_store, layout, store, keys, num_threads)
    return FileDisks(config.ssd, layout, num_threads=config.ssd_threads, keys=keys, bucket=bucket)


def check_disks(
    config: KvStoreConfig, key_source: KeySource | None = None, *, make: bool = False
) -> None:
    """Raise ConfigError if a directory of `config.ssd` cannot be used, or if the key of its blocks,
    or the client of a bucket, is missing. With `make`, missing directories are made.
    """
    for disk in config.ssd:
        _check(disk, make=make)
    if config.object_store is not None and find_spec("botocore") is None:
        raise ConfigError(
            "object-store: the client for S3 is not installed: pip install 'mooncake-serve[s3]'"
        )
    _keys(config, key_source)


def _keys(config: KvStoreConfig, key_source: KeySource | None) -> KeyRing | None:
    if key_source is None or not (config.ssd or config.object_store):
        return None
    return needed_keys(key_source, f"--ssd-encryption takes {HOW}")


def _check(disk: SsdConfig, *, make: bool) -> None:
    directory = place = Path(disk.directory)
    try:
        if not directory.exists():
            # Only the last directory is made: when the disk that was meant is not mounted, a whole
            # path would be made on the system's disk.
            if make:
                directory.mkdir()
            else:
                place = directory.parent
        if not place.is_dir() and place.exists():
            raise ConfigError(f"ssd: {place} is a file; name a directory")
        if place.exists() and not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"ssd: {place} is not writable for user {os.geteuid()}; change its owner or its "
                "mode"
            )
        room = os.statvfs(place)
        files = directory.iterdir() if place is directory else ()
        ours = sum(path.stat().st_blocks * 512 for path in files if path.is_file())
    except FileNotFoundError as error:
        raise ConfigError(
            f"ssd: {directory.parent} is not there; create it, or mount the disk first"
        ) from error
    except OSError as error:
        raise ConfigError(f"ssd: {directory} cannot be used: {error.strerror}") from error
    free = room.f_bavail * room.f_frsize + ours
    if disk.num_bytes > free:
        raise ConfigError(
            f"ssd: {directory} has room for {format_bytes(free)}, not for "
            f"{format_bytes(disk.num_bytes)}; give less, or another disk"
        )
