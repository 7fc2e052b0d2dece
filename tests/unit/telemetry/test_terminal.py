"""Tables and progress bars of commands."""

import io

from rich.console import Console

from mooncake.telemetry.terminal import plain_table, progress, show_rows


def console(*, is_terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=60, force_terminal=is_terminal, color_system=None), out


def test_a_plain_table_keeps_all_of_a_long_word_and_aligns_numbers() -> None:
    shown, out = console()
    table = plain_table("name", "size", title="files", right=["size"])
    table.add_row("a" * 70, "1")
    table.add_row("b", "200")
    shown.print(table)
    text = out.getvalue()
    assert text.count("a") >= 70
    assert "files" in text
    assert [line.rstrip() for line in text.splitlines()][-1].endswith("200")


def test_rows_have_their_header_first_and_no_header_is_shown_where_it_is_empty() -> None:
    shown, out = console()
    show_rows("loads", [["worker", "tokens"], ["decode-0", "12"]], shown)
    show_rows("facts", [["", ""], ["requests", "3"]], shown)
    text = out.getvalue()
    assert text.index("worker") < text.index("decode-0") < text.index("facts")
    assert text.count("┏") == 1, "the second table has no header"


def test_progress_is_shown_in_a_terminal_only_and_not_where_it_is_hidden() -> None:
    for is_terminal, hidden in ((False, False), (True, True)):
        shown, out = console(is_terminal=is_terminal)
        with progress("steps", 2, shown, hidden=hidden) as move:
            move(1, 2)
        assert "steps" not in out.getvalue()
    shown, out = console(is_terminal=True)
    with progress("bytes", None, shown, in_bytes=True) as move:
        move(2**20, 2**21)
    assert "bytes" in out.getvalue()
    assert "MiB" in out.getvalue()
