"""The source archive builds the wheel, and the wheel has all that the program reads."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SDIST = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"


def call(directory: Path, *words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=directory, capture_output=True, text=True,
        timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source archive of a copy of this checkout, and the wheel of what it unpacks to."""
    place = tmp_path_factory.mktemp("build")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            target = place / "checkout" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    call(place / "checkout", "-c", SDIST, place)
    [archive] = place.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")
    unpacked = place / archive.name.removesuffix(".tar.gz")
    call(
        unpacked, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", place, ".",
    )  # fmt: skip
    [wheel] = place.glob("*.whl")
    return archive, wheel


def files_of(*roots: str) -> set[str]:
    found = (path for root in roots for path in (ROOT / root).rglob("*"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_the_source_archive_is_complete(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert names >= files_of("mooncake", "kernels", "configs", "charts", "docs", "tests")
    assert names >= {"LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"}
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_has_what_the_program_reads(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as opened:
        names = set(opened.namelist())
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        words = opened.read(about).decode()
    wanted = {f"mooncake/{name}" for name in files_of("configs")}
    wanted |= {
        name.removeprefix("kernels/")
        for name in files_of("mooncake", "kernels")
        if name.endswith((".py", ".typed", ".html", ".css", ".js", ".svg", ".json"))
    }
    wanted |= files_of("mooncake/k2-demo")
    assert names >= wanted
    assert "mooncake/k2-demo/model.safetensors" in names
    assert "mooncake/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert "Name: mooncake-serve" in words
    assert "License-Expression: Apache-2.0" in words


def test_an_installed_program_finds_its_figures(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Installed into an empty folder and run from another, away from the repository."""
    site = tmp_path / "site"
    call(
        tmp_path, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, built[1]
    )  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    )
    ours = f"import sys; sys.path.insert(0, {str(site)!r}); "
    said = call(
        tmp_path, "-P", "-c",
        ours + "import mooncake; from mooncake.cli.main import run; print(mooncake.__file__); "
        f"run(['simulate', '--trace', {str(trace)!r}, '--model', 'kimi-k2-instruct', "
        "'--hardware', 'h800x8'])",
    )  # fmt: skip
    assert said.startswith(str(site))
    assert "tokens" in said
