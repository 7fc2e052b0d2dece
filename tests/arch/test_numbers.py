"""Numbers that documents promise are those of the code: each sentence is written here from the
constants, and must be on its page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.api.config import ApiConfig
from mooncake.api.constrained import checker, schema_graph
from mooncake.api.http import access, repeats, server
from mooncake.base.block_events.kv_events import KvEventsConfig
from mooncake.base.request import Priority
from mooncake.cli import chat
from mooncake.engine import chunks, step_shares
from mooncake.engine.ranks import rank_group
from mooncake.kvstore.config import MAX_KEEP_S
from mooncake.kvstore.index import holder_sets
from mooncake.kvstore.node import long_work
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import http_server
from mooncake.launch.host.secrets import credentials, key_source
from mooncake.launch.worker.ranks import rank_host, sealed_link
from mooncake.launch.worker.weights import piece_reader
from mooncake.model.checkpoint.files import encryption
from mooncake.model.grammars import grammar_jobs
from mooncake.rpc import codec, zmq_channel
from mooncake.scheduler.gateway import pool_search
from mooncake.scheduler.placement import block_feed
from mooncake.scheduler.requests import permits
from mooncake.telemetry import audit, log
from mooncake.transfer.net import listener, session, standing

DOCS = Path(__file__).parents[2] / "docs"
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SPANS = {60.0: "a minute", 3600.0: "an hour"}
PREMIUM, INTERACTIVE, BATCH = (each.weight for each in Priority)
API, SHARES = ApiConfig(), step_shares

SENTENCES: dict[str, list[str]] = {
    "access.md": [
        f"`--timeout-keep-alive` ({API.keep_alive_s} s)",
        f"with an [`Idempotency-Key`](retries.md) after {API.linger_s:g} s",
    ],
    "guarantees.md": [
        f"named after {rank_group.SILENT_S:g} seconds of silence (the test allows 25)",
        f"References of schemas have {schema_graph.MAX_REFERENCE_CHARS:,} characters at most",
        f"match more than {WORDS[schema_graph.MAX_PATTERNS]} patterns",
        f"not again within {WORDS[int(API.kept_answer_s) // 60]} minutes of a complete answer",
        f"if its body has at most {access.LEAST_BODY_BYTES >> 10} KiB",
        f"nothing but calls is stopped after {chat.MAX_ROUNDS} answers",
        f"unless {pool_search.MAX_REMOVED:,} blocks were removed meanwhile",
        f"cause at most {audit.MOST_A_MINUTE} lines of one event in a minute",
        f"except for {SHARES.NUM_AFTER} steps after others have gone",
        f"as {SHARES.MOST_OWED} later steps can make up for",
        f"costs it {WORDS[SHARES.MOST_LATE]} of its shares at most",
        f"get a token for each {INTERACTIVE // BATCH} of interactive or {PREMIUM} of premium",
        f"sends nothing for {piece_reader.LOST_S:g} s",
    ],
    "killed.md": [f"`--orphan-timeout` ({ServeConfig().orphan_timeout} s)"],
    "pool.md": [
        f"remembers about {1 << holder_sets.PLACE_BITS:,} removed blocks",
        f"keeps the last {KvEventsConfig().buffer_steps:,} batches",
        f"its own requests, {block_feed.MAX_BLOCKS:,} at most",
        f"remember the last {pool_search.MAX_REMOVED:,} removed blocks",
        f"in DRAM for up to {SPANS[MAX_KEEP_S]}",
    ],
    "pool-alone.md": [
        f"{long_work.MAX_BEGUN} messages of more than {long_work.PIECE_KEYS:,} blocks",
    ],
    "retries.md": [
        f"byte for byte, for {API.kept_answer_s / 60:g} minutes",
        f"goes on for {API.linger_s:g} s after its last connection has broken",
        f"At most {repeats.MAX_READERS} connections read one answer",
        f"`--max-kept-answer-bytes` ({API.max_kept_answer_bytes >> 20} MiB)",
    ],
    "security.md": [
        f"{API.max_connections:,} connections, the oldest that have proven no key give way, and "
        f"{server.MAX_SHAKING} TLS handshakes of {API.header_timeout_s:g} s",
        f"handshake, {sealed_link.PROVE_S:g} s; {rank_host.MAX_UNPROVEN} connections",
        f"counts once, within {SPANS[credentials.SIGNED_S]} by the node's own clock",
        f"nothing: {zmq_channel.MAX_UNPROVEN} connections on which no valid message has come",
        f"a handshake of {session.HANDSHAKE_S:g} s; {listener.MAX_UNPROVEN} connections",
        f"`/health…`, `/metrics`; {http_server.MAX_CONNECTIONS} connections, the oldest give way",
        f"both look every {standing.LOOK_S:g} s",
        f"chunks of {encryption.CHUNK_BYTES >> 10} KiB",
        f"for at most {key_source.COMMAND_S:g} s",
        f"gets at most {audit.MOST_A_MINUTE} lines of one event in a minute. If the event names a "
        f"`who`, it gets {audit.MOST_A_MINUTE} for each",
        f"It distinguishes {log.MAX_KINDS:,} of these in a minute",
        f"A text is cut after {audit.MAX_CHARS:,} characters",
        f"a message of up to {codec.MAX_MESSAGE_BYTES >> 20} MiB before it knows the sender",
        f"for each of {zmq_channel.MAX_UNPROVEN} connections, for the "
        f"{zmq_channel._HANDSHAKE_MS / 1000:g} s that a handshake may take",
        f"a pool client for each of its {zmq_channel.MAX_PER_CLIENT} connections",
        f"once for each peer (of the last {zmq_channel._MAX_KNOWN:,})",
        f"busy with {WORDS[grammar_jobs.MAX_ABANDONED]} grammars",
        f"{WORDS[int(checker.WALL_LIMIT_S)]} seconds by the clock",
    ],
    "tenants.md": [
        f"at most {permits.TENANT_RATIO}/{permits.TENANT_RATIO + 1} of",
        f"gets {PREMIUM} tokens of premium for {INTERACTIVE} of interactive",
        f"each {INTERACTIVE // BATCH} of interactive or {PREMIUM} of premium",
        f"if {SHARES.MOST_OWED} later steps can make up for it",
        f"costs them {WORDS[SHARES.MOST_LATE]} steps at most",
        f"for {SHARES.NUM_AFTER} more steps: to {SHARES.AFTERWARDS:g} times",
        f"chunk of its prompt ({chunks.UNIT} tokens)",
    ],
}


@pytest.mark.parametrize("page", SENTENCES)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert [each for each in SENTENCES[page] if each not in text] == []


def test_both_look_as_often() -> None:
    assert zmq_channel.LOOK_S == standing.LOOK_S
