"""Prefill and decode apart: one vLLM server computes prompts, another one answers them. Their KV
goes through a pool node. The prefill server dies.

The tests build on each other: run them in their order. Each uses prompts of its own.
"""

from __future__ import annotations

import signal
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.support.vllm_environment import why_no_connector
from tests.vllm.servers import (
    Answer,
    Pool,
    check_conformance,
    prompt,
    transfer_config,
    vllm_server,
    whole_blocks,
    write_llama,
    write_secret,
)

LOAD_S = 20.0
"""How long the decode server waits for what the other has promised. A busy machine needs seconds to
bring it.
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_connector() is not None, reason=why_no_connector() or ""),
]


class World:
    """A pool node, a server alone, one that computes prompts, and one that answers them."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        model, secret = write_llama(home / "llama"), write_secret(home / "secret")
        self.pool = Pool(home)
        stack.callback(self.pool.close)
        self.pool.start("left")

        def flags(role: str) -> tuple[str, str]:
            config = transfer_config([self.pool.url("left")], secret, role, load_timeout_s=LOAD_S)
            return "--kv-transfer-config", config

        servers = {
            "alone": (),
            "prefill": flags("kv_producer"),
            "decode": flags("kv_consumer"),
        }
        # One after another: each takes all cores for a minute.
        self.alone, self.prefill, self.decode = (
            stack.enter_context(vllm_server(name, model, *more)) for name, more in servers.items()
        )

    def answer(self, tokens: list[int]) -> Answer:
        """Return the answer of both servers, as a proxy before them gets it."""
        return self.decode.ask(tokens, kv_transfer_params=self.prefill.hand_over(tokens))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("apart"), stack)


def test_answers_are_those_of_one_server_and_prompts_are_computed_once(world: World) -> None:
    for seed, length in {1: 1000, 2: 600, 3: 257, 4: 256, 5: 129, 6: 60}.items():
        tokens = prompt(seed, length)
        expected = world.alone.ask(tokens)
        assert world.answer(tokens) == Answer(expected.tokens, whole_blocks(length)), length


def test_many_at_once(world: World) -> None:
    prompts = [prompt(10 + number, 300 + 100 * number) for number in range(8)]
    expected = [
        Answer(world.alone.ask(tokens).tokens, whole_blocks(len(tokens))) for tokens in prompts
    ]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(world.answer, prompts)) == expected


def test_one_server_only_gives_and_the_other_only_takes(world: World) -> None:
    tokens, before = prompt(20, 500), world.pool.num_put("left")
    world.decode.ask(tokens)
    assert world.pool.num_put("left") == before
    handed = prompt(21, 500)
    world.answer(handed)
    world.prefill.forget()
    assert world.prefill.ask(handed, 1).cached == 0


def test_it_passes_the_conformance_suite(world: World) -> None:
    """With handles of the prefill server that are forged, used twice, old, or of another prompt."""
    handles = ("--prefill-url", world.prefill.url, "--lease-s", "1")
    check_conformance(world.decode.url, "aborts,handles,cold-warm,one-end,refusals,hits", *handles)
    world.pool.check_nothing_is_held("left")


def test_a_prefill_server_killed_before_its_blocks_are_out_is_a_miss(world: World) -> None:
    """It has promised them, while the pool node hangs."""
    tokens = prompt(30, 900)
    world.pool.send("left", signal.SIGSTOP)
    try:
        params = world.prefill.hand_over(tokens)
        assert params["mooncake_tokens"] == 7 * 128
        world.prefill.kill()
    finally:
        world.pool.send("left", signal.SIGCONT)
    found = world.decode.ask(tokens, kv_transfer_params=params)
    assert found == Answer(world.alone.ask(tokens).tokens, 0)


def test_without_a_prefill_server_the_other_answers_alone(world: World) -> None:
    tokens = prompt(40, 700)
    with pytest.raises(urllib.error.URLError):
        world.prefill.hand_over(tokens)
    assert world.decode.ask(tokens) == Answer(world.alone.ask(tokens).tokens, 0)
    world.pool.check_nothing_is_held("left")
