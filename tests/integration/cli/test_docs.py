"""The documents' commands that need no server, typed in a shell (tests/support/docs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.docs.blocks import typed_blocks
from tests.support.docs.typed import here, in_shell, prepare

pytestmark = pytest.mark.slow
BLOCKS = typed_blocks(quick=False)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_commands_that_need_no_server(page: str, tmp_path: Path) -> None:
    text = "".join(block.text for block in BLOCKS if block.page == page)
    prepare(tmp_path, text)
    in_shell(here(text), tmp_path)
