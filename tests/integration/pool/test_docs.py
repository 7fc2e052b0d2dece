"""What the documents ask of a pool, typed beside two pool nodes (tests/support/docs)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mooncake.base import MooncakeError
from tests.support.docs.blocks import Block, OfPool, PoolProgram, blocks_that_are, classes_of
from tests.support.docs.typed import here, in_shell, prepare
from tests.support.kvstore.pool_process import SECRET, PoolProcess, until
from tests.support.model.checkpoints import write_config_only

pytestmark = pytest.mark.slow
COMMANDS = ("put", "get", "where", "replicate", "pin", "unpin", "evict", "stats", "bench")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What commands say, and what is typed in its place: the address of the first of two nodes; the
    other one is drained.
    """
    home = tmp_path_factory.mktemp("pool")
    model = write_config_only(home / "model")
    with ExitStack() as running:
        first = running.enter_context(PoolProcess(model, home / "log1", "--dram", "4MiB"))
        found = re.search(r"clients and other nodes: (\S+)", first.output)
        assert found is not None, first.output
        flags = ("--dram", "4MiB", "--node-id", "other", "--join", found[1])
        other = running.enter_context(PoolProcess(model, home / "log2", *flags))
        with first.session() as session:
            session.connect()
            until(
                lambda: (
                    [isinstance(state, MooncakeError) for _, state in session.stat_all()]
                    == [False, False]
                ),
                "both nodes have joined",
            )
        yield {
            "http://127.0.0.1:8100": first.url,
            "mooncake pool drain": f"mooncake pool drain --url {other.url}",
            **{f"mooncake pool {each}": f"mooncake pool {each} --url {first.url}"
               for each in COMMANDS},
        }  # fmt: skip


@pytest.mark.parametrize("block", blocks_that_are(OfPool, PoolProgram), ids=lambda each: each.place)
def test_what_the_documents_ask_of_a_pool(
    words: dict[str, str], block: Block, tmp_path: Path
) -> None:
    [row] = classes_of(block)
    assert isinstance(row, OfPool)
    prepare(tmp_path, "")
    text = here(block.text, words)
    if isinstance(row, PoolProgram):
        (tmp_path / "program.py").write_text(text)
        text = "python program.py"
    shown = in_shell(text, tmp_path, MOONCAKE_CLUSTER_SECRET=SECRET)
    for part in row.says:
        assert part in shown
