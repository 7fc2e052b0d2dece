"""A router's view of a real server: which blocks it can reuse, by the tokens in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server import serving

BLOCK = 64
NUM_PAGES = 12
WAIT_MS = 240_000


class Router:
    """What a subscriber knows of the server: tokens of each chain of blocks that is stored."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._next_no: int | None = None
        self.tokens: dict[int, tuple[int, ...]] = {}
        """Hash of a block -> its tokens and those of all blocks before it."""

    def take_batch(self) -> None:
        """Wait for one batch and take it in."""
        _, packed, batch = self._socket.recv_multipart()
        number = int.from_bytes(packed, "big")
        assert self._next_no in (None, number)
        self._next_no = number + 1
        for event in msgspec.msgpack.decode(batch)[1]:
            if event["type"] == "AllBlocksCleared":
                assert number == 0
                continue
            assert event["medium"] == "GPU"
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.tokens[name]
                continue
            assert event["block_size"] == BLOCK
            assert len(event["token_ids"]) == BLOCK * len(event["block_hashes"])
            parent = event["parent_block_hash"]
            before = () if parent is None else self.tokens[parent]
            for index, name in enumerate(event["block_hashes"]):
                before += tuple(event["token_ids"][BLOCK * index : BLOCK * (index + 1)])
                self.tokens[name] = before


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint("k2-nano", seed=3, out=tmp_path_factory.mktemp("checkpoint") / "nano")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[tuple[Router, str]]:
    """Return a router that has subscribed before the server publishes, and where to."""
    endpoint = f"ipc://{tmp_path}/kv"
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    yield Router(socket), endpoint
    context.destroy(linger=0)


def test_blocks_of_prompts_and_answers_are_published_until_they_are_gone(
    home: Path, router: tuple[Router, str], tmp_path: Path
) -> None:
    seen, endpoint = router
    words = [
        "--colocated", "--max-model-len", "512",
        "--num-gpu-blocks-override", str(NUM_PAGES),
        "--kv-events-config", msgspec.json.encode({"endpoint": endpoint}).decode(),
    ]  # fmt: skip
    with serving(str(home), *words, log=tmp_path / "log") as server:
        prompt = list(range(1, 201))
        answer = server.complete(prompt, max_tokens=70, ignore_eos=True)["choices"][0]
        whole = (*prompt, *answer["token_ids"])
        stored = len(whole) // BLOCK  # the last token is never computed; it ends no block here
        assert stored == 4
        while whole[: BLOCK * stored] not in seen.tokens.values():
            seen.take_batch()
        assert len(seen.tokens) == stored
        for first in range(300, 306):  # more than the pages hold
            server.complete([first] * 200, max_tokens=2)
        while whole[:BLOCK] in seen.tokens.values():
            seen.take_batch()
        assert len(seen.tokens) <= NUM_PAGES
