"""Records the seeds in `tests/fuzz/corpus` from real traffic: `python -m tests.fuzz.record`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import numpy as np
import openai
from safetensors.numpy import save

from mooncake.api.http.client_wire import request_head
from mooncake.base import Drain, SeededIds, WorkerRef
from mooncake.base.messages import WhoAreYou
from mooncake.crypto.keys import Key, KeyRing
from mooncake.identity.credential import PREFIX, issue
from mooncake.kvstore.storage.block_record import (
    PAGE_BYTES,
    BlockHeader,
    FileHeader,
    pack_block_header,
    pack_file_header,
)
from mooncake.kvstore.storage.record_cipher import EXTRA_BYTES
from mooncake.launch.host.secrets.credentials import RequestVerifier, sign_request
from mooncake.model.checkpoint.files.encryption import StoredFile, new_manifest
from mooncake.model.checkpoint.making.presets import PRESETS, preset_config
from mooncake.rpc.codec import NO_CERTIFICATE, encode, head_of
from mooncake.sim.faults.random_faults import Trial
from mooncake.transfer.net.handshake import HandshakeRefused
from mooncake.transfer.rdma import wire as rdma
from mooncake.transfer.shm import wire as shm
from mooncake.transfer.staging import wire as staging
from tests.support.api.json_schemas import SchemaMaker
from tests.support.api.server import ScriptedBackend, live_api_server, says, tiny_model
from tests.support.fuzz.campaign import CORPUS
from tests.support.fuzz.target import framed
from tests.support.fuzz.targets.http import ROUTES
from tests.support.fuzz.targets.messages import (
    ROLES,
    SECRET,
    control_seed,
    credentials,
    genuine_handshake,
)
from tests.support.fuzz.targets.storage import SealedWeights, record_cipher, sealed_file
from tests.support.fuzz.targets.transfers import PROTECTIONS, conversation
from tests.support.relay import Relay

ROOT = Path(__file__).resolve().parents[2]
SIM_SEEDS = range(4)
NUM_SCHEMAS = 8

GRAMMARS = {
    "sums": 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/\n',
    "query": (
        'start: "SELECT " NAME (", " NAME)* " FROM " NAME where?\n'
        'where: " WHERE " NAME "=" /[0-9]{1,4}/\nNAME: /[a-z_]+/\n%ignore / /\n'
    ),
    "schema": 'start: "a: " thing\nthing: %json {"type": "object", "properties": {"a": {}}}\n',
    "gbnf": 'root ::= item ("," item)*\nitem ::= [a-z]+ | "\\"" [^"]* "\\""\n',
    "regexes": 'start: A~2..4\nA: %regex {"substring_words": "one two three"}\n// words\n',
}  # fmt: skip
PATTERNS = [
    r"^[A-Z]{2,3}-\d{1,4}$", r"(GET|POST) /[a-z/]*(\?[a-z]+=\w*)?", r"\p{Lu}\p{Ll}+",
    r"[^\s]{1,20}", r"(?i)yes|no", r"\+?[1-9]\d{1,14}", r"#[0-9a-fA-F]{6}", r"(a|b)*c{2,}",
]  # fmt: skip
SPECIAL_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#"}}},
    {"allOf": [{"type": "string", "pattern": "a"}, {"format": "date", "minLength": 3}]},
    {"enum": ["a", 1, None, {"b": [2]}], "x-guidance": {}},
    ["one", "two", "three"],
    True,
]


def main() -> None:
    """Write all seeds anew."""
    made = {
        "rpc": rpc(), "proofs": proofs(), "handshake": handshake(), "control": control(),
        **transfers(), "ssd-records": records(), "sealed-records": sealed_records(),
        "sealed-weights": sealed_weights(), "safetensors": safetensors(), "model-config": configs(),
        "lark": {name: text.encode() for name, text in GRAMMARS.items()},
        "regex": {f"{number}": text.encode() for number, text in enumerate(PATTERNS)},
        "schemas": schemas(), **asyncio.run(http()), "pool-admin": pool_admin(),
    }  # fmt: skip
    shutil.rmtree(CORPUS, ignore_errors=True)
    for name, seeds in made.items():
        folder = CORPUS / name
        folder.mkdir(parents=True)
        for seed, data in seeds.items():
            (folder / seed).write_bytes(data)
        print(f"{name:14} {len(seeds):3} seeds {sum(map(len, seeds.values())):7} bytes")


def rpc() -> dict[str, bytes]:
    """Return the shortest and the longest message of each kind that simulated clusters send."""
    found: dict[str, bytes] = {}
    for seed in SIM_SEEDS:
        trial = Trial(seed)

        def hear(source: str, target: str, message: Any) -> None:
            data, name = encode(message), type(message).__name__
            for kind, choose in ((f"{name}-short", min), (f"{name}-long", max)):
                found[kind] = choose(found.get(kind, data), data, key=len)

        trial.world.network.listener = hear
        trial.run()
    return dict(sorted(found.items()))


def proofs() -> dict[str, bytes]:
    """Return a message of each role, one with all that it begins with, a credential and a signed
    request.
    """
    ref = WorkerRef("w", "e", "tcp://127.0.0.1:1#ab")
    spoken = [encode(each)[len(NO_CERTIFICATE) :] for each in (Drain(), WhoAreYou(gateway=ref))]
    found = {
        f"{role.value}-{n}": bytes((index,)) + message
        for index, role in enumerate(ROLES)
        for n, message in enumerate(spoken)
    }
    held, kind = issue(SECRET, "worker", [ROLES[0]], tenant="acme", ids=SeededIds(0)), len(ROLES)
    challenge = RequestVerifier(held.cluster, lambda: 0.0).challenge()
    request = sign_request(held, "GET", "/v1/pool/stats", challenge)
    text = held.text.removeprefix(PREFIX)
    return found | {
        "whole": bytes((kind,)) + head_of(held.signed) + spoken[0],
        "credential": bytes((kind + 1,)) + text.encode(),
        "request": bytes((kind + 2,)) + request.encode(),
    }


def handshake() -> dict[str, bytes]:
    """Return both sides of a handshake, a refusal, and one with the wrong secret."""
    genuine = genuine_handshake()
    said, answered = genuine.said, genuine.answered
    stranger = credentials("client", 3).connect("other", ["earlier"] * 3)
    refused = credentials("owner", 2).accept().step(said[1])
    with contextlib.suppress(HandshakeRefused):
        stranger.step(refused)
    return {
        "owner": b"\0" + framed(said), "client": b"\1" + framed(answered),
        "refusal": b"\1" + framed([refused]), "fences": b"\0" + framed([stranger.first_message]),
    }  # fmt: skip


def control() -> dict[str, bytes]:
    """Return messages of all control sessions; even kinds are what clients ask."""
    nic = rdma.NicAddress("mlx5_0", bytes(16), 1, 5, True)
    end = rdma.PairAddress(nic, 17, 4711)
    spoken: dict[int, tuple[Any, list[Any]]] = {
        0: (rdma.CODEC, [
            rdma.AskRegion(1), rdma.AskGrant(7), rdma.OpenPair(1, "mlx5_0", end), rdma.ClosePair(1),
        ]),
        3: (rdma.CODEC, [
            rdma.Inventory([nic]), rdma.RegionKeys(1, 2**40, 4096, {"mlx5_0": 7}),
            rdma.RegionUnknown(2, "no"), rdma.GrantGood(7), rdma.GrantRefused(7, "no"),
            rdma.PairOpened(1, end), rdma.PairRefused(1, "full"), rdma.PairClosed(1),
        ]),
        4: (staging.CODEC, [
            staging.AskRegion(1), staging.Open(1, 1, [(0, 64), (128, 64)], True, False),
            staging.Land(1), staging.Settle(2, 1), staging.Flush(3, 1), staging.Drop(4),
        ]),
        1: (staging.CODEC, [
            staging.RegionFacts(1, "cuda:0", ["tcp"], 4096), staging.Granted(1, 2, 64),
            staging.Done(1), staging.Refused(2, "gone"),
        ]),
        2: (shm.CODEC, [shm.OpenRegion(1)]),
        5: (shm.CODEC, [shm.RegionOpened(1, 4096, 0), shm.RegionRefused(2, "no", True)]),
    }  # fmt: skip
    return {
        f"{kind}": control_seed(kind, [codec.encode(message) for message in messages])
        for kind, (codec, messages) in spoken.items()
    }


def transfers() -> dict[str, dict[str, bytes]]:
    """Return what a client and an owner say to each other over a TCP connection."""
    asked, answered = conversation()
    found: dict[str, dict[str, bytes]] = {"tcp-owner": {}, "tcp-client": {}}
    for number, protection in enumerate(PROTECTIONS):
        for name, cut, altered in (("whole", 0, 0), ("in-pieces", 14, 0), ("altered", 0, 9)):
            how = bytes((cut, number + altered * len(PROTECTIONS)))
            found["tcp-owner"][f"{protection.value}-{name}"] = how + asked
            found["tcp-client"][f"{protection.value}-{name}"] = how + answered
    return found


def records() -> dict[str, bytes]:
    """Return pages as a pool node writes them."""
    page = memoryview(bytearray(PAGE_BYTES))
    found = {"file": b"\1" + pack_file_header(FileHeader("weights dtype shape", 65_536, 1000))}
    for tenant in ("", "tenant-ü"):
        pack_block_header(page, BlockHeader(bytes(range(32)), 2**63 + 5, 65_536, 77, tenant))
        found[f"block-{len(tenant)}"] = b"\0" + bytes(page)
    return {name: data.rstrip(b"\0") for name, data in found.items()}


def sealed_records() -> dict[str, bytes]:
    """Return encrypted slots as a pool node writes them, and what lies in them."""
    cipher, block = record_cipher(), memoryview(bytes(range(256)))
    found = {}
    for tenant in ("", "tenant-ü"):
        page = memoryview(bytearray(PAGE_BYTES))
        pack_block_header(page, BlockHeader(bytes(range(32)), 7, len(block), 77, tenant))
        found[f"plain-{len(tenant)}"] = b"\1" + bytes(page) + bytes(block)
        out = memoryview(bytearray(len(block) + EXTRA_BYTES))
        of_block, _ = cipher.seal(tenant, 7, block, out)
        cipher.seal_header(page, of_block)
        found[f"sealed-{len(tenant)}"] = b"\0" + bytes(page) + bytes(out[: len(block)])
    return found


def sealed_weights() -> dict[str, bytes]:
    """Return a manifest and a file, as `mooncake model encrypt` writes them."""
    plain, key = SealedWeights.plain, bytes(range(32))
    stored = {"a.safetensors": StoredFile(len(plain), "0" * 64)}
    size = SealedWeights.chunk_bytes
    manifest = msgspec.json.encode(new_manifest(stored, size, key, KeyRing([Key(bytes(32))])))
    file = sealed_file("a.safetensors", plain, size, key)
    return {
        "manifest": b"\0" + manifest, "known": b"\1" + manifest, "file": b"\2\0\xff" + file,
        "part": b"\2\x50\x90" + file,
    }  # fmt: skip


def safetensors() -> dict[str, bytes]:
    """Return headers as the safetensors library writes them."""
    one = save({"a": np.zeros((3, 4), np.float32)})
    some = {f"layers.{n}.weight": np.zeros((2, n, 3), np.float16) for n in range(4)}
    more = save({**some, "empty": np.zeros(0, np.int8)}, metadata={"format": "pt"})
    return {
        name: data[8 : 8 + int.from_bytes(data[:8], "little")]
        for name, data in {"one": one, "more": more}.items()
    }


def configs() -> dict[str, bytes]:
    """Return the configurations of the presets."""
    return {name: json.dumps(preset_config(name)).encode() for name in sorted(PRESETS)}


def schemas() -> dict[str, bytes]:
    """Return parameters of tools as found in the wild, and some with what is special."""
    made = [SchemaMaker(seed).parameters() for seed in range(NUM_SCHEMAS)]
    return {f"{n}": json.dumps(one).encode() for n, one in enumerate([*made, *SPECIAL_SCHEMAS])}


async def http() -> dict[str, dict[str, bytes]]:
    """Return what the official clients and a few requests of our own send, and what they get."""
    async with live_api_server(
        ScriptedBackend(says("hello")), model=tiny_model(max_model_len=4096)
    ) as url:
        with Relay(int(url.rsplit(":", 1)[1]), records=True) as relay:
            await asyncio.to_thread(_ask, f"http://127.0.0.1:{relay.port}")
    pairs = [(bytes(one.sent), bytes(one.received)) for one in relay.connections]
    bodies: dict[str, bytes] = {}
    for asked, _ in pairs:
        head, _, body = asked.partition(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        if path in ROUTES:
            name = f"{path.strip('/').replace('/', '-')}-{len(bodies)}"
            bodies[name] = bytes((ROUTES.index(path),)) + body
    return {
        "http": {f"{n}": b"\0" + asked for n, (asked, _) in enumerate(pairs)}
        | {"chunked": b"\5" + CHUNKED, "two": b"\0" + TWO},
        "bench-answers": {f"{n}": b"\5" + answer for n, (_, answer) in enumerate(pairs)},
        "bodies": bodies,
    }


CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"prompt\r\n7;a=b\r\n":"hi"}\r\n0\r\nX: y\r\n\r\n'
)
TWO = request_head("GET", "/ping", "localhost", {}, 0) * 2
TOOL = {
    "name": "go", "description": "Goes.",
    "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
}  # fmt: skip


def _ask(url: str) -> None:
    """Use the server as clients do, each call over a connection of its own."""
    user: Any = [{"role": "user", "content": "hello"}]
    close = {"Connection": "close"}
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=close, max_retries=0)
    chat.chat.completions.create(model="tiny", messages=user, max_tokens=3)
    tools: Any = [{"type": "function", "function": TOOL}]
    called: Any = [
        *user,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "functions.go:0", "type": "function",
             "function": {"name": "go", "arguments": '{"to": "x"}'}},
        ]},
        {"role": "tool", "tool_call_id": "functions.go:0", "content": "there"},
    ]  # fmt: skip
    list(chat.chat.completions.create(
        model="tiny", messages=called, tools=tools, max_tokens=3, stream=True, logprobs=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    chat.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=2, n=2, echo=True, stop=["x"], seed=3,
        logit_bias={"5": -3}, temperature=0.5, extra_body={"guided_regex": "[a-z]+"},
    )  # fmt: skip
    chat.responses.create(model="tiny", input="hello", instructions="be short")
    chat.models.list()
    claude = anthropic.Anthropic(base_url=url, api_key="none", default_headers=close, max_retries=0)
    claude.messages.create(model="tiny", max_tokens=3, messages=user, system="be short")
    claude.messages.count_tokens(model="tiny", messages=user)
    json_form = {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for path, body in (
        ("/tokenize", {"prompt": "hello"}),
        ("/tokenize", {"messages": user, "add_generation_prompt": True}),
        ("/detokenize", {"tokens": [1, 2, 300]}),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, **json_form}),
        ("/v1/chat/completions", {"messages": user, "max_tokens": 2, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}),
    ):  # fmt: skip
        httpx.post(url + path, json=body, headers=close)
    httpx.get(f"{url}/health", headers=close)


def pool_admin() -> dict[str, bytes]:
    """Return requests to an admin port."""
    signed = {"Authorization": "Mooncake challenge=ab,nonce=cd,mac=" + "ef" * 32}
    return {
        "health": request_head("GET", "/health/live", "localhost", {}, 0),
        "stats": request_head("GET", "/v1/pool/stats", "localhost", signed, 0),
        "drain": request_head("POST", "/v1/pool/drain?x", "localhost", signed, 2) + b"{}",
        "token": request_head(
            "GET", "/v1/pool/stats", "localhost", {"Authorization": "Bearer wrong"}, 0
        ),
    }


if __name__ == "__main__":
    main()
