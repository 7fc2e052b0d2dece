"""The image for CPUs, built and run; `tests.support.image_build` says what stands in for what."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake import __version__
from tests.arch.test_images import TOP
from tests.support.image_build import RunningImage, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(560),
    pytest.mark.skipif(why_not() != "", reason=why_not()),
]

LIMIT_S = 240.0
SERVE = (
    "serve", "--colocated", "--device", "cpu", "--dtype", "bfloat16", "--max-model-len", "256",
    "--kv-cache-memory-bytes", "16MiB",
)  # fmt: skip
"""k2-demo, which is in the package."""
ASK = """
import json, urllib.request
body = {"prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ask = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                             {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(ask, timeout=200))["usage"]["completion_tokens"])
"""


REVISION = "0123456789abcdef" * 2 + "01234567"
NATIVE = "from mooncake_kernels.native import build; print(build.used())"


def locked(name: str) -> str:
    """Return the hash of a package in the lock of the image."""
    text = (TOP / "docker" / "locks" / "cpu.txt").read_text()
    return re.search(rf"(?m)^{name}==\S+ --hash=sha256:(\w+)$", text)[1]


def wait_for(holds: Callable[[], bool], image: RunningImage) -> None:
    """Wait until `holds`; when it does not, or the image ends, say what it said."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert image.process.poll() is None, image.log.read_text()
        assert time.monotonic() < end_s, image.log.read_text()
        time.sleep(0.5)


def test_the_image_is_built_and_answers_as_its_user_on_a_read_only_root(tmp_path: Path) -> None:
    with RunningImage("cpu", SERVE, tmp_path, {"REVISION": REVISION}) as image:
        wait_for(lambda: "\nstarted\n" in image.log.read_text() and image.is_healthy(), image)
        wait_for(lambda: image.run("python", "-c", ASK).stdout.strip() == "4", image)
        status = Path(f"/proc/{image.init}/status").read_text()
        assert "Uid:\t1000\t1000\t1000\t1000\n" in status
        assert "CapBnd:\t0000000000000000\n" in status
        assert image.run("id", "-nu").stdout.strip() == "mooncake"
        refused = image.run("touch", "/opt/mooncake/x", as_root=True)
        assert "Read-only file system" in refused.stderr
        where = image.run("python", "-c", "import mooncake; print(mooncake.__file__)").stdout
        assert where.startswith("/opt/mooncake/lib/")
        assert not image.run("ls", "/src").stdout, "nothing of the build is in it"
        code = image.run("python", "-c", NATIVE).stdout.strip()
        assert code.startswith("shipped as /opt/mooncake/lib/")
        assert f"native code: {code}" in image.log.read_text(), "what serves loads it, too"
        unwanted = "cc c++ gcc g++ clang pip pip3"
        there = image.run("sh", "-c", f"for each in sh {unwanted}; do command -v $each; done")
        assert [Path(each).name for each in there.stdout.split()] == ["sh"]
        for name in ("pip", "ensurepip"):
            for python in ("python", sys.base_prefix + "/bin/python"):
                absent = image.run(python, "-m", name, "--version")
                assert f"No module named {name}" in absent.stderr
        assert f"({REVISION[:12]})" in image.run("mooncake", "version").stdout
        bill = json.loads(image.run("cat", "/opt/mooncake/bill-of-materials.json").stdout)
        assert bill["metadata"]["component"]["version"] == __version__
        kinds = {each.get("purl", "file").split("/")[0] for each in bill["components"]}
        assert kinds == {"pkg:pypi", "pkg:deb", "file"}
        hashes = {each["name"]: each.get("hashes") for each in bill["components"]}
        assert hashes["torch"] == [{"alg": "SHA-256", "content": locked("torch")}]
        [file] = [name for name in hashes if name == code.removeprefix("shipped as ").split(",")[0]]
        digest = image.run("sha256sum", file).stdout.split()[0]
        assert hashes[file] == [{"alg": "SHA-256", "content": digest}]
        assert image.stop() == 0
