"""The disks of a pool node as its settings name them, looked at before anything is written there.

A mistake is told at the start, by name: later a disk that fails only means fewer blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

from mooncake.base import ConfigError, KvLayout, format_bytes
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.disk_files import FileDisks


def open_disks(config: KvStoreConfig, layout: KvLayout) -> FileDisks:
    """Open the directories of `config.ssd`; without any, what is left hashes blocks.

    Raises:
        ConfigError: a directory cannot be used: not there, not writable, too small, somebody's.
    """
    for disk in config.ssd:
        _check(disk)
    return FileDisks(config.ssd, layout, num_threads=config.ssd_threads)


def _check(disk: SsdConfig) -> None:
    directory = Path(disk.directory)
    try:
        if not directory.exists():
            # Only the last step is made: a whole path made up would lie on the system's disk when
            # the one that was meant is not mounted.
            directory.mkdir()
        if not directory.is_dir():
            raise ConfigError(f"ssd: {directory} is a file; name a directory")
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"ssd: {directory} is not writable for user {os.geteuid()}")
        room = os.statvfs(directory)
        ours = sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())
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
