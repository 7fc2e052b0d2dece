"""The locks of images are whole and agree with what packages ask for, and with the constraints."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

TOP = Path(__file__).parents[2]
PYTHON = "3.11.9"
"""Any release of the one that images have."""
HERE = {
    "implementation_name": "cpython", "platform_machine": "x86_64", "platform_system": "Linux",
    "platform_python_implementation": "CPython", "python_full_version": PYTHON,
    "python_version": "3.11", "os_name": "posix", "sys_platform": "linux", "extra": "",
}  # fmt: skip
EXTRAS = {"cpu": ("api", "ray", "s3", "otlp"), "cuda": ("api", "ray", "s3", "otlp", "gpu")}
LINE = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}")
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]


def lock_of(image: str) -> str:
    return (TOP / "docker" / "locks" / f"{image}.txt").read_text()


def read(text: str) -> tuple[dict[str, str], dict[str, list[Requirement]]]:
    """Return the versions in a lock, and what the packages ask for there."""
    pins: dict[str, str] = {}
    needs: dict[str, list[Requirement]] = {}
    for line in text.splitlines()[1:]:
        if line.startswith("#   "):
            needs[list(pins)[-1]].append(Requirement(line.removeprefix("#   ")))
            continue
        found = LINE.fullmatch(line)
        assert found, f"no package with a hash: {line}"
        name = canonicalize_name(found[1])
        assert name not in pins
        pins[name], needs[name] = found[2], []
    return pins, needs


def pinned(*files: str) -> dict[str, str]:
    lines = [line for file in files for line in (TOP / file).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def problems(image: str, text: str) -> list[str]:
    """Return what is missing in a lock, or not what others ask for."""
    pins, needs = read(text)
    names = [*PROJECT["dependencies"], "pip", "setuptools"]
    names += [name for each in EXTRAS[image] for name in PROJECT["optional-dependencies"][each]]
    asked = [("our package", Requirement(name)) for name in names]
    asked += [(name, need) for name, wanted in needs.items() for need in wanted]
    found = []
    for who, need in asked:
        if need.marker is None or need.marker.evaluate(HERE):
            has = pins.get(canonicalize_name(need.name))
            if has is None or not need.specifier.contains(Version(has).public, prereleases=True):
                found.append(f"{who} needs {need}, and the lock has {has}")
    return found


@pytest.mark.parametrize("image", EXTRAS)
def test_a_lock_has_all_that_is_asked_for(image: str) -> None:
    assert problems(image, lock_of(image)) == []


def test_what_does_not_fit_is_noticed() -> None:
    other = lock_of("cuda").replace("\ntriton==3.7.1", "\ntriton==3.9.0")
    [problem] = problems("cuda", other)
    assert problem.startswith("torch needs triton==3.7.1")
    assert problem.endswith("the lock has 3.9.0")
    without = re.sub("(?m)^msgspec==.*\n", "", lock_of("cpu"))
    assert problems("cpu", without) == ["our package needs msgspec, and the lock has None"]


@pytest.mark.parametrize(("image", "more"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_a_lock_has_the_versions_of_the_constraints(image: str, more: str) -> None:
    pins, _ = read(lock_of(image))
    assert pins.keys() <= pinned("constraints.txt", f"constraints-{more}.txt").keys()
    for name, version in pinned("constraints.txt", f"constraints-{more}.txt").items():
        assert Version(pins.get(name, version)).public == version, name


def test_what_is_pinned_and_in_no_lock_is_for_developers_or_rdma() -> None:
    locked = {name for image in EXTRAS for name in read(lock_of(image))[0]}
    extras = PROJECT["optional-dependencies"]
    left, known = [*extras["dev"], *extras["rdma"]], set(locked)
    while left:
        name = canonicalize_name(left.pop())
        if name not in known:
            known.add(name)
            try:
                asked = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # of rdma, or of another release
                continue
            needs = (Requirement(each) for each in asked)
            left += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    assert pinned("constraints.txt").keys() <= known


def test_both_builds_of_torch_install_with_their_constraints() -> None:
    """PyPI's build names its triton by the release; that for CPUs names none."""
    for image, names in (("cuda", {"triton": "3.7.1"}), ("cpu", {})):
        needs = {need.name: need for need in read(lock_of(image))[1]["torch"]}
        assert {n: str(needs[n].specifier).strip("=") for n in needs if n == "triton"} == names
    assert "triton" not in pinned("constraints.txt")
    assert pinned("constraints-gpu.txt")["triton"] == "3.7.1"
    assert "triton" in pinned("constraints-cpu.txt")
