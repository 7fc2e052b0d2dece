"""`docker/Dockerfile` names files, extras and commands that there are, and gives no image root."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake import __version__
from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from tests.support.api.server import ScriptedBackend, says, tiny_model

TOP = Path(__file__).parents[2]
FILE = TOP / "docker" / "Dockerfile"
IMAGES = ("cpu", "cuda")


def steps() -> dict[str, list[tuple[str, str]]]:
    """Return the (instruction, words) of each stage, those of the stage it is made from first."""
    text = re.sub(r"\\\n", " ", FILE.read_text())
    stages: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, words = line.split(maxsplit=1)
        if instruction == "FROM":
            source, name = re.fullmatch(r"(\S+) AS (\S+)", words).groups()
            stages[name] = [*stages.get(source, []), (instruction, source)]
        else:
            stages[name].append((instruction, words))
    return stages


def of(stage: str, instruction: str) -> Iterator[str]:
    return (words for known, words in steps()[stage] if known == instruction)


def test_the_last_stages_are_the_images_and_the_rest_is_made_before() -> None:
    found = steps()
    assert set(found) == {"", "build", "build-cpu", "build-cuda", "run", *IMAGES}
    for stage, lines in found.items():
        known = list(found)[: list(found).index(stage)]
        for instruction, words in lines:
            if instruction == "COPY" and (source := re.match(r"--from=(\S+)", words)):
                assert source[1] in known


@pytest.mark.parametrize("image", IMAGES)
def test_images_have_no_root_no_build_tools_of_python_and_a_health_check(image: str) -> None:
    users = list(of(image, "USER"))
    assert users == ["1000:1000"]
    [of_pip] = [words for words in of(image, "RUN") if "pip " in words]
    assert of_pip.startswith("python -m pip uninstall --quiet --yes pip ")
    assert list(of(image, "COPY")) == [f"--from=build-{image} /opt/mooncake /opt/mooncake"]
    last = [instruction for instruction, _ in steps()[image]]
    assert not {"RUN", "COPY"} & set(last[last.index("USER") :]), "what is in an image is root's"
    [check] = of(image, "HEALTHCHECK")
    code = json.loads(check[check.index("CMD ") + 4 :])[-1]
    compile(code, "HEALTHCHECK", "exec")
    app = create_app(ScriptedBackend(says("x")), tiny_model(), ApiConfig())
    path = re.search(r"http://[^/]+(/[^']*)", code)[1]
    assert path in app.openapi()["paths"]
    assert list(of(image, "ENTRYPOINT")) == ['["dumb-init", "--single-child", "--", "mooncake"]']


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_installed_is_locked_by_hashes(image: str) -> None:
    installs = [words for words in of(f"build-{image}", "RUN") if words.startswith("pip install")]
    [packages, own] = installs
    assert packages.startswith("pip install --require-hashes --no-deps ")
    assert packages.endswith(f" --requirement {image}.txt")
    assert own == "pip install --no-deps --no-build-isolation ."
    assert f"docker/locks/{image}.txt ./" in of(f"build-{image}", "COPY")
    for words in of(f"build-{image}", "COPY"):
        *sources, _ = words.split()
        assert all((TOP / source).exists() for source in sources)


@pytest.mark.parametrize("image", IMAGES)
def test_what_compiles_is_not_in_an_image(image: str) -> None:
    def brought(stage: str) -> set[str]:
        [words] = [words for words in of(stage, "RUN") if "apt-get install" in words]
        names = words.split("--no-install-recommends ")[1].split(" && ")[0].split()
        return set(names)

    assert "g++" in brought(f"build-{image}")
    assert brought(image) == {
        "dumb-init", "libgomp1", "libibverbs1", "ibverbs-providers", "python3-pyverbs",
    }  # fmt: skip
    [compiles] = [words for words in of(f"build-{image}", "RUN") if "native.build" in words]
    assert ("mooncake_kernels.triton.host_code" in compiles) == (image == "cuda")
    assert compiles.endswith("pip uninstall --quiet --yes pip")


@pytest.mark.parametrize(
    ("base", "any_base", "taken"),
    [
        (f"docker.io/library/python:3.11@sha256:{'0' * 64}", "no", True),
        ("docker.io/library/python:3.11", "no", False),
        ("docker.io/library/python:3.11@sha256:0123", "no", False),
        ("docker.io/library/python:3.11", "yes", True),
    ],
)
def test_a_base_that_may_change_is_refused(base: str, any_base: str, taken: bool) -> None:
    for stage in ("build", "run"):
        assert steps()[stage][0] == ("FROM", "${BASE}")
    assert "ANY_BASE=no" in of("build", "ARG")
    check, *_ = of("build", "RUN")
    words = ["sh", "-c", check]
    done = subprocess.run(
        words, env={"BASE": base, "ANY_BASE": any_base}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == taken
    assert taken or f"BASE: {base} may change" in done.stderr


def test_the_context_has_what_the_build_reads_and_nothing_else() -> None:
    lines = (FILE.parent / "Dockerfile.dockerignore").read_text().split()
    taken = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert all((TOP / name).exists() for name in taken)
    needed = {"README.md", "LICENSE", "docker/locks", "setup.py", "mooncake", "kernels"}
    assert taken >= needed | {"pyproject.toml", "configs"}
    assert not [name for name in taken if fnmatch.fnmatch(name, "test*")]


def test_images_name_what_they_consist_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for image in IMAGES:
        [writes] = [words for words in of(image, "RUN") if "bill_of_materials.py" in words]
        assert f"locks/{image}.txt > /opt/mooncake/bill-of-materials.json" in writes
    spec = importlib.util.spec_from_file_location("bill", FILE.parent / "bill_of_materials.py")
    bill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bill)
    installed = bill.python_packages()
    assert "typing-extensions" in installed
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in installed)
    own = {"mooncake-serve": __version__, "torch": "2.13.0+cpu"}
    made, lock = tmp_path / "native.so", tmp_path / "lock"
    made.write_bytes(b"code")
    lock.write_text(f"torch==2.13.0+cpu --hash=sha256:{'1' * 64}\n#   numpy\n")
    monkeypatch.setattr(bill, "python_packages", lambda: dict(own))
    monkeypatch.setattr(bill, "debian_packages", lambda: [("tar", "1:1.34-1", "amd64")])
    monkeypatch.setattr(bill, "DPKG", tmp_path)
    (tmp_path / "tar.md5sums").write_text("d41d8cd98f00b204e9800998ecf8427e  bin/tar\n")
    monkeypatch.setattr(bill, "compiled", lambda: [(made, "2" * 64)])
    found = bill.document(lock)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert found["metadata"]["component"]["version"] == __version__
    listed = hashlib.sha256((tmp_path / "tar.md5sums").read_bytes()).hexdigest()
    assert [
        (each.get("purl", each["name"]), each["hashes"][0]["content"])
        for each in found["components"]
    ] == [
        ("pkg:pypi/torch@2.13.0%2Bcpu", "1" * 64),
        ("pkg:deb/debian/tar@1:1.34-1?arch=amd64", listed),
        (str(made), "2" * 64),
    ]  # fmt: skip
    own["numpy"] = "2.0"
    with pytest.raises(ValueError, match=r"does not name numpy==2\.0"):
        bill.document(lock)
