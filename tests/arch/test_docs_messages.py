"""Messages that pages explain under "When it fails" are ones that the program prints: a reader
looks for them in the page with the words of the terminal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ANYTHING = "\0"
"""What stands in a program's text for a value."""
OF_OTHERS = {
    "Failed to export spans batch", "Queue full, dropping Span", "Transient error",
    "otlp-traces-endpoint: No module named",
}  # fmt: skip
"""Messages of OpenTelemetry and of Python."""
LEAST_CHARS = 9


@cache
def printed() -> tuple[str, ...]:
    """Return all texts in our code."""
    found = set()
    for folder in ("mooncake", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    values = (getattr(part, "value", None) for part in node.values)
                    found.add("".join(v if isinstance(v, str) else ANYTHING for v in values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(re.sub(r"%[-\d.]*[sdg]", ANYTHING, node.value))
    return tuple(found)


def is_printed(message: str) -> bool:
    """Return whether a text of our code can print `message`, but for a value of one or two words
    at its beginning or end.
    """
    words = message.split(" ")
    parts = {" ".join(words[first:last]) for first in range(3) for last in range(-2, 0)}
    parts |= {" ".join(words[first:]) for first in range(3)}
    parts = {part for part in parts if len(part) >= LEAST_CHARS}
    if any(part in text for text in printed() for part in parts):
        return True
    patterns = (text.strip(f" {ANYTHING}").split(ANYTHING) for text in printed())
    return any(
        len("".join(parts)) >= LEAST_CHARS and re.search(".*?".join(map(re.escape, parts)), message)
        for parts in patterns
        if len(parts) > 1
    )


def explained(page: Path) -> Iterator[str]:
    """Yield the messages in a page's first column, cut where values stand."""
    text = page.read_text()
    if page.name != "troubleshooting.md":
        text = text.partition("\n## When it fails\n")[2].partition("\n## ")[0]
    for cell in re.findall(r"^\| (.+?) \|", text, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", cell):
            for part in re.split(r"…|\.\.\.|\d+|\b[NXY]\b", message):
                if " " in (stripped := part.strip(" :")) and len(stripped) >= LEAST_CHARS:
                    yield stripped


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_messages_that_pages_explain_are_printed(page: Path) -> None:
    unknown = [one for one in explained(page) if one not in OF_OTHERS and not is_printed(one)]
    assert unknown == [], "print these words, or write those that are printed"


def test_most_pages_explain_messages() -> None:
    assert sum(len([*explained(page)]) for page in PAGES) > 40


@pytest.mark.parametrize("message", ["cert.pem: it is of", "no engine ever ran anywhere"])
def test_words_that_nothing_prints_are_found(message: str) -> None:
    assert not is_printed(message)
