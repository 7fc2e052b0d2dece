"""Messages: values with unique tags and defaults, small on the wire, told apart by any codec."""

from __future__ import annotations

import typing

import msgspec
import pytest

from mooncake.base import (
    AbortTask,
    AnyMessage,
    BlockEvents,
    GenerateRequest,
    PinBlocks,
    RequestOutput,
    RequestTask,
    SamplingParams,
    StepOutputs,
    Tier,
    WorkerRef,
    pack_tokens,
)
from mooncake.base.messages import Answer, Message

WORKER = WorkerRef("prefill-0", "e1", "tcp://127.0.0.1:1")
TYPES = typing.get_args(AnyMessage)


def test_every_message_travels() -> None:
    bases = (Message, Answer)
    kinds = {kind for base in bases for kind in base.__subclasses__()} - {*bases}
    assert kinds == set(TYPES)


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in TYPES]
    assert len(set(tags)) == len(tags)
    assert all(tags)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_messages_are_values(kind: type[Message]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert config.omit_defaults


def test_a_message_cannot_be_changed_after_it_was_sent() -> None:
    message = AbortTask(request_id="r", attempt=1)
    with pytest.raises(AttributeError):
        message.attempt = 2  # type: ignore[misc]


def test_the_union_tells_messages_apart() -> None:
    request = GenerateRequest(request_id="r", prompt=pack_tokens([1]), sampling=SamplingParams())
    messages: list[AnyMessage] = [
        AbortTask(request_id="r", attempt=1),
        PinBlocks(reader=WORKER, ticket=3, keys=[b"k" * 16]),
        BlockEvents(worker=WORKER, tier=Tier.DRAM, sequence_no=1, stored=[b"a" * 16]),
        RequestTask(request=request, attempt=1, gateway=WORKER, decode=WORKER),
        StepOutputs(
            worker=WORKER,
            outputs=[RequestOutput(request_id="r", attempt=1, start=0, tokens=[7])],
        ),
    ]
    for message in messages:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AnyMessage) == message


def test_what_has_its_default_is_not_sent() -> None:
    event = BlockEvents(worker=WORKER, tier=Tier.HBM, sequence_no=1)
    names = msgspec.msgpack.decode(msgspec.msgpack.encode(event)).keys()
    assert names == {"type", "worker", "tier", "sequence_no"}


def test_lists_are_not_shared_between_messages() -> None:
    first = BlockEvents(worker=WORKER, tier=Tier.HBM, sequence_no=1)
    first.stored.append(b"x" * 16)
    assert BlockEvents(worker=WORKER, tier=Tier.HBM, sequence_no=2).stored == []


def test_unknown_and_misshapen_messages_are_refused() -> None:
    for broken in ({"type": "nonsense"}, {"type": "abort"}, {"type": "abort", "attempt": "x"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=AnyMessage)
