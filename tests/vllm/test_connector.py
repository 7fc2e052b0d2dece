"""Two vLLM servers share prefixes through a pool of two nodes; the nodes hang, die and come back.

The tests build on each other: run them in their order. Each uses prompts of its own.
"""

from __future__ import annotations

import http.client
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.support.vllm_environment import why_no_connector
from tests.support.kvstore.pool_process import until
from tests.vllm.servers import (
    BLOCK_TOKENS,
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

LOAD_S = 5.0
"""How long a load waits for the pool."""
SECOND_BLOCKS = 36
"""Of the second server's KV: no more than one long request and a few short ones take."""
IN_USE = "vllm:kv_cache_usage_perc"
"""The part of a server's blocks that requests hold, also those that wait for a load."""
PREEMPTIONS = "vllm:num_preemptions_total"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_connector() is not None, reason=why_no_connector() or ""),
]


class World:
    """The pool, a server without the connector, and two with it, each with a node of its own. One
    of the nodes' blocks (120 KiB) is a third of one of vLLM's (256 KiB), rounded up.
    """

    def __init__(self, home: Path, model: Path, plain: Future[Vllm], stack: ExitStack) -> None:
        secret = write_secret(home / "secret")
        self.pool = Pool(home)
        stack.callback(self.pool.close)
        self.pool.start("left")
        self.pool.start("right")
        urls = {name: self.pool.url(name) for name in ("left", "right")}

        def flags(*order: str) -> tuple[str, str]:
            nodes = [urls[name] for name in order]
            config = transfer_config(nodes, secret, load_timeout_s=LOAD_S)
            return "--kv-transfer-config", config

        servers = {
            "first": flags("right", "left"),
            "second": (*flags("left", "right"), "--num-gpu-blocks-override", str(SECOND_BLOCKS)),
        }
        self.first, self.second = stack.enter_context(vllm_servers(model, servers))
        self.plain = plain.result()

    def share(self, seed: int, length: int) -> list[int]:
        """Return a prompt whose whole blocks `first` has given to `right`, and nobody to `left`. If
        the node of `first` failed, `first` tries it again after a while.
        """
        tokens, before = prompt(seed, length), self.pool.num_put("left")
        self.first.ask(tokens, 1)
        self.await_found(tokens, self.first, whole_blocks(length))
        assert self.pool.num_put("left") == before
        self.pool.await_news("right", "left")
        return tokens

    def await_found(self, tokens: list[int], by: Vllm, count: int) -> None:
        """Wait until a server finds so many tokens of a prompt in the pool."""
        until(lambda: by.found_elsewhere(tokens) == count, "the pool has the prompt", WAIT_S)


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, model: Path, plain: Future[Vllm]
) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("vllm"), model, plain, stack)


LENGTHS = {1: 1000, 2: 600, 3: 257, 4: 256, 5: 129, 6: 60}
"""Seed -> length of the prompts that all servers answer."""


def test_answers_are_those_without_the_connector(world: World) -> None:
    for seed, length in LENGTHS.items():
        tokens = prompt(seed, length)
        expected = world.plain.ask(tokens)
        assert world.first.ask(tokens) == Answer(expected.tokens, 0), length


def test_a_second_server_loads_what_the_first_computed(world: World) -> None:
    for seed, length in LENGTHS.items():
        tokens = prompt(seed, length)
        expected = world.plain.ask(tokens)
        assert world.second.ask(tokens) == Answer(expected.tokens, whole_blocks(length)), length
    assert len({tuple(world.plain.ask(prompt(s, n)).tokens) for s, n in LENGTHS.items()}) == 6


def test_answers_are_part_of_the_next_prompt(world: World) -> None:
    tokens = prompt(10, 200)
    answer = world.first.ask(tokens, 120)
    following = [*tokens, *answer.tokens, *prompt(11, 50)]
    expected = world.plain.ask(following)
    assert world.second.ask(following) == Answer(expected.tokens, 2 * BLOCK_TOKENS)


def test_a_longer_prompt_loads_behind_what_the_server_has(world: World) -> None:
    tokens = world.share(12, 900)
    world.second.forget()
    assert world.second.ask(tokens[:400], 1).cached == whole_blocks(400)  # now its own
    assert world.second.ask(tokens) == Answer(world.plain.ask(tokens).tokens, whole_blocks(900))


def test_many_at_once(world: World) -> None:
    """More than the servers run at a time, of which half share a prefix."""
    common = world.share(20, 700)
    prompts = [common + prompt(21 + n, 40) if n % 2 else prompt(21 + n, 500) for n in range(16)]
    expected = [world.plain.ask(tokens).tokens for tokens in prompts]
    world.second.forget()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(world.second.ask, prompts))
    assert [answer.tokens for answer in found] == expected
    assert all(answer.cached >= whole_blocks(700) for answer in found[1::2])


