"""Prefill and decode apart: one vLLM server computes prompts, another one answers them. Their KV
goes through a pool node, which comes after they have started. The prefill server dies.

The tests build on each other: run them in their order. Each uses prompts of its own.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.support.vllm_environment import why_no_connector
from tests.support.docs.typed import here, in_shell
from tests.support.kvstore.pool_process import until
from tests.vllm.docs import documented_block
from tests.vllm.servers import (
    WAIT_S,
    Answer,
    Pool,
    Vllm,
    check_conformance,
    prompt,
    transfer_config,
    vllm_servers,
    whole_blocks,
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

    def __init__(self, home: Path, model: Path, alone: Future[Vllm], stack: ExitStack) -> None:
        secret = write_secret(home / "secret")
        self.pool = Pool(home)
        stack.callback(self.pool.close)

        def flags(role: str) -> tuple[str, str]:
            config = transfer_config([self.pool.url("left")], secret, role, load_timeout_s=LOAD_S)
            return "--kv-transfer-config", config

        servers = {"prefill": flags("kv_producer"), "decode": flags("kv_consumer")}
        self.prefill, self.decode = stack.enter_context(vllm_servers(model, servers))
        self.alone = alone.result()

    def answer(self, tokens: list[int]) -> Answer:
        """Return the answer of both servers, as a proxy before them gets it."""
        return self.decode.ask(tokens, kv_transfer_params=self.prefill.hand_over(tokens))


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, model: Path, plain: Future[Vllm]
) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("apart"), model, plain, stack)


def test_servers_that_start_before_the_pool_join_it(world: World) -> None:
    tokens = prompt(50, 400)
    expected = world.alone.ask(tokens)
    assert world.answer(tokens) == Answer(expected.tokens, 0)
    world.pool.start("left")

    def share() -> bool:
        # What is in the caches of the servers neither goes to the pool nor comes from there.
        world.prefill.forget()
        world.decode.forget()
        return world.answer(tokens) == Answer(expected.tokens, whole_blocks(400))

    until(share, "both have joined the pool", WAIT_S)


def test_the_documented_request_returns_what_goes_to_the_other_server(
    world: World, tmp_path: Path
) -> None:
    typed = here(
        documented_block("curl -s PREFILL"), {"PREFILL": world.prefill.url, "MODEL": "tiny"}
    )
    params = json.loads(in_shell(typed, tmp_path))["kv_transfer_params"]
    body = {"model": "tiny", "prompt": "Say hello", "max_tokens": 4, "kv_transfer_params": params}
    assert world.decode.post("/v1/completions", body)["usage"]["completion_tokens"] == 4


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
    with world.pool.hanging("left"):
        params = world.prefill.hand_over(tokens)
        assert params["mooncake_tokens"] == 7 * 128
        world.prefill.kill()
    found = world.decode.ask(tokens, kv_transfer_params=params)
    assert found == Answer(world.alone.ask(tokens).tokens, 0)


def test_without_a_prefill_server_the_other_answers_alone(world: World) -> None:
    tokens = prompt(40, 700)
    with pytest.raises(urllib.error.URLError):
        world.prefill.hand_over(tokens)
    assert world.decode.ask(tokens) == Answer(world.alone.ask(tokens).tokens, 0)
    world.pool.check_nothing_is_held("left")
