"""A cluster over two machines, by the commands of docs/roles.md typed where they are for."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pytest

import mooncake
from tests.support.hosts.hosts import HOME, SHARED, Host, hosts
from tests.support.serve.server_process import nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * count for count in (1, 20, 40)]
NUM_TOKENS = 24
PORT = 6400


def write_secret(host: Host, name: str) -> None:
    host.path(f"{HOME}/{name}").touch(mode=0o600)
    host.path(f"{HOME}/{name}").write_text(secrets.token_hex(16))


def copy(source: Host, target: Host, name: str) -> None:
    """Copy a file from home to home, as scp does."""
    shutil.copy2(source.path(f"{HOME}/{name}"), target.path(f"{HOME}/{name}"))


def answers(host: Host, url: str) -> list[list[int]]:
    asked = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return [
        host.post(f"{url}/completions", {"prompt": text, **asked})["choices"][0]["token_ids"]
        for text in PROMPTS
    ]


def test_decode_and_a_gateway_join_from_other_machines(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(PROMPTS, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    alone = [list(each.outputs[0].token_ids) for each in sampled]
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        first, second = machines
        write_secret(first, "secret")
        secret = "--cluster-secret-file=secret"
        head = first.mooncake(
            "serve", f"{SHARED}/{model.name}", "--headless", "--prefill=1", "--decode=0",
            "--dtype=float32", "--kv-cache-memory-bytes=32MiB", "--kvstore-dram-bytes=32MiB",
            f"--bind-host={first.address}", f"--join-port={PORT}", secret,
        )  # fmt: skip
        head.wait_for(rf"--role ROLE --join tcp://{first.address}:{PORT}")

        at = f"{first.address}:{PORT}"
        join = ["serve", "--role", "decode", "--join", at, "--kv-cache-memory-bytes=32MiB"]
        write_secret(second, "other")
        stranger = second.mooncake(
            *join, f"--bind-host={second.address}", "--cluster-secret-file=other"
        )
        assert stranger.process.wait(120) == 4
        assert f"cluster-secret: the gateway at tcp://{at} has another one" in stranger.output

        copy(first, second, "secret")
        unreachable = second.mooncake(*join, secret)
        assert unreachable.process.wait(60) == 2
        assert f"give its address there, such as --bind-host {second.address}" in (
            unreachable.output
        )
        join += [f"--bind-host={second.address}", secret]
        joined = second.mooncake(*join)
        joined.wait_for(r"\(pid \d+\) serves")
        gateway = first.mooncake(
            "serve", "--role", "gateway", "--join", at, "--port=8000",
            f"--bind-host={first.address}", secret,
        )  # fmt: skip
        url = gateway.wait_for(r"on (http://\S+/v1)").group(1)
        assert answers(first, url) == alone

        second.vanish()
        second.come_back()
        assert joined.process.wait(30) != 0
        copy(first, second, "secret")
        second.mooncake(*join).wait_for(r"\(pid \d+\) serves")
        assert answers(first, url) == alone
        assert head.stop() == 0, head.output
