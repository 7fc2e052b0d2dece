"""Clusters over two machines, by the commands of docs/roles.md and docs/stages.md typed where they
are for.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import mooncake
from tests.support.docs.blocks import ROOT, words_of
from tests.support.hosts.health_ports import assert_health_ports_are_where_status_says
from tests.support.hosts.hosts import HOME, SHARED, Host, hosts
from tests.support.serve.server_process import nano_checkpoint
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * count for count in (1, 20, 40)]
NUM_TOKENS = 24
LOSS = 0.02
NUM_SENT_AGAIN = 4
PORT = 6400
PAGES, POOL = "--kv-cache-memory-bytes=32MiB", "--kvstore-dram-bytes=32MiB"
SMALL = ("--dtype=float32", PAGES)


def make_secret(host: Host) -> None:
    """Type what docs/roles.md says to get a secret."""
    [typed] = re.findall(r"`(openssl rand [^`]*)`", (ROOT / "docs" / "roles.md").read_text())
    host.check("sh", "-ec", typed)


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


def first_answers(host: Host, url: str) -> list[list[int]]:
    """Return the answers once this gateway knows the decode worker, which says that it serves when
    any gateway knows it.
    """

    def tried() -> list[list[int]] | None:
        try:
            return answers(host, url)
        except AssertionError:
            return None

    return wait_until(tried, "answers") or []


def tokens_alone(model: Path) -> list[list[int]]:
    """Return the answers of one process."""
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(PROMPTS, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in sampled]


def test_decode_and_a_gateway_join_from_other_machines(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    alone = tokens_alone(model)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        first, second = machines
        make_secret(first)
        secret = "--cluster-secret-file=secret"
        told = {"DIR": f"{SHARED}/{model.name}", "10.0.0.7": first.address}
        [words] = words_of("docs/roles.md", "mooncake serve DIR --bind-host 10.0.0.7", told)
        head = first.mooncake(*words, "--headless", "--prefill=1", "--decode=0", *SMALL, POOL)
        head.wait_for(rf"--role ROLE --join tcp://{first.address}:{PORT}")

        at = f"{first.address}:{PORT}"
        told = {"10.0.0.7": first.address, "10.0.0.8": second.address}
        [join] = words_of("docs/roles.md", "mooncake serve --role decode --join 10.0.0.7", told)
        join += [PAGES, "--http-without-tls"]
        make_secret(second)
        stranger = second.mooncake(*join)
        assert stranger.process.wait(LONG_S) == 4
        assert f"cluster-secret: the gateway at tcp://{at} has another one" in stranger.output

        copy(first, second, "secret")
        here = join.index("--bind-host")
        unreachable = second.mooncake(*join[:here], *join[here + 2 :])
        assert unreachable.process.wait(LONG_S) == 2
        assert f"give its address there, such as --bind-host {second.address}" in (
            unreachable.output
        )
        joined = second.mooncake(*join)
        joined.wait_for(r"\(pid \d+\) serves")
        gateway = first.mooncake(
            "serve", "--role", "gateway", "--join", at, "--port=8000",
            f"--bind-host={first.address}", secret,
        )  # fmt: skip
        url = gateway.wait_for(r"on (http://\S+/v1)").group(1)
        assert first_answers(first, url) == alone
        assert_health_ports_are_where_status_says(first, url, {first.name, second.name})

        for each in machines:
            each.lose(LOSS)
        before = [each.num_sent_again() for each in machines]
        while any(
            each.num_sent_again() < number + NUM_SENT_AGAIN
            for each, number in zip(machines, before, strict=True)
        ):
            assert answers(first, url) == alone
        for each in machines:
            each.lose(0.0)

        second.vanish()
        second.come_back()
        assert joined.process.wait(LONG_S) != 0
        copy(first, second, "secret")
        second.mooncake(*join).wait_for(r"\(pid \d+\) serves")
        assert first_answers(first, url) == alone
        assert head.stop() == 0, head.output


def test_the_first_stages_of_prefill_are_on_another_machine(tmp_path: Path) -> None:
    model = nano_checkpoint(tmp_path / "shared")
    alone = tokens_alone(model)
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as (first, second):
        make_secret(first)
        copy(first, second, "secret")
        told = {
            "DIR": f"{SHARED}/{model.name}", "10.0.0.7": first.address, "10.0.0.8": second.address
        }  # fmt: skip
        there, here = words_of("docs/stages.md", "mooncake ranks", told)
        ranks = second.mooncake(*there)
        ranks.wait_for("ranks are started at")
        server = first.mooncake(*here, *SMALL, POOL)
        url = server.wait_for(r"on (http://\S+/v1)").group(1)
        assert answers(first, url) == alone
        assert second.check("pgrep", "-f", "[f]ollower_program"), "a stage computes there"
        assert server.stop() == 0, server.output
        assert ranks.stop() == 0, ranks.output
