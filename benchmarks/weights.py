"""Reading encrypted weights beside plain ones: `python -m benchmarks weights --model DIR`.

Writes an encrypted copy beside a plain one and reads all tensors of both in turn, by threads into
memory that is there, as a model is loaded: from the disk (the page cache is told to forget the
files before each round) and from the page cache. Prints the median of each and of their ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mooncake.crypto.keys import KEY_BYTES, Key, KeyRing
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.safetensors_file import SafetensorsFile
from mooncake.model.checkpoint.making.encrypt import encrypt_checkpoint
from mooncake.model.checkpoint.weights import view_tensor


def forget(directory: Path) -> None:
    """Have the page cache forget the files, so that reads go to the disk."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(directory: Path, keys: KeyRing | None, threads: int, out: torch.Tensor) -> float:
    """Return the GB/s at which all tensors come to memory that has been touched before."""
    began_s = time.perf_counter()
    homes = CheckpointFiles.open(directory, keys).homes.values()
    tasks, at = [], 0
    for file, name in homes:
        tasks.append((file, name, at))
        at += file.tensors[name].num_bytes
    assert at <= len(out)

    def copy(task: tuple[SafetensorsFile, str, int]) -> None:
        file, name, start = task
        tensor = view_tensor(file, name)
        out[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, tasks))
    return at / (time.perf_counter() - began_s) / 1e9


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks weights", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("checkpoints/k2-small"))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keys = KeyRing([Key(os.urandom(KEY_BYTES))])
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        plain, sealed = Path(directory) / "plain", Path(directory) / "sealed"
        shutil.copytree(args.model, plain)
        num_bytes = sum(content.num_bytes for content in CheckpointFiles.open(plain).contents)
        began_s = time.perf_counter()
        encrypt_checkpoint(plain, sealed, keys)
        took_s = time.perf_counter() - began_s
        print(f"{num_bytes / 2**30:.2f} GiB, {args.threads} threads, {args.rounds} rounds")
        print(f"encrypting, disk to disk: {num_bytes / took_s / 1e9:.2f} GB/s")
        out = torch.zeros(num_bytes, dtype=torch.uint8)
        for where in ("disk", "page cache"):
            rates: dict[str, list[float]] = {"plain": [], "encrypted": []}
            for number in range(args.rounds + 1):
                for kind, path, ring in (("plain", plain, None), ("encrypted", sealed, keys)):
                    if where == "disk":
                        forget(path)
                    rate = read_all(path, ring, args.threads, out)
                    if number:
                        rates[kind].append(rate)
            ratio = statistics.median(
                ours / theirs
                for ours, theirs in zip(rates["encrypted"], rates["plain"], strict=True)
            )
            medians = {kind: statistics.median(found) for kind, found in rates.items()}
            print(
                f"from the {where:10}  plain {medians['plain']:5.2f} GB/s   encrypted "
                f"{medians['encrypted']:5.2f} GB/s   {ratio:.2f}x"
            )
    return 0
