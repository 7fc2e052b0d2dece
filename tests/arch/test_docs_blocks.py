"""No code block of the documents is forgotten: each has a class, which says what runs it
(tests/support/docs/blocks.py). Those that only plan or parse run here.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli import main as cli
from mooncake.launch.config.cluster_file import read_cluster_file
from mooncake.launch.config.key_file import read_keys
from mooncake.sim.files import read_faults
from tests.support.docs.blocks import (
    BLOCKS,
    CLASSES,
    ROOT,
    Beginning,
    Block,
    Conversed,
    Elsewhere,
    OnHosts,
    Read,
    Shown,
    Target,
    Typed,
    blocks_of,
    blocks_that_are,
    classes_of,
    commands_of,
    typed_blocks,
)
from tests.support.docs.typed import here, prepare

READERS: dict[str, Callable[[str], Any]] = {
    "keys": read_keys,
    "cluster": read_cluster_file,
    "faults": read_faults,
}
SAMPLE = """\
Text:

    one \\
        command
    another

    after an empty line

- a list
    that goes on in its second line

```yaml
fenced: true
```
    not one, as no empty line is before it
"""


def by_place(block: Block) -> str:
    return block.place


def test_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.docs.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(SAMPLE)
    indented, fenced = blocks_of(tmp_path / "page.md")
    assert indented.text == "one \\\n    command\nanother\n\nafter an empty line\n"
    assert commands_of(indented) == ["one      command", "another", "after an empty line"]
    assert (fenced.place, fenced.text) == ("page.md:12", "fenced: true\n")
    assert classes_of(fenced) == [], "a page without rows"


def test_every_block_has_one_class_and_every_row_one_block() -> None:
    num_classes = {block.place: len(classes_of(block)) for block in BLOCKS}
    assert {place for place, number in num_classes.items() if number != 1} == set()
    for page, rows in CLASSES.items():
        texts = [block.text for block in BLOCKS if block.page == page]
        for beginning in rows:
            assert len([text for text in texts if text.startswith(beginning)]) == 1, beginning


def test_tests_that_run_blocks_are_there() -> None:
    rows = [each for page in CLASSES.values() for each in page.values()]
    named = {each.test for each in rows if isinstance(each, Elsewhere)}
    named |= {test for each in rows if isinstance(each, Typed) for _, test in each.apart}
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    on_hosts = [
        (page, each.test)
        for page, beginnings in CLASSES.items()
        for each in beginnings.values()
        if isinstance(each, OnHosts)
    ]
    assert [
        pair for pair in on_hosts if Path(pair[0]).name not in (ROOT / pair[1]).read_text()
    ] == []


@pytest.mark.parametrize("block", typed_blocks(quick=True), ids=by_place)
def test_what_only_plans_is_typed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A command with the comment `refused: 1.5 GiB ...` is refused, and says that number."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("mooncake.launch.host.machine_facts.available_bytes", lambda: 2**40)
    monkeypatch.setattr("mooncake.launch.cluster.checks.check_disks", lambda *_: None)
    prepare(tmp_path, block.text)
    for command in commands_of(block):
        program, *words = shlex.split(here(command, {}), comments=True)
        assert program == "mooncake"
        refused = re.search(r"# refused: ([\d.]+ \w+)", command)
        code = cli.run(words)
        told = capsys.readouterr()
        assert code == (2 if refused else 0), told.err
        assert not refused or refused[1] in told.err


@pytest.mark.parametrize("block", blocks_that_are(Read), ids=by_place)
def test_files_are_read_by_our_readers(block: Block, tmp_path: Path) -> None:
    [row] = classes_of(block)
    assert isinstance(row, Read)
    (tmp_path / "file.yaml").write_text(block.text)
    assert READERS[row.reader](str(tmp_path / "file.yaml"))


@pytest.mark.parametrize("block", blocks_that_are(Target), ids=by_place)
def test_targets_of_make_are_there(block: Block) -> None:
    for command in commands_of(block):
        program, *words = shlex.split(command, comments=True)
        assert program == "make"
        done = subprocess.run(
            ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks_that_are(Beginning), ids=by_place)
def test_a_beginning_is_that_of_another_pages_block(block: Block) -> None:
    [row] = classes_of(block)
    assert isinstance(row, Beginning)
    others = [other for other in blocks_that_are(Conversed) if other.page == row.page]
    assert any(other.text.startswith(block.text) for other in others)


@pytest.mark.parametrize("block", blocks_that_are(Shown), ids=by_place)
def test_what_is_shown_is_what_the_code_prints(block: Block) -> None:
    [row] = classes_of(block)
    assert isinstance(row, Shown)
    source = (ROOT / row.by).read_text()
    for words in row.says:
        assert words in block.text
        assert words in source
