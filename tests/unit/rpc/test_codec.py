"""The codec carries every message unchanged and answers anything else with ProtocolError."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from mooncake.base import messages as m
from mooncake.base import pack_tokens
from mooncake.base import pool_messages as p
from mooncake.base.cluster_mode import ClusterMode, Weights
from mooncake.base.errors import ProtocolError
from mooncake.base.kv_layout import BlockPlaces, KvPart, SegmentRef
from mooncake.base.large_settings import LargeSettings, SettingName
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.request import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs
from mooncake.rpc.codec import (
    FRAME_VERSION,
    NO_CERTIFICATE,
    UnknownMessage,
    certificate_of,
    decode,
    encode,
    head_of,
)

WORKER = m.WorkerRef("decode-0", "e1", "tcp://127.0.0.1:1")
PLACES = BlockPlaces(SegmentRef("eng", {"tcp": "127.0.0.1:2"}, "h"), 3, 4096, [0, 8192])
REQUEST = GenerateRequest(
    request_id="r1",
    prompt=pack_tokens([1, 2, 163839]),
    sampling=SamplingParams(max_tokens=5),
    tenant="t",
)
KEY = b"\x00\xffa block's key."
HEAD = len(NO_CERTIFICATE)
SOURCE = m.BlockSource(store=WORKER, first=0, stop=2)
MODE = ClusterMode(3, "g", True, 1, False, Weights(2, "/models/new", "r", "f"))
EXAMPLES: list[AnyMessage] = [
    m.WorkerHello(
        worker=WORKER, role=m.Role.DECODE, node_id="n", host="h", pid=7, layout_fingerprint="f",
        block_tokens=64, num_blocks=10, profile=[m.CostSample(1, 2, 3, 0.5)],
    ),
    m.LoadReport(worker=WORKER, load=m.WorkerLoad(num_running=2, counters={"x": 1.5})),
    m.BlockEvents(
        worker=WORKER, tier=m.Tier.DRAM, sequence_no=9, stored=[KEY], snapshot=True
    ),
    m.StepOutputs(
        worker=WORKER,
        outputs=[
            m.RequestOutput(
                request_id="r1", attempt=1, start=0, tokens=[5],
                logprobs=[TokenLogprobs(-0.5, 1, [(5, -0.5)])],
                finish=m.FinishInfo(reason=FinishReason.LENGTH),
            )
        ],
    ),
    m.Welcome(gateway=WORKER, kvstore=None, send_snapshot=True),
    m.AskCluster(asker=WORKER, ticket=3),
    m.ClusterTold(asker=WORKER, ticket=3, facts=b"\x80"),
    m.BorrowWeights(asker=WORKER, ticket=3, revision="r"),
    m.WeightsLent(
        asker=WORKER, ticket=3, lender="decode-0", segment=PLACES.segment,
        files=[m.LentFile("model.safetensors", 5, 1, "d" * 64, b"\1" * 16)],
    ),
    m.Restart(worker=WORKER, mode=MODE),
    m.Asleep(
        worker=WORKER, role=m.Role.DECODE, node_id="n", host="h", pid=7, level=2, mode=MODE,
    ),
    m.CheckWeights(asker=WORKER, ticket=3, model="/models/new"),
    m.WeightsChecked(asker=WORKER, ticket=3, worker=WORKER, revision="r", fingerprint="f"),
    m.PeerLost(worker=WORKER),
    m.Refused(asker=WORKER, ticket=3, message="PutStart", reason="may not"),
    m.Drain(),
    m.RequestTask(
        request=REQUEST, attempt=1, gateway=WORKER, decode=WORKER, prefill=WORKER, sources=[SOURCE]
    ),
    m.Reserved(request_id="r1", attempt=1, decode=WORKER, parts=[KvPart(PLACES, [0, 1], 0, 5)]),
    m.RequestTask(request=REQUEST, attempt=2, gateway=WORKER, decode=WORKER, output_tokens=[4]),
    m.RequestTask(
        request=REQUEST,
        attempt=3,
        gateway=WORKER,
        decode=WORKER,
        named={"logit_bias": SettingName(b"digest", 160), "bad_words": SettingName(b"other", 9)},
        settings=LargeSettings(logit_bias={5: -1.0}),
    ),
    m.BlocksPushed(request_id="r1", attempt=1, indexes=[0, 7], checksums=[2**64 - 1, 0]),
    m.KVReady(request_id="r1", attempt=1, prefill=WORKER, token=3, num_cached_tokens=64),
    m.PushEnded(request_id="r1", attempt=1, prefill=WORKER),
    m.AbortTask(request_id="r1", attempt=1),
    m.PutGranted(asker=WORKER, ticket=1, store=WORKER, keys=[KEY], places=PLACES),
    m.PinGranted(asker=WORKER, ticket=1, store=WORKER, num_blocks=2, places=PLACES),
    m.PutStart(writer=WORKER, ticket=1, keys=[KEY], head=m.ChainHead([KEY], 1)),
    m.PutEnd(writer=WORKER, ticket=1, written=[KEY]),
    m.PinBlocks(reader=WORKER, ticket=1, keys=[KEY]),
    m.Unpin(reader=WORKER, ticket=1),
    m.DoubtPeers(worker=WORKER, peers=[WORKER]),
    m.PeersHeard(gateway=WORKER, heard=[WORKER], unheard=[WORKER]),
    m.WhoAreYou(gateway=WORKER),
    m.GatewayNews(
        gateway=WORKER, gateways=[WORKER],
        news=[
            m.Booking(
                request_id="r1", computing=WORKER, decode=WORKER, keys=bytes(range(32)),
                sources=(SOURCE,), num_tokens=9, num_new_tokens=1, prefill_s=0.1, ttft_s=0.2,
                num_blocks=3,
            ),
            m.BookingOver(request_id="r1", prefill_only=True),
        ],
        open=["r1"],
    ),
    m.Replicate(source=WORKER, keys=[KEY]),
    m.Replicate(source=WORKER, keys=[KEY], tenant="t", asker=WORKER, ticket=1),
    m.Prefetch(reader=WORKER, ticket=1, keys=[KEY]),
    m.StopPrefetch(reader=WORKER, ticket=1),
    p.FindBlocks(asker=WORKER, ticket=1, keys=[KEY]),
    p.RemoveBlocks(asker=WORKER, ticket=1, keys=[KEY]),
    p.DescribeBlocks(asker=WORKER, ticket=1, keys=[KEY]),
    p.ForgetBlocks(asker=WORKER, ticket=1, keys=[KEY]),
    p.FindReplicas(asker=WORKER, ticket=1, keys=[KEY], every=True),
    p.ReplicasFound(asker=WORKER, ticket=1, stores=[WORKER], num_blocks=[1]),
    p.AskPool(asker=WORKER, ticket=1),
    p.FindHomes(asker=WORKER, ticket=1, keys=[KEY]),
    p.HomesFound(asker=WORKER, ticket=1, elsewhere=[True], homes=[p.Home(WORKER, 7)]),
    p.TakeOver(source=WORKER, ticket=1, keys=[KEY], pin=p.LastingPin.SOFT, reused=True),
    p.TakenOver(asker=WORKER, ticket=1, store=WORKER, keys=[KEY], is_full=True),
    p.SetPins(asker=WORKER, ticket=1, keys=[KEY], pin=p.LastingPin.HARD, epoch="e"),
    p.PinsSet(asker=WORKER, ticket=1, store=WORKER, done=[True, False]),
    p.BlocksFound(asker=WORKER, ticket=1, store=WORKER, tiers=[m.Tier.SSD, None]),
    p.BlocksRemoved(asker=WORKER, ticket=1, store=WORKER, removed=[True], left=[False]),
    p.BlocksDescribed(
        asker=WORKER, ticket=1, store=WORKER,
        copies=[[p.BlockCopy(m.Tier.DRAM, 64, p.LastingPin.SOFT, 2)], []],
    ),
    p.PoolState(
        asker=WORKER, ticket=1, store=WORKER, load=m.WorkerLoad(), layout_fingerprint="f",
        block_bytes=4096, drain=p.DrainProgress(over=True, num_copied=3),
        tenants=(p.TenantUse("t", m.Tier.SSD, 3, 4),),
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_equal(message: AnyMessage) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@pytest.mark.parametrize("certificate", [b"", b"c", b"c" * 400])
def test_the_senders_certificate_travels_before_the_message(certificate: bytes) -> None:
    data = encode(m.Drain(), head_of(certificate))
    assert certificate_of(data) == certificate
    assert decode(data) == m.Drain()


def test_the_examples_cover_the_whole_union() -> None:
    assert {type(example) for example in EXAMPLES} == set(AnyMessage.__args__)


def test_what_cannot_travel_is_refused_by_the_sender() -> None:
    broken = m.BlockEvents(worker=WORKER, tier=m.Tier.DRAM, sequence_no=object())  # type: ignore[arg-type]  # the point
    with pytest.raises(ProtocolError, match="BlockEvents cannot be encoded"):
        encode(broken)
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        encode(m.Unpin(reader=WORKER, ticket=2**70))


def test_another_version_is_named() -> None:
    data = bytearray(encode(EXAMPLES[0]))
    data[1] = FRAME_VERSION + 1
    with pytest.raises(ProtocolError, match=f"version {FRAME_VERSION + 1}, and this release .* in"):
        decode(bytes(data))


def test_a_field_that_a_later_release_has_added_is_ignored() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(m.Drain(next_role=m.Role.DECODE)))
    later = encode(m.Drain())[:HEAD] + msgspec.msgpack.encode({**plain, "since": [1, 2]})
    assert decode(later) == m.Drain(next_role=m.Role.DECODE)


@pytest.mark.parametrize("named", ["asker", "reader", "writer"])
def test_a_message_that_a_later_release_has_added_says_who_waits_for_an_answer(named: str) -> None:
    later = {"type": "later", named: WORKER, "ticket": 7, "more": {"deep": [1]}}
    with pytest.raises(UnknownMessage, match="has no message of the kind later") as unknown:
        decode(encode(m.Drain())[:HEAD] + msgspec.msgpack.encode(later))
    found = unknown.value
    assert (found.kind, found.asker, found.ticket) == ("later", WORKER, 7)


def test_a_known_message_that_is_malformed_is_no_unknown_one() -> None:
    with pytest.raises(ProtocolError) as wrong:
        decode(encode(m.Drain())[:HEAD] + msgspec.msgpack.encode({"type": "unpin", "ticket": 1}))
    assert not isinstance(wrong.value, UnknownMessage)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"M",
        b"GET / HTTP/1.1\r\n",
        pickle.dumps(["not", "ours"]),
        encode(EXAMPLES[0])[:-3],
        encode(EXAMPLES[0]) + b"\x01",
        encode(EXAMPLES[0])[:HEAD] + msgspec.msgpack.encode({"type": "hello"}),
        encode(EXAMPLES[0])[:HEAD] + msgspec.msgpack.encode({"type": "no_such_message"}),
        encode(EXAMPLES[0])[:HEAD] + msgspec.msgpack.encode([1, 2, 3]),
        encode(EXAMPLES[0])[:HEAD] + b"\x91" * 5000,
        encode(EXAMPLES[0])[:HEAD] + msgspec.msgpack.encode({"type": "abort", "request_id": 5}),
        encode(p.FindBlocks(asker=WORKER, ticket=1, keys=[b"too short"])),
        encode(p.FindBlocks(asker=WORKER, ticket=1, keys=[KEY, KEY + b"."])),
    ],
)
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("prompt", [b"", b"four+", [1, 2, 3], "text"])
def test_prompts_are_whole_token_ids_and_at_least_one(prompt: object) -> None:
    task = m.RequestTask(request=REQUEST, attempt=1, gateway=WORKER, decode=WORKER)
    data = encode(task)
    plain = msgspec.msgpack.decode(data[HEAD:])
    assert decode(data[:HEAD] + msgspec.msgpack.encode(plain)) == task
    plain["request"]["prompt"] = prompt
    with pytest.raises(ProtocolError):
        decode(data[:HEAD] + msgspec.msgpack.encode(plain))


def test_each_truncation_is_a_protocol_error() -> None:
    data = encode(EXAMPLES[3])
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:length])


def test_a_refusal_repeats_little_of_what_was_sent() -> None:
    tagged = msgspec.msgpack.encode({"type": "x" * 9000})
    with pytest.raises(ProtocolError, match=r"a message of 9[0-9]* bytes is malformed") as refused:
        decode(b"M" + bytes((FRAME_VERSION,)) + tagged)
    assert len(refused.value.message) < 500
