"""What a server sends is shown, not obeyed by the terminal."""

from __future__ import annotations

from mooncake.cli.chat import plain


def test_control_characters_are_spelled_out() -> None:
    assert plain("a\n\tb 你好") == "a\n\tb 你好"
    assert plain("\x1b]0;t\x07\r\x9b2J\x7f") == r"\x1b]0;t\x07\x0d\x9b2J\x7f"
