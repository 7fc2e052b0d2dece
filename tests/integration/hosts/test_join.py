"""A cluster over two machines, by the commands of docs/roles.md typed where they are for."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import mooncake
from tests.support.hosts.hosts import HOME, SHARED, Host, hosts
from tests.support.serve.server_process import nano_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * count for count in (1, 20, 40)]
NUM_TOKENS = 24
MOONCAKE = str(Path(sys.executable).parent / "mooncake")
TOKEN = ".ray/auth_token"


def tls(name: str) -> list[str]:
    return [
        f"--ray-ssl-certfile={name}/cert.pem", f"--ray-ssl-keyfile={name}/key.pem",
        f"--ray-ssl-ca-certs={name}/ca.pem", "--cluster-secret-file=secret",
    ]  # fmt: skip


def prepare(machines: Sequence[Host]) -> None:
    """Make the secret and all certificates on the first machine."""
    first = machines[0]
    first.path(f"{HOME}/secret").touch(mode=0o600)
    first.path(f"{HOME}/secret").write_text(secrets.token_hex(16))
    first.check(MOONCAKE, "certificates", "authority", "--out", "ca")
    for each in machines:
        words = ("--authority", "ca", "--name", each.address, "--out", f"node-{each.name}")
        first.check(MOONCAKE, "certificates", "host", *words)


def copy(source: Host, target: Host, *names: str) -> None:
    """Copy files from home to home, as scp does."""
    for name in names:
        place = target.path(f"{HOME}/{name}")
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = source.path(f"{HOME}/{name}")
        (shutil.copytree if found.is_dir() else shutil.copy2)(found, place)


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
        prepare(machines)
        copy(first, second, "node-b", "secret")
        head = first.mooncake(
            "serve", f"{SHARED}/{model.name}", "--headless", "--prefill=1", "--decode=0",
            "--dtype=float32", "--kv-cache-memory-bytes=32MiB", "--kvstore-dram-bytes=32MiB",
            f"--bind-host={first.address}", *tls("node-a"),
        )  # fmt: skip
        address, to_gateways = (
            head.wait_for(rf"one more {who}: .* --join (\S+)").group(1)
            for who in ("worker", "gateway")
        )
        join = ["serve", "--role", "decode", "--join", address, *tls("node-b")]
        small = ["--kv-cache-memory-bytes=32MiB", f"--bind-host={second.address}"]

        unreachable = second.mooncake(*join)
        assert unreachable.process.wait(60) == 2
        assert f"give this machine's address there, such as --bind-host {second.address}" in (
            unreachable.output
        )
        stranger = second.mooncake(*join, *small)
        assert stranger.process.wait(120) == 2
        assert "the same token in ~/.ray/auth_token" in stranger.output

        copy(first, second, TOKEN)
        joined = second.mooncake(*join, *small)
        joined.wait_for("has joined")
        gateway = first.mooncake(
            "serve", "--role", "gateway", "--join", to_gateways, "--port=8000",
            f"--bind-host={first.address}", *tls("node-a"),
        )  # fmt: skip
        url = gateway.wait_for(r"on (http://\S+/v1)").group(1)
        assert answers(first, url) == alone

        second.vanish()
        second.come_back()
        assert joined.process.wait(30) != 0
        copy(first, second, "node-b", "secret", TOKEN)
        second.mooncake(*join, *small).wait_for("has joined")
        assert answers(first, url) == alone
        assert head.stop() == 0, head.output
