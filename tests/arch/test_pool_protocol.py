"""docs/pool-protocol.md says what the code says: messages, fields, versions, times and limits."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import msgspec

from mooncake.base import rights
from mooncake.base.kv_layout import BlockPlaces, SegmentRef
from mooncake.base.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, WorkerRef
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.rights import SENDERS, CredentialRole
from mooncake.identity import credential
from mooncake.identity.credential import Certificate
from mooncake.kvstore.client import client
from mooncake.kvstore.client.block_writer import ASK_AGAIN_S
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.questions import ANSWERS
from mooncake.launch.pool_client.session import PoolSessionConfig
from mooncake.launch.pool_node.admin import ADDRESS
from mooncake.rpc import codec, membership, zmq_channel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.transfer.engine import MAX_ANSWER_BYTES, MAX_ANSWER_PIECES, MAX_QUESTION_BYTES
from mooncake.transfer.net import handshake, listener
from mooncake.transfer.router import QUESTIONS
from mooncake.transfer.tcp import wire
from mooncake.transfer.tcp.server import ServerLimits
from tests.support.wire_schema import schema_of

PAGE = (Path(__file__).parents[2] / "docs" / "pool-protocol.md").read_text()
BY_TAG = {kind.__struct_config__.tag: kind for kind in AnyMessage.__args__}
STRUCTS = {
    **BY_TAG,
    **{kind.__name__: kind for kind in (WorkerRef, BlockPlaces, SegmentRef, Certificate)},
    "Credential": credential._Written,
    "transfer hello": handshake.Hello,
    "transfer challenge": handshake.Challenge,
    "transfer proof": handshake.Proof,
    "transfer welcome": handshake.Welcome,
    "transfer refusal": handshake.Refusal,
}
CREDENTIALS = ("Credential", "Certificate")
"""Said to be arrays in the sentence before the heading."""
OTHERS = "Other fields are for engines."
"""Says that a table leaves out what a client never sends."""


def sections() -> dict[str, str]:
    """Return the text under each heading of the third level."""
    found = re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return dict(found)


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables in a text."""
    lines = [line for line in text.splitlines() if re.match(r"\| (?!-)", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def told(text: str) -> list[str]:
    """Return the fields in a section's first table, as `wire_schema` writes them."""
    table = text.split("| field | type | |")[1].split("\n\n", maxsplit=1)[0]
    fields = []
    for name, kind, meaning in rows(table):
        needed = " needed" if meaning.startswith("needed") else ""
        fields.append(f"{name.strip('`')}: {kind.strip('`').replace(chr(92), '')}{needed}")
    return fields


def test_every_table_of_fields_is_that_of_the_code() -> None:
    tables = {name: text for name, text in sections().items() if "| field | type |" in text}
    assert len(tables) > 20
    for name, text in tables.items():
        kind = STRUCTS[name]
        schema = schema_of(kind)[kind.__name__]
        fields = [line for line in schema if line != "in order" and not line.startswith("tag ")]
        if OTHERS in text:
            assert set(told(text)) <= set(fields), name
            assert {f for f in fields if f.endswith(" needed")} <= set(told(text)), name
        else:
            assert told(text) == fields, name
        is_array = text.startswith("\nAn array") or name in CREDENTIALS
        assert kind.__struct_config__.array_like == is_array, name


def test_every_message_that_a_client_may_send_is_on_the_page() -> None:
    of_clients = {
        kind.__struct_config__.tag
        for kind, roles in SENDERS.items()
        if CredentialRole.POOL_CLIENT in roles
    }
    [more] = re.findall(r"^\| tag \| answer \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    shown = {*sections(), *(tag for row in rows(more) for tag in re.findall(r"`(\w+)`", row[0]))}
    assert of_clients <= shown
    answers = {tag for row in rows(more) for tag in re.findall(r"`(\w+)`", row[1])}
    assert answers <= BY_TAG.keys()
    assert shown & BY_TAG.keys() <= of_clients | {"found", "put_granted", "pin_granted", "refused"}


def numbers(head: str) -> dict[str, str]:
    """Return a table of two columns by its first, without links and code marks."""
    [table] = re.findall(rf"^{re.escape(head)}.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    plain = re.sub(r"\[(\w+)\]\([^)]*\)|`(\w+)`", r"\1\2", table)
    return {row[0]: row[1] for row in rows(plain)[1:]}


def test_times_are_those_of_the_code() -> None:
    node, report_s = KvStoreConfig(), membership.HELLO_RETRY_S
    assert report_s == client.REPORT_INTERVAL_S
    defaults = {each.name: each.default for each in msgspec.structs.fields(PoolSessionConfig)}
    assert numbers("| what | seconds |") == {
        "no answer over ZeroMQ: ask again after": f"{ASK_AGAIN_S:g}",
        "no answer: give up after": f"{defaults['timeout_s']:g}",
        "a put that has not ended is taken back after": f"{node.put_timeout_s:g}",
        "pin_granted waits for blocks from SSD at most": f"{node.ssd_load_timeout_s:g}",
        "hold nothing for longer without joining": f"{node.doubt_interval_s:g}",
        "hello and load are sent every": f"{report_s:g}",
        "a client that has joined is lost after a silence of": (
            f"{SchedulerConfig().heartbeat_timeout_s:g}"
        ),
        "a handshake of the data connection is over within": f"{ServerLimits().handshake_s:g}",
    }


def test_limits_are_those_of_the_code() -> None:
    node = KvStoreConfig()
    assert listener.MAX_PER_CLIENT == zmq_channel.MAX_PER_CLIENT
    assert numbers("| limit | value |") == {
        "blocks that one message names": f"{rights.MAX_KEYS:,}",
        "blocks that a put, a pin, find_replicas or forget_blocks names, with those before them": (
            f"{rights.MAX_KEYS_AT_ONCE:,}"
        ),
        "bytes of a message": f"{zmq_channel.MAX_CLIENT_BYTES:,}",
        "characters of a WorkerRef": f"{rights.MAX_NAME_CHARS:,}",
        "open puts and pins of one credential": f"{node.max_tickets_per_client:,}",
        "blocks that these name": f"{node.max_keys_per_client:,}",
        "connections of one credential, control and data each": f"{listener.MAX_PER_CLIENT:,}",
        "clients (ids and epochs) of one credential within a minute": (
            f"{zmq_channel.MAX_PER_CLIENT:,}"
        ),
        "bytes of a message of the handshake": f"{handshake.MAX_HANDSHAKE_BYTES:,}",
    }
    assert node.client_share == 0.5


def test_versions_and_heads_are_those_of_the_code() -> None:
    assert (
        f"frame ({codec.FRAME_VERSION}), of the handshake ({handshake.HANDSHAKE_VERSION})" in PAGE
    )
    assert f"header ({wire.WIRE_VERSION})" in PAGE
    assert f"version of its own ({PROTOCOL_VERSION})" in PAGE
    assert f"`[name, {PROTOCOL_VERSION}, {OLDEST_PROTOCOL_VERSION}]`" in PAGE
    magic, version, *_ = codec.head_of(b"")
    assert f"| 1 | `0x{magic:X}` |\n| 1 | version of the frame: {version} |" in PAGE
    table = PAGE.split("| header | bytes | |")[1].split("\n\n")[0]
    header = {name: (size, meaning) for name, size, meaning in rows(table)}
    assert [int(size) for size, _ in header.values()] == [
        struct.calcsize(f"<{letter}") for letter in wire._HEADER.format.removeprefix("<")
    ]
    names = ("WRITE", "READ", "DONE", "DATA", "REFUSED", "ASK", "TOLD")
    kinds = {name: getattr(wire, name) for name in names}
    assert header["kind"][1] == ", ".join(f"{name} {number}" for name, number in kinds.items())
    assert header["version"][1] == f"{wire.WIRE_VERSION}"
    assert header["ranges"][1] == f"of a WRITE and a READ 1 to {wire.MAX_RANGES:,}; else 0"
    assert wire.MAX_REQUEST_BYTES == 2**30


def test_the_bounds_of_questions_are_those_of_the_code() -> None:
    assert numbers("| what a question and its answer have at most | value |") == {
        "bytes of a question, and of an answer without its payload": f"{MAX_QUESTION_BYTES:,}",
        "bytes of a question at least": f"{wire.RANGE_BYTES}",
        "blocks that a question for no payload names": f"{MAX_ANSWER_PIECES:,}",
        "bytes behind an answer": f"{MAX_ANSWER_BYTES:,}",
        "pieces of these": f"{MAX_ANSWER_PIECES:,}",
    }
    assert f"If `endpoints` of the `SegmentRef` has `{QUESTIONS}`" in PAGE
    assert f"For runs of more than {MAX_ANSWER_PIECES:,} blocks" in PAGE


def test_what_may_be_asked_is_what_a_node_answers() -> None:
    [tags] = re.findall(r"On the data connection a client asks (.*?)\. (.*?) have no", PAGE)
    named = [re.findall(r"`(\w+)`", each) for each in tags]
    assert named == [
        [kind.__struct_config__.tag for kind in ANSWERS],
        [kind.__struct_config__.tag for kind, answer in ANSWERS.items() if answer is None],
    ]


def test_a_node_tells_everybody_what_the_page_says() -> None:
    [table] = re.findall(r"`GET /v1/pool/address`.*?\n\n(.*?)\n\n", PAGE, re.DOTALL)
    assert tuple(row[0].strip("`") for row in rows(table)[1:]) == ADDRESS
