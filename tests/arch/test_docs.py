"""Documents say what is there: links lead somewhere, reference pages are what the code makes of
itself, the floors of ARCHITECTURE.md are those that are enforced, named tests exist.
"""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from mooncake.cli.main import make_parser
from tests.support import reference_docs

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".git", ".venv", "node_modules", "build", "dist", "checkpoints", "results"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
IN_SENTENCE = re.compile(r"`mooncake ([^`\n…]* --[^`\n…]+)`")
NAMED_FILE = re.compile(r"`((?:tests|charts|configs|benchmarks|mooncake|docs)/[\w./-]+)`")


def documents() -> list[Path]:
    found = ROOT.rglob("*.md")
    return sorted(
        path for path in found if not {*path.relative_to(ROOT).parts[:-1]} & SKIPPED
        and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    )  # fmt: skip


def commands(document: Path) -> list[str]:
    """Return the `mooncake` commands in a document's indented blocks, without their comments."""
    lines = re.findall(r"^ {4,7}(?:\.venv/bin/)?mooncake (.+)$", joined(document), re.MULTILINE)
    return [re.split(r"\s+# |\s[|>]\s", line)[0] for line in lines]


def joined(document: Path) -> str:
    """Return a document with the lines of one command made one."""
    return document.read_text().replace("\\\n", " ")


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", document.read_text())):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    named = NAMED_FILE.findall(document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_ones_that_the_program_takes(document: Path) -> None:
    for command in commands(document):
        words = shlex.split(command)
        _, unknown = make_parser(words[0]).parse_known_args(words)
        assert unknown == [], command


def flags_of(words: list[str]) -> set[str]:
    """Return the flags of the command, or subcommand, that `words` begin with."""
    parser = make_parser(words[0])
    for word in words:
        below = [
            each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
        ]  # fmt: skip
        if not below or word not in below[0].choices:
            break
        parser = below[0].choices[word]
    return {*parser._option_string_actions}


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_in_sentences_are_ones_that_their_command_has(document: Path) -> None:
    for command in IN_SENTENCE.findall(joined(document)):
        words = shlex.split(command)
        named = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert named - flags_of(words) == set(), command


def test_packages_to_install_are_this_distribution_with_an_extra_that_it_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    right = {f"{project['name']}[{extra}]" for extra in project["optional-dependencies"]}
    named = {
        (word, str(path.relative_to(ROOT)))
        for path in (*documents(), *(ROOT / "mooncake").rglob("*.py"))
        for word in re.findall(r"pip install [\\'\"]*(mooncake[\w-]*\[\w+\])", path.read_text())
    }
    assert sorted((word, place) for word, place in named if word not in right) == []


@pytest.mark.parametrize("name", reference_docs.PAGES_BY_NAME)
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    made = reference_docs.page(name)
    assert (reference_docs.PAGES / name).read_text() == made, "run `make docs`"


def test_floors_are_those_that_are_enforced() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\[.+?) \|", section, re.MULTILINE)
    told = [set(re.findall(r"\[(\w+)\]\(mooncake/", row)) for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [c["layers"] for c in contracts["contracts"] if c.get("containers") == ["mooncake"]]
    assert told == [set(layer.split(" | ")) for layer in layers]


def test_every_package_has_a_readme() -> None:
    packages = [path.parent for path in (ROOT / "mooncake").glob("*/__init__.py")]
    assert [path.name for path in packages if not (path / "README.md").is_file()] == []


def test_pages_about_using_it_are_read_in_five_minutes() -> None:
    """What docs/README.md lists under "using it" has 900 words at most, tables and code included;
    each page is in one of its lists.
    """
    listed = (ROOT / "docs" / "README.md").read_text()
    tasks = re.findall(
        r"^\| \[.+?\]\((\S+?\.md)\)", listed.partition("| looking up |")[0], re.MULTILINE
    )
    num_words = {name: len((ROOT / "docs" / name).read_text().split()) for name in tasks}
    assert {name: number for name, number in num_words.items() if number > 900} == {}
    pages = (ROOT / "docs").rglob("*.md")
    names = {str(path.relative_to(ROOT / "docs")) for path in pages} - {"README.md"}
    assert names - set(LINK.findall(listed)) == set()


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 90