def test_preempted_requests_leave_nothing_held(world: World) -> None:
    """Eight requests, of which the pool has half, begin with four blocks each and end with six:
    the server has not as many.
    """
    prompts = [world.share(30 + n, 500) if n % 2 else prompt(30 + n, 500) for n in range(8)]
    world.second.forget()
    before = world.second.gauge(PREEMPTIONS)
    with ThreadPoolExecutor(16) as threads:
        expected, found = (
            threads.map(lambda tokens, of=server: of.ask(tokens, 200).tokens, prompts)
            for server in (world.plain, world.second)
        )
        assert list(found) == list(expected)
    assert world.second.gauge(PREEMPTIONS) > before
    until(lambda: world.second.gauge(IN_USE) == 0, "no KV is in use", WAIT_S)
    for name in ("left", "right"):
        world.pool.check_nothing_is_held(name)


def test_it_passes_the_conformance_suite(world: World) -> None:
    """With what needs one server, and the answers of the one without the connector."""
    checks = "aborts,handles,cold-warm,one-end,refusals,same-answers,hits"
    check_conformance(world.second.url, checks, "--other-url", world.plain.url)
    for name in ("left", "right"):
        world.pool.check_nothing_is_held(name)


def test_other_salts_share_nothing(world: World) -> None:
    tokens = world.share(50, 300)
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "cache_salt": "another"}
    world.second.forget()
    usage = world.second.post("/v1/completions", body)["usage"]
    assert (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) in (0, None)


def test_a_client_that_goes_away_in_mid_load_leaves_nothing_held(world: World) -> None:
    tokens = world.share(60, 3000)
    world.second.forget()
    with world.pool.hanging("right"):
        parts = urlsplit(world.second.url)
        assert parts.hostname is not None
        client = http.client.HTTPConnection(parts.hostname, parts.port)
        body = f'{{"model": "tiny", "prompt": {tokens}, "max_tokens": 1}}'
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: world.second.gauge(IN_USE) > 0, "the load waits for the node", WAIT_S)
        client.close()
        assert world.second.ask(prompt(61, 200)).tokens == world.plain.ask(prompt(61, 200)).tokens
    until(lambda: world.second.gauge(IN_USE) == 0, "no KV is in use", WAIT_S)
    for name in ("left", "right"):
        world.pool.check_nothing_is_held(name)


def test_a_node_that_hangs_is_a_miss(world: World) -> None:
    tokens = world.share(70, 1500)
    world.second.forget()
    with world.pool.hanging("right"):
        begun = time.monotonic()
        found = world.second.ask(tokens)
        assert time.monotonic() - begun > LOAD_S / 2, "the load waited for the node"
    assert found.tokens == world.plain.ask(tokens).tokens


def test_a_node_killed_in_mid_load_is_a_miss(world: World) -> None:
    """The loads wait for the node when it is killed; every request ends with the right answer."""
    prompts = [world.share(80 + number, 1200) for number in range(3)]
    expected = [world.plain.ask(tokens).tokens for tokens in prompts]
    world.second.forget()
    with world.pool.hanging("right"), ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(world.second.ask, tokens) for tokens in prompts]
        until(lambda: world.second.gauge(IN_USE) > 0, "a load waits for the node", WAIT_S)
        world.pool.kill("right")
        assert [answer.result().tokens for answer in asked] == expected
    # `first`, whose node it was, goes on at the other one.
    more = prompt(85, 500)
    world.first.ask(more, 1)
    world.await_found(more, world.first, whole_blocks(500))


def test_the_pool_may_be_away_and_come_back_with_warm_disks(world: World) -> None:
    """What is found afterwards was on the disk: nobody has put it since."""
    tokens, other, fresh = prompt(90, 1000), prompt(91, 900), prompt(92, 300)
    for known in (tokens, other):
        world.first.ask(known, 1)
        world.await_found(known, world.second, whole_blocks(len(known)))
    world.pool.send("left", signal.SIGTERM)  # what lies in DRAM goes to SSD
    assert world.pool.nodes.pop("left").process.wait(WAIT_S) == 0
    world.second.forget()
    assert world.second.ask(other).tokens == world.plain.ask(other).tokens
    world.pool.start("left")
    world.second.ask(fresh, 1)
    world.await_found(fresh, world.second, whole_blocks(300))  # it uses the pool again
    before = world.pool.num_put("left")
    world.await_found(tokens, world.second, whole_blocks(1000))
    assert world.pool.num_put("left") == before
    assert world.second.ask(tokens).tokens == world.plain.ask(tokens).tokens


def test_after_a_reset_of_both_caches_nothing_of_before_is_used(world: World) -> None:
    """As after an update of the weights in place."""
    tokens = prompt(95, 600)
    world.second.ask(tokens, 1)
    world.await_found(tokens, world.second, whole_blocks(600))
    world.second.forget(also_the_pool=True)
    expected = world.plain.ask(tokens).tokens
    assert world.second.ask(tokens) == Answer(expected, 0)
    world.await_found(tokens, world.second, whole_blocks(600))
    assert world.second.ask(tokens).tokens == expected


def test_the_log_says_that_the_pool_failed_and_is_used_again(world: World) -> None:
    log = world.second.log.read_text()
    assert re.search("the pool fails, so prefixes are computed", log)
    assert re.search("the pool is used again", log)
    assert "that is a bug" not in log
