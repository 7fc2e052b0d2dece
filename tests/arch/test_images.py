"""`docker/Dockerfile` names files, extras and commands that there are, and gives no image root."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import tomllib
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
    assert not [words for words in of(image, "RUN") if "pip " in words]
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


@pytest.mark.parametrize("stage", [f"build-{image}" for image in IMAGES])
def test_what_is_installed_is_pinned_and_there(stage: str) -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installs = [words for words in of(stage, "RUN") if words.startswith("pip install")]
    assert installs
    for words in installs:
        assert "--constraint constraints.txt" in words
        if named := re.search(r"'\.\[(.*)\]'", words):
            assert set(named[1].split(",")) <= set(extras)
    for words in of(stage, "COPY"):
        *sources, _ = words.split()
        assert all((TOP / source).exists() for source in sources)


def test_the_context_has_what_the_build_reads_and_nothing_else() -> None:
    lines = (FILE.parent / "Dockerfile.dockerignore").read_text().split()
    taken = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert all((TOP / name).exists() for name in taken)
    needed = {"README.md", "LICENSE", "constraints.txt", "setup.py", "mooncake", "kernels"}
    assert taken >= needed | {"pyproject.toml", "configs"}
    assert not [name for name in taken if fnmatch.fnmatch(name, "test*")]


def test_images_name_what_they_consist_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for image in IMAGES:
        [writes] = [words for words in of(image, "RUN") if "bill_of_materials.py" in words]
        assert writes.endswith("> /opt/mooncake/bill-of-materials.json")
    spec = importlib.util.spec_from_file_location("bill", FILE.parent / "bill_of_materials.py")
    bill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bill)
    installed = dict(bill.python_packages())
    assert "typing-extensions" in installed
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in installed)
    own = [("mooncake-serve", __version__), ("torch", "2.13.0+cpu")]
    monkeypatch.setattr(bill, "python_packages", lambda: own)
    monkeypatch.setattr(bill, "debian_packages", lambda: [("g++", "4:12.2.0-3", "amd64")])
    found = bill.document()
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert found["metadata"]["component"]["version"] == __version__
    assert [each["purl"] for each in found["components"]] == [
        "pkg:pypi/torch@2.13.0%2Bcpu", "pkg:deb/debian/g++@4:12.2.0-3?arch=amd64",
    ]  # fmt: skip
